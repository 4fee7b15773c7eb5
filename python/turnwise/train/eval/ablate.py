"""Measures each actor's part in a team's success: the same questions are played without it, and by it alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnwise.arena import Arena, Episode
from turnwise.train.eval.evaluate import Evaluation, compare, evaluate
from turnwise.train.eval.statistics import PairedDifference
from turnwise.types import EpisodeRequest, Sampling


@dataclass(frozen=True, slots=True)
class SubTeam:
    """Some actors of a team, and how they play its questions.

    Example: ``SubTeam(("proposer",), {"sudoku": SudokuEpisode(actors=("proposer",))}, "solved/proposer")``
    """

    actors: tuple[str, ...]
    """The actors that play."""
    episodes: Mapping[str, Episode]
    """Their episodes, by the types that the team's requests name."""
    metric: str
    """Their success metric."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """An actor to measure. ``None`` marks a sub-team that can't play the task."""

    actor: str
    without: SubTeam | None
    """The team without the actor."""
    alone: SubTeam | None
    """The actor alone."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Held-out episodes and the rubric metric that counts as success. ``ablations`` are the actors to leave out."""

    requests: Sequence[EpisodeRequest]
    metric: str
    ablations: Sequence[Ablation] = ()


@dataclass(frozen=True, slots=True)
class Addition:
    """Measured success with one actor bypassed, and with it alone; ``None`` where that can't be played."""

    actor: str
    without: Evaluation | None
    """The team without the actor."""
    difference: PairedDifference | None
    """The team minus the team without the actor, on the same questions with the same seeds."""
    alone: Evaluation | None
    """The actor alone."""


async def ablate(
    arena: Arena,
    requests: Sequence[EpisodeRequest],
    team: Evaluation,
    ablations: Sequence[Ablation],
    sampling: Sampling | None = None,
) -> list[Addition]:
    """Evaluate each sub-team of ``ablations`` once on ``requests``; ``team`` is the whole team's evaluation on them.

    Actors keep their prompts, policies and weights. Pass the ``sampling`` of the team's evaluation.
    """
    measured: dict[tuple[str, ...], Evaluation] = {}

    async def play(sub_team: SubTeam | None) -> Evaluation | None:
        if sub_team is None:
            return None
        if sub_team.actors not in measured:
            # Without the other actors a call of one of them is an error, and their policies aren't needed.
            view = copy.copy(arena)
            view.actors = {actor: arena.actors[actor] for actor in sub_team.actors}
            view.episodes = dict(sub_team.episodes)
            measured[sub_team.actors] = await evaluate(view, requests, sub_team.metric, sampling, samples=team.samples)
        return measured[sub_team.actors]

    additions = []
    for ablation in ablations:
        without, alone = await play(ablation.without), await play(ablation.alone)
        difference = None if without is None else compare(team, without)
        additions.append(Addition(ablation.actor, without, difference, alone))
    return additions


def addition_metrics(team: Evaluation, additions: Sequence[Addition] = ()) -> dict[str, float]:
    """Return metrics of each actor: counts and rates of its contribution, success without it and alone.

    Example: ``{"reviser/handed": 40, "reviser/changed": 0.25, "reviser/fixed": 0.1, "reviser/without": 0.55, ...}``
    """
    metrics: dict[str, float] = {}
    for actor, made in team.contributions.items():
        counts = {"handed": made.handed, "wrong": made.wrong, "right": made.right}
        metrics |= {f"{actor}/{name}": value for name, value in (counts | made.rates()).items()}
    for addition in additions:
        for name, played in (("without", addition.without), ("alone", addition.alone)):
            if played is not None and not played.gap:
                metrics[f"{addition.actor}/{name}"] = played.success
    return metrics
