"""Soft overlong punishment: a completion that comes close to its token limit loses some of its reward.

    penalty * min(1, max(0, tokens - (limit - buffer)) / buffer)

The loss is 0 up to ``buffer`` tokens before the limit, then grows linearly to ``penalty`` at the limit (DAPO,
https://arxiv.org/abs/2503.14476, eq. 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from pydantic import Field

from turnwise.arena.rewards.leaves import reward_summary
from turnwise.arena.stages.stage import RunParts, Stage
from turnwise.settings.section import Section
from turnwise.types import GenerateResult, Rollout, Step


class OverlongSettings(Section):
    """When the penalty begins, and its height."""

    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before its limit in which a completion loses reward (https://arxiv.org/abs/2503.14476, eq. 13)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward that a completion at its limit loses."""


@dataclass(frozen=True)
class OverlongPenalty(Stage):
    """``buffer`` is in tokens, ``penalty`` in reward. The limit is that of the model call, ``step.facts.max_tokens``.

    Example: ``OverlongPenalty(100, 1.0).of(tokens=450, limit=500) == 0.5``

    The penalty lowers the step's own reward. It also lowers the actor's reward of the rollout, unless the tree did not
    select the step. In a tree with several ends it lowers the actor's reward at each end that the step led to.
    """

    name = "overlong"
    settings = MappingProxyType({"reward": OverlongSettings})
    changes, effect = "rewards", "adds"
    buffer: int
    penalty: float = 1.0

    @classmethod
    def build(cls, run: RunParts) -> Self | None:
        buffer, penalty = run.config.reward.overlong_buffer, run.config.reward.overlong_penalty
        return cls(buffer, penalty) if buffer else None

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ValueError(f"buffer={self.buffer!r}: expected at least 1 token")
        if not self.penalty >= 0:
            raise ValueError(f"penalty={self.penalty!r}: expected a number >= 0")

    def of(self, tokens: int, limit: int) -> float:
        """Return the reward that a completion of ``tokens`` tokens loses under ``limit``."""
        return self.penalty * min(1.0, max(0, tokens - (limit - self.buffer)) / self.buffer)

    def rewarded(self, arena: Any, results: Sequence[GenerateResult]) -> None:
        """Lower the rewards of ``results`` and their children. A step that was seen before keeps its reward.

        Sets ``overlong_penalty`` and ``raw_reward`` in ``step.facts``, and ``raw_rewards`` in ``rollout.facts``.
        """
        for top in results:
            for result in top.walk():
                if result.rollout.error is None:
                    for step in result.rollout.steps:
                        self._apply(result.rollout, step)

    def _apply(self, rollout: Rollout, step: Step) -> None:
        limit, actor = step.facts.max_tokens, step.actor_id
        if actor is None or not step.trainable or limit is None or step.facts.overlong_penalty is not None:
            return
        lost = self.of(len(step.completion_token_ids), limit)
        step.facts.overlong_penalty, step.facts.raw_reward = lost, step.reward
        if rollout.facts.raw_rewards is None:
            rollout.facts.raw_rewards = dict(rollout.rewards)
        if step.reward is not None:
            step.reward -= lost
        for number in step.info.get("ends", ()):
            rewards = rollout.meta["ends"][number]["rewards"]
            if actor in rewards:
                rewards[actor] -= lost
        if "ends" in rollout.meta:
            rollout.rewards = reward_summary(rollout)[0]
        elif step.selected and actor in rollout.rewards:
            rollout.rewards[actor] -= lost
