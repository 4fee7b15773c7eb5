"""Parts of a run that its config asks for: the tree, the sub-teams of ablations, and the callbacks of self-play."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, cast

from turnwise.arena import Arena, Episode, Stage
from turnwise.arena.stages.registry import stages_of
from turnwise.arena.stages.stage import RunParts
from turnwise.credit import build_rule
from turnwise.credit.by_task import CreditByTask
from turnwise.tasks.base import Demonstration, SplittableTask, Task, held_out, task_problems
from turnwise.tasks.several import SeveralTasks
from turnwise.train.callbacks import Callback, TrainerView
from turnwise.train.config.rewards import CreditConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.eval.ablate import Ablation, EvalSet, SubTeam
from turnwise.train.health.guard import build_guard
from turnwise.train.league.build import build_league
from turnwise.types import (
    Actor,
    CreditAssigner,
    EpisodeRequest,
    GenerateResult,
    InferenceClient,
    TaskCapabilities,
    capabilities_of,
)
from turnwise.utils.registry import did_you_mean


class FactsOfTask:
    """What the sections of ``config`` ask about its task (:class:`~turnwise.settings.section.TaskFacts`).

    ``config`` has a policy for every actor, and ``actors`` are the task's with their policies and limits.
    """

    def __init__(self, config: TrainConfig, task: Task, actors: Sequence[Actor]) -> None:
        self.config, self.task, self.actors = config, task, actors
        self.name = task.name
        self.seats = capabilities_of(task, TaskCapabilities).seats

    @cached_property
    def parts(self) -> dict[str, tuple[TrainConfig, FactsOfTask]]:
        if not isinstance(self.task, SeveralTasks):
            return {}
        return {
            name: (one, FactsOfTask(one, part, part.actors))
            for name, (one, part) in parts_of(self.config, self.task).items()
        }

    @cached_property
    def credit(self) -> CreditAssigner:
        return build_credit(self.config, self.task)

    @cached_property
    def episodes(self) -> dict[str, Episode]:
        tree = None
        with suppress(ValueError):  # [rollout.tree] tells it
            tree = self.config.rollout.tree.sampler(self.config.rollout.branches, self.config.steps)
        return self.task.episodes(tree)

    @cached_property
    def questions(self) -> list[EpisodeRequest]:
        return self.task.requests(1, self.config.rollout.prompts_per_step, 1)

    @cached_property
    def held_out(self) -> tuple[list[EpisodeRequest], list[EpisodeRequest]]:
        settings = self.config.eval
        validation = held_out(self.task, "validation", settings.num_prompts) if settings.every else []
        return held_out(self.task, "eval", settings.num_prompts), validation

    @cached_property
    def ablations(self) -> list[Ablation]:
        return ablations_of(self.task) if self.config.eval.ablate else []

    @cached_property
    def demonstrations(self) -> list[Demonstration]:
        return self.task.demonstrations(1, self.config.seed)

    @cached_property
    def decisions(self) -> list[Any] | None:
        return None if exploitability_of(self.task) is None else cast("Any", self.task).decisions()

    def problems(self, questions: Sequence[EpisodeRequest], *, measured: bool = True) -> list[str]:
        if isinstance(self.task, SeveralTasks):
            return self.task.problems(questions, measured=measured)
        return task_problems(self.task, self.task.episodes(), questions, measured=measured)


def parts_of(config: TrainConfig, task: Task) -> dict[str, tuple[TrainConfig, Task]]:
    """Return each of several tasks with its config, by name; one task under its own name."""
    if not isinstance(task, SeveralTasks):
        return {task.name: (config, task)}
    alone = {name: config.of_task(name) for name in task.parts}
    return {name: (with_default_credit(part.task, alone[name]), part.task) for name, part in task.parts.items()}


def with_default_credit(task: Task, config: TrainConfig) -> TrainConfig:
    """Replace ``credit.rule = "task"`` by the task's own credit rule; of several tasks each gets its section."""
    if isinstance(task, SeveralTasks):
        rules = {name: with_default_credit(part.task, config.of_task(name)).credit for name, part in task.parts.items()}
        own = {name: one.model_copy(update={"credit": rules[name]}) for name, one in config.tasks.items()}
        return config.model_copy(update={"tasks": own, "credit": CreditConfig()})
    if config.credit.rule != "task":
        return config
    declared = capabilities_of(task, TaskCapabilities)
    credit = {"rule": declared.credit_rule, "options": {**declared.credit_options, **config.credit.options}}
    return config.model_copy(update={"credit": config.credit.model_copy(update=credit)})


def build_credit(config: TrainConfig, task: Task) -> CreditAssigner:
    """Build the rule that ``credit.rule`` names, with ``credit.options``, for each of several tasks its own.

    Raises :class:`ConfigError`.
    """
    if isinstance(task, SeveralTasks):
        rules = {name: build_credit(one, part) for name, (one, part) in parts_of(config, task).items()}
        return CreditByTask(rules, task.part_of_type())
    try:
        rule: CreditAssigner = build_rule(config.credit.rule, config.credit.options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return rule


def episodes_of(config: TrainConfig, task: Task) -> dict[str, Episode]:
    """Build the task's episodes, with the tree of ``[rollout]`` if it sets one."""
    return task.episodes(config.rollout.tree.sampler(config.rollout.branches, config.steps))


def eval_sets(config: TrainConfig, task: Task) -> tuple[EvalSet, EvalSet]:
    """Return the held-out questions and the validation questions; the latter are empty without validation."""
    facts = FactsOfTask(config, task, task.actors)
    held, validation = facts.held_out
    return EvalSet(held, task.success_metric), EvalSet(validation, task.success_metric, facts.ablations)


def build_stages(config: TrainConfig, task: Task, actors: Sequence[Actor] = ()) -> list[Stage]:
    """Build the stages that ``config`` adds to an arena. Raises :class:`ConfigError`."""
    try:
        return stages_of(RunParts(config=config, task=task, actors=actors))
    except ValueError as error:
        raise ConfigError(str(error)) from error


ALL = "all"


def ablations_of(task: Task, names: Sequence[str] = (ALL,)) -> list[Ablation]:
    """Return the sub-teams that measure the actors ``names``; ``"all"`` means every actor of the task.

    Raises ``ValueError`` for unknown actors, for a task without ``with_actors``, and for a named actor without which
    the task can't be played. With ``"all"`` it raises only if no actor can be left out or play alone.
    """
    ids = [actor.id for actor in task.actors]
    if unknown := [name for name in names if name not in (*ids, ALL)]:
        raise ValueError(f"task {task.name!r} has no actor {unknown[0]!r}; {did_you_mean(unknown[0], [*ids, ALL])}")
    if len(ids) < 2:
        raise ValueError(f"task {task.name!r} has one actor, {ids[0]!r}: expected a team")
    if not isinstance(task, SplittableTask):
        raise ValueError(
            f"task {task.name!r} has no method with_actors(actors), which returns the task for some of its actors: "
            "see turnwise.tasks.Task"
        )
    ablations, problems = [], {}
    for name in ids if ALL in names else dict.fromkeys(names):
        without, problem = _sub_team(task, [actor for actor in ids if actor != name])
        alone, _ = _sub_team(task, [name])
        if without is None and ALL not in names:
            raise ValueError(
                f"task {task.name!r} can't be played without {name!r}: with_actors says: {problem}. Name another "
                f"actor, or {ALL!r} for all that it can leave out"
            )
        ablations.append(Ablation(name, without, alone))
        problems[name] = problem
    if not any(ablation.without or ablation.alone for ablation in ablations):
        reason = next(iter(problems.values()))
        raise ValueError(f"task {task.name!r} needs all of its actors: with_actors says: {reason}")
    return ablations


def _sub_team(task: SplittableTask, actors: Sequence[str]) -> tuple[SubTeam | None, str]:
    """Return the sub-team of ``actors``, or ``None`` and the reason why they can't play."""
    try:
        team = task.with_actors(tuple(actors))
        episodes = team.episodes()
    except ValueError as error:
        return None, str(error)
    measured = team.success_metric.partition("/")[2]
    if measured not in ("", *actors, *capabilities_of(team, TaskCapabilities).measured):
        raise ValueError(
            f"task {team.name!r}: with_actors({tuple(actors)!r}) gave success_metric={team.success_metric!r}, expected "
            "that of one of these actors"
        )
    return SubTeam(tuple(actors), episodes, team.success_metric), ""


Measure = Callable[[Arena], Awaitable[Mapping[str, float]]]
"""Measurement of the policies behind an arena's actors: values by metric name."""


def exploitability_of(task: Task) -> Measure | None:
    """Return the exploitability measure of ``task``, or ``None`` for a task that is not solved exactly."""
    from turnwise.tasks.two_player import SolvedGame, measure_exploitability

    return partial(measure_exploitability, game=task) if isinstance(task, SolvedGame) else None


class ExploitabilityProbe(Callback):
    """Measures before the first step and after every ``every`` steps, and logs the result."""

    name = "probe"

    def __init__(self, measure: Measure, every: int) -> None:
        self.measure, self.every = measure, every

    async def on_start(self, trainer: TrainerView) -> None:
        if trainer.progress.step == 0:
            trainer.log.add(0, {**await self._measured(trainer), "total_sampled_tokens": 0})

    async def after_step(self, trainer: TrainerView, results: Sequence[GenerateResult]) -> Mapping[str, float]:
        return {} if trainer.progress.step % self.every else await self._measured(trainer)

    async def _measured(self, trainer: TrainerView) -> Mapping[str, float]:
        metrics = await self.measure(trainer.arena)
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        trainer.log.note(f"step {trainer.progress.step}: {values}")
        trainer.client_metrics.take()  # the measurement doesn't count as the step's sampling
        return metrics


def build_callbacks(
    config: TrainConfig,
    actors: Sequence[Actor],
    seats: Sequence[str],
    client: InferenceClient,
    measure: Measure | None,
) -> list[Callback]:
    """Build the callbacks of ``config``."""
    league = build_league(config, actors, seats, client)
    every = config.eval.exploitability_every
    probe = ExploitabilityProbe(measure, every) if every and measure is not None else None
    return [callback for callback in (league, build_guard(config, seats), probe) if callback is not None]
