"""Parts of a run that its config asks for: the tree, the sub-teams of ablations, and the callbacks of self-play."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from turnwise.arena import Arena, Episode, Stage, TreeSampler
from turnwise.arena.stages.registry import stages_of
from turnwise.arena.stages.stage import RunParts
from turnwise.credit import registry
from turnwise.credit.columns import needs_several_attempts
from turnwise.tasks.base import SplittableTask, Task
from turnwise.train.callbacks import Callback, TrainerView
from turnwise.train.config.sampling import TreeConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.eval.ablate import Ablation, SubTeam
from turnwise.train.health.guard import build_guard, check_health
from turnwise.train.league.build import build_league, check_league
from turnwise.train.terms.registry import terms_on
from turnwise.types import (
    Actor,
    CreditAssigner,
    CreditCapabilities,
    GenerateResult,
    InferenceClient,
    TaskCapabilities,
    capabilities_of,
)
from turnwise.utils.registry import did_you_mean


def sampler_of(config: TrainConfig, actors: Sequence[str]) -> TreeSampler | None:
    """Build the tree of ``rollout.branches`` and ``rollout.tree``, or ``None``. Raises :class:`ConfigError`."""
    branches, tree = config.rollout.branches, config.rollout.tree
    if branches == 1 and tree == TreeConfig():
        return None
    if unknown := [actor for actor in tree.branch_at or () if actor not in actors]:
        raise ConfigError(
            f"config key 'rollout.tree.branch_at': no actor {unknown[0]!r}; {did_you_mean(unknown[0], actors)}"
        )
    if branches == 1 and not tree.playouts:
        raise ConfigError("config key 'rollout.tree': needs rollout.branches > 1, or rollout.tree.playouts > 0")
    try:
        return TreeSampler(
            branches,
            tree.select,
            tree.temperature,
            tree.branch_at,
            beam_width=tree.beam_width,
            score_by=tree.score_by,
            playouts=tree.playouts,
            best_share=tree.best_share,
            share_steps=config.steps,
        )
    except ValueError as error:
        raise ConfigError(f"config key 'rollout.tree': {error}") from error


def check_choice(config: TrainConfig, episodes: Mapping[str, Episode]) -> None:
    """Raise :class:`ConfigError` for a tree that chooses among actions of an episode that has no rewards for them."""
    for name, episode in episodes.items():
        sampler = getattr(episode, "sampler", None)
        if isinstance(sampler, TreeSampler) and sampler.unreadable(episode):
            select = config.rollout.tree.select or "unset"
            raise ConfigError(
                f"config key 'rollout.tree.select' = {select!r}: episode {name!r} gives single actions no reward "
                "(step_reward), and branches that don't go on have no other: expected 'none', which plays all to their "
                "ends"
            )


def tree_problem(credit: CreditAssigner, config: TrainConfig) -> str:
    """Return why the credit rule and the tree of ``config`` are incompatible; an empty string if they fit."""
    branches, tree, rule = config.rollout.branches, config.rollout.tree, config.credit.rule
    can = capabilities_of(credit, CreditCapabilities)
    plain = branches == 1 or (tree.select == "none" and can.ends)
    if not plain and not can.trees:
        either = ", or rollout.tree.select = 'none'" if can.ends else ""
        return (
            f"config key 'credit.rule' = {rule!r}: the rule needs plain trajectories: expected rollout.branches = 1, "
            f"not {branches}{either}"
        )
    if branches > 1 and not can.ends and (tree.select == "none" or tree.beam_width > 1):
        return (
            f"config key 'credit.rule' = {rule!r}: the rule needs one end for each episode: expected "
            "rollout.tree.beam_width = 1, and rollout.tree.select other than 'none'"
        )
    if can.values_of_states and branches == 1 and not tree.playouts:
        return (
            f"config key 'credit.rule' = {rule!r}: the rule takes the values of states from the branches of a tree or "
            "from playouts: expected rollout.branches > 1, or rollout.tree.playouts > 0"
        )
    if tree.playouts and not can.values_of_states and rule in registry and tree.score_by != "value":
        return (
            f"config key 'rollout.tree.playouts' = {tree.playouts}: has no effect: expected credit.rule = "
            f"'vine', not {rule!r}, or rollout.tree.score_by = 'value'"
        )
    return ""


def comparison_problem(credit: CreditAssigner, config: TrainConfig, task: Task) -> str:
    """Return why no attempt of ``task`` would train, as none is compared with another; an empty string if some would.

    The episodes of a task with several kinds may start each other, and attempts of one parent are compared.
    """
    rollout = config.rollout
    trains_alone = any(term.trains_alone for term in terms_on(config.loss)) or config.teachers() or not config.steps
    if rollout.group_size > 1 or rollout.branches > 1 or rollout.tree.playouts or trains_alone:
        return ""
    if len(task.episodes()) > 1 or not needs_several_attempts(credit):
        return ""
    asked = [request.group_id for request in task.requests(1, rollout.prompts_per_step, 1)]
    if None in asked or len(set(asked)) < len(asked):  # the task itself asks some questions several times
        return ""
    alone = ", or credit.options.singleton = 'raw'" if getattr(credit, "singleton", "") == "zero" else ""
    return (
        f"config key 'rollout.group_size' = 1: {task.name!r} would train nothing, as the rule {config.credit.rule!r} "
        "compares the attempts at a question, and one alone has advantage 0: expected rollout.group_size > 1, "
        f"rollout.branches > 1, a rule that compares none, such as 'rae'{alone}"
    )


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
    if measured not in (*actors, *capabilities_of(team, TaskCapabilities).measured):
        raise ValueError(
            f"task {team.name!r}: with_actors({tuple(actors)!r}) gave success_metric={team.success_metric!r}, expected "
            "that of one of these actors"
        )
    return SubTeam(tuple(actors), episodes, team.success_metric), ""


Measure = Callable[[Arena], Awaitable[Mapping[str, float]]]
"""Measurement of the policies behind an arena's actors: values by metric name."""


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


def check_selfplay(
    config: TrainConfig, actors: Sequence[Actor], seats: Sequence[str], task: str, measure: Measure | None
) -> list[str]:
    """List the problems with the callbacks of ``config`` (with resolved policies), one line each."""
    problems = [*check_league(config, actors, seats, task), *check_health(config, seats)]
    key = f"config key 'eval.exploitability_every' = {config.eval.exploitability_every}"
    if config.eval.exploitability_every and measure is None:
        problems.append(f"{key}: task {task!r} is not solved exactly; expected kuhn_poker or tic_tac_toe")
    elif config.eval.exploitability_every and (config.rollout.client != "transformers" or config.cluster.has_engines):
        problems.append(f"{key}: needs rollout.client = 'transformers', which can score, and no cluster.engines")
    return problems
