"""Plans which actors of a task an evaluation leaves out, through the task's ``with_actors``."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.tasks.base import SplittableTask, Task
from turnwise.train.eval.ablate import Ablation, SubTeam
from turnwise.utils.registry import did_you_mean

ALL = "all"


def ablations_of(task: Task, names: Sequence[str] = (ALL,)) -> list[Ablation]:
    """Return the sub_teams that measure the actors ``names``; ``"all"`` means every actor of the task.

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
    found, problems = [], {}
    for name in ids if ALL in names else dict.fromkeys(names):
        without, problem = _sub_team(task, [actor for actor in ids if actor != name])
        alone, _ = _sub_team(task, [name])
        if without is None and ALL not in names:
            raise ValueError(
                f"task {task.name!r} can't be played without {name!r}: with_actors says: {problem}. Name another "
                f"actor, or {ALL!r} for all that it can leave out"
            )
        found.append(Ablation(name, without, alone))
        problems[name] = problem
    if not any(ablation.without or ablation.alone for ablation in found):
        reason = next(iter(problems.values()))
        raise ValueError(f"task {task.name!r} needs all of its actors: with_actors says: {reason}")
    return found


def _sub_team(task: SplittableTask, actors: Sequence[str]) -> tuple[SubTeam | None, str]:
    """Return the sub_team of ``actors``, or ``None`` and the reason why they can't play."""
    try:
        team = task.with_actors(tuple(actors))
        return SubTeam(tuple(actors), team.episodes(), team.success_metric), ""
    except ValueError as error:
        return None, str(error)
