"""Gives the rewards and the reward functions of an actor one denominator: the episodes in which it acted.

An episode that another actor's invalid action ended pays an actor nothing, and a function may leave an actor out. Both
count as 0, so that a mean reward is the weighted sum of the means of its functions. A function that names an actor in
no episode has no value for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from turnwise.types import CHILD_ACTORS, Rollout

COUNTS = ("gateway/", "tool_calls/")
"""Beginnings of the metrics that count calls."""

UNSCORED = "invalid_action"
"""Value of ``ended`` of an episode, or of an end of a tree, for which the rubric was not called."""


class RewardFacts(NamedTuple):
    """What a rubric declares of a reward function: its weight, and the bounds of its values, if it has any."""

    weight: float
    bounds: tuple[float, float] | None = None


Rubrics = Mapping[str, Mapping[str, RewardFacts]]
"""The reward functions of each type of episode."""


def metric_value(metrics: Mapping[str, float], name: str) -> float | None:
    """Return the metric ``name`` of an episode; ``None`` if the episode has none.

    A name without an actor is the mean over the actors that have the metric.

    Example: ``metric_value({"right/solver": 1.0, "right/checker": 0.0}, "right")`` is 0.5.
    """
    if name in metrics or "/" in name:
        return metrics.get(name)
    own = [value for key, value in metrics.items() if key.startswith(f"{name}/")]
    return sum(own) / len(own) if own else None


def measuring(rollouts: Sequence[Rollout], metric: str, rubrics: Rubrics) -> set[str]:
    """Return the types of finished ``rollouts`` that have ``metric``. Each of their episodes counts, without it as 0.

    A type has it if an episode has, or if no episode was scored and ``rubrics`` name its function.
    """
    kinds: set[str] = set()
    unscored: dict[str, bool] = {}
    for rollout in rollouts:
        kind = rollout.episode_type
        if metric_value(rollout.metrics, metric) is not None:
            kinds.add(kind)
        scored = [end.scored for end in _ends(rollout)] or [True]  # the rubric dropped it
        unscored[kind] = unscored.get(kind, True) and not any(scored)
    function = metric.partition("/")[0]
    return kinds | {kind for kind, none in unscored.items() if none and function in rubrics.get(kind, ())}


@dataclass(slots=True)
class End:
    """One end of a finished episode: what it paid, and the actors that acted up to it."""

    rewards: dict[str, float]
    metrics: dict[str, float]
    scored: bool
    actors: set[str]


Shape = tuple[str, Any, tuple[str, ...], tuple[str, ...], Any, frozenset[str | None]]
"""Of a rollout with one end: its type and task, the names of its rewards and metrics, how it ended, and who acted."""


class Outcomes:
    """Fills in what ``rollouts``, finished ones of one batch, paid. Types without ``rubrics`` stay as they are.

    Example: ``Outcomes(rollouts, arena.reward_functions).of(rollout)`` is ``({"buyer": 0.0}, {"gain/buyer": 0.0})``.
    """

    def __init__(self, rollouts: Sequence[Rollout], rubrics: Rubrics) -> None:
        self.rubrics = rubrics
        self.named: defaultdict[str, set[str]] = defaultdict(set)
        self.paid: defaultdict[str, set[str]] = defaultdict(set)
        self.acted: defaultdict[str, set[str]] = defaultdict(set)
        unscored: defaultdict[str, set[str]] = defaultdict(set)
        # Most rollouts of a type have one shape, and nothing to fill in.
        same: defaultdict[Shape, list[Rollout]] = defaultdict(list)
        others: list[Rollout] = []
        for rollout in rollouts:
            shape = _shape_of(rollout) if rollout.episode_type in rubrics else None
            (others if shape is None else same[shape]).append(rollout)
        for rollout in (*others, *(alike[0] for alike in same.values())):
            if functions := rubrics.get(rollout.episode_type):
                for end in _ends(rollout):
                    kind = rollout.episode_type
                    self.acted[kind] |= end.actors
                    (self.paid if end.scored else unscored)[kind].update(end.rewards)
                    if end.scored:
                        self.named[kind].update(name for name in end.metrics if name.partition("/")[0] in functions)
        for kind, actors in unscored.items():
            if kind not in self.paid:  # no episode of the batch was scored
                self.paid[kind] = actors
        self._whole = {id(each): each for shape, alike in same.items() if self._is_whole(shape) for each in alike}

    def of(self, rollout: Rollout) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return the rewards by actor, and the metrics by name."""
        if id(rollout) in self._whole:
            return rollout.rewards, rollout.metrics
        functions = self.rubrics.get(rollout.episode_type)
        ends = list(_ends(rollout)) if functions else []
        if not functions or not ends:
            return rollout.rewards, rollout.metrics
        rewards = _means([self._rewards(rollout.episode_type, end) for end in ends])
        metrics = _means([self._metrics(rollout.episode_type, functions, end) for end in ends])
        task = f"{rollout.facts.task}/"
        labelled = any(name.startswith(task) for name in rollout.metrics)
        metrics |= {
            name: value
            for name, value in rollout.metrics.items()
            if name.partition("/")[0] not in functions and not name.startswith(task)
        }
        if labelled:  # the labels of a run with several tasks
            own = {name: value for name, value in metrics.items() if not name.startswith(COUNTS)}
            own |= {f"reward/{actor}": reward for actor, reward in rewards.items()}
            metrics |= {f"{task}{name}": value for name, value in own.items()}
        return rewards, metrics

    def _is_whole(self, shape: Shape) -> bool:
        kind, task, rewards, metrics, ended, actors = shape
        missing = ((actors & self.paid[kind]) - set(rewards)) | (self.named[kind] - set(metrics))
        return not missing and ended != UNSCORED and not any(name.startswith(f"{task}/") for name in metrics)

    def _rewards(self, kind: str, end: End) -> dict[str, float]:
        actors = [actor for actor in {**end.rewards, **dict.fromkeys(sorted(end.actors))} if actor in self.paid[kind]]
        return {actor: end.rewards.get(actor, 0.0) for actor in actors}

    def _metrics(self, kind: str, functions: Mapping[str, RewardFacts], end: End) -> dict[str, float]:
        found = dict(end.metrics) if end.scored else {}
        for name in sorted(self.named[kind] - found.keys()):
            function, _, actor = name.partition("/")
            acts = actor in end.actors or actor not in self.acted[kind]  # or it is the name of a team
            if acts and (functions[function].weight or not end.scored):
                found[name] = 0.0
        return found


def _shape_of(rollout: Rollout) -> Shape | None:
    meta, facts = rollout.meta, rollout.facts
    if "ends" in meta or CHILD_ACTORS in meta or rollout.error is not None or facts.dropped is not None:
        return None
    actors = frozenset([step.actor_id for step in rollout.steps])
    names = tuple(rollout.rewards), tuple(rollout.metrics)
    return rollout.episode_type, facts.task, *names, meta.get("ended"), actors


def _ends(rollout: Rollout) -> Iterator[End]:
    """Yield the ends that count: the selected one, or all that the rubric did not drop; none of a failed episode."""
    if rollout.error is not None or rollout.facts.dropped is not None:
        return
    children = rollout.meta.get(CHILD_ACTORS, ())
    ends: list[Mapping[str, Any]] | None = rollout.meta.get("ends")
    if ends is None:
        actors = {step.actor_id for step in rollout.steps if step.actor_id is not None}
        scored = rollout.meta.get("ended") != UNSCORED
        yield End(rollout.rewards, rollout.metrics, scored, {*actors, *children})
        return
    own = rollout.facts.own_end
    for number, end in enumerate(ends):
        if end["dropped"] is None if own is None else number == own:
            steps = (step for step in rollout.steps if number in step.info.get("ends", ()))
            actors = {step.actor_id for step in steps if step.actor_id is not None}
            yield End(end["rewards"], end["metrics"], end["ended"] != UNSCORED, {*actors, *children})


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the rows that have it."""
    if len(rows) == 1:
        return dict(rows[0])
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[name].append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}
