"""Sections of what becomes of rewards: their mix, credit, filters, the draw of questions, and tasks of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from turnwise.arena.rewards.mix import RewardMix
from turnwise.arena.setup import mix_of, reward_problems
from turnwise.arena.stages.dynamic_sampling import check_stateless
from turnwise.settings.section import RunFacts, Section, trial
from turnwise.train.config.features import with_features
from turnwise.types import CreditCapabilities, capabilities_of
from turnwise.utils.values import problem


class CreditConfig(Section):
    """The credit rule, which turns rewards into advantages."""

    rule: str = "task"
    """Name in ``turnwise.credit.registry``, or ``module:Class``; ``task`` is the task's own rule."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the rule's class."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        for alone in run.each if run.task is not None else ():
            assert alone.task is not None
            try:
                credit = alone.task.credit
            except ValueError as error:
                yield f"{alone.within}{error}"
                continue
            own, rollout = alone.config.credit, alone.config.rollout
            if reason := rollout.tree.refused_by(capabilities_of(credit, CreditCapabilities), rollout.branches):
                yield alone.within + problem("credit.rule", reason, own.rule)


@with_features("reward")
class RewardConfig(Section):
    """Rewards before credit: the mix of the team's outcome and the actor's own part, turns, and penalties."""

    alpha: float | None = Field(default=None, ge=0)
    """Weight of the team's outcome, relative to the actor's own part; by default the task's own."""
    mode: Literal["weighted_sum", "convex"] | None = None
    """``weighted_sum`` is ``alpha * team + own``, ``convex`` is ``alpha * team + (1 - alpha) * own``."""
    difference: float | None = Field(default=None, ge=0)
    """Weight of an action's change of the team's value: fixing pays, breaking costs. By default the task's own."""
    threshold: float | None = None
    """Value from which the mix counts as 1, below as 0; by default it counts as it is."""
    turn_shaping: Literal["none", "ramp", "discount"] | None = None
    """Factor of the mix: ``(turn + 1) / max_turns`` (ramp), or ``gamma ** (last turn - turn)`` (discount)."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """Base of ``turn_shaping = "discount"``."""
    invalid_cost: float | None = Field(default=None, ge=0)
    """Cost of a completion that can't be read; by default the task's own."""

    def of_mix(self) -> dict[str, Any]:
        """Return the keys of :class:`turnwise.arena.RewardMix` that are set."""
        return self.model_dump(exclude_none=True, include={field.name for field in fields(RewardMix)})

    def of_stages(self) -> list[str]:
        """Return the keys of stages that are set."""
        return sorted(self.model_dump(exclude_defaults=True).keys() - {field.name for field in fields(RewardMix)})

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        for alone in run.each:
            yield from (alone.within + line for line in alone.config.reward._misfits(alone))

    def _misfits(self, run: RunFacts) -> Iterator[str]:
        """Yield a line for each setting that doesn't fit the credit rule or the episodes of one task."""
        rule, reward, can = run.config.credit.rule, self.of_mix(), capabilities_of(run.credit, CreditCapabilities)
        if self.turn_shaping not in (None, "none") and not can.step_rewards:
            why = f"the rule {rule!r} does not compare the rewards of single calls: expected a rule such as 'grpo',"
            yield problem("reward.turn_shaping", f"{why} 'dr_mas' or 'at_grpo'", self.turn_shaping)
            return
        for name, value in sorted(self.model_dump(exclude_defaults=True).items()) if not can.mixed_rewards else ():
            why = f"has no effect, as advantages of the rule {rule!r} don't depend on the rewards of calls"
            yield problem(f"reward.{name}", f"{why}: expected no setting here", value)
        unserved = reward_problems(run.episodes, reward)
        yield from (problem(f"reward.{name}", reason, reward[name]) for name, reason in unserved)
        for episode in run.episodes.values() if not unserved else ():
            try:
                mix_of(episode, reward)
            except ValueError as error:
                yield f"config section 'reward': {error}"


class TaskConfig(Section):
    """One task of several in a run; a step asks questions of each in shares of their weights."""

    task: str | None = None
    """Name of a shipped task, or ``module:Class``; by default the name of this table."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task."""
    weight: float = Field(default=1.0, gt=0)
    """Share of a step's questions, relative to the weights of the other tasks."""
    credit: CreditConfig | None = None
    """Credit rule of this task; by default that of ``[credit]``."""
    reward: RewardConfig | None = None
    """Rewards of this task; by default those of ``[reward]``."""


@with_features("curriculum")
class CurriculumConfig(Section):
    """Draw of the training questions, by default the task's own."""

    sampling: Literal["task", "learnability"] = "task"
    """Rule of the draw: the task's own, or learnability ``p (1 - p)`` of each question's solve rate ``p``."""
    pool: int | None = Field(default=None, ge=1)
    """Training questions to draw from; by default all, for which the task must list its questions."""
    uniform: float = Field(default=0.1, gt=0, le=1)
    """Share of the draws that ignores solve rates, so that always and never solved questions come again."""
    window: int = Field(default=32, ge=1)
    """Attempts over which the solve rate of a question is averaged; the newest count most."""
    gate: float | None = Field(default=None, gt=0, le=1)
    """Solve rate of a level that admits the next one; by default all levels are admitted from the start."""

    @model_validator(mode="after")
    def _check_used(self) -> Self:
        changed = sorted(self.model_dump(exclude_defaults=True))
        if changed and self.sampling == "task":
            raise ValueError(f"{changed[0]} has no effect with sampling = 'task': expected sampling = 'learnability'")
        return self


@with_features("filter")
class FilterConfig(Section):
    """Samples that don't train; they still count in the statistics of their group."""

    drop_zero_advantage: bool = True
    """Drop samples whose advantage is 0, but those that another term of the loss trains, such as ``loss.kl``."""
    drop_truncated: bool = False
    """Drop completions that reached the token limit."""
    max_length: int | None = Field(default=None, ge=2)
    """Drop samples with more tokens in prompt and completion; by default none."""
    dynamic_sampling_rounds: int = Field(default=0, ge=0)
    """Most extra batches of a step until enough prompts have an advantage (https://arxiv.org/abs/2503.14476, 3.2)."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        rounds = self.dynamic_sampling_rounds
        for credit in [alone.credit for alone in run.each if alone.credit is not None] if rounds else ():
            yield from trial(f"{key}.dynamic_sampling_rounds", rounds, partial(check_stateless, credit))
