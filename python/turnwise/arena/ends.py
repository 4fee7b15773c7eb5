"""Scores of the ends of an episode that has several: each as if it had been the only one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from turnwise.arena.context import EpisodeContext, inside, resolve
from turnwise.arena.invalid_action import failed_step
from turnwise.arena.reward_values import keep_tokens
from turnwise.arena.rubric import Score
from turnwise.arena.scheduler import run_all
from turnwise.state import prune, to_python
from turnwise.types import EpisodeState, GenerateResult, Rollout, Step

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena
    from turnwise.arena.episode import Episode


def settle(state: EpisodeState, rollout: Rollout, children: Sequence[GenerateResult]) -> None:
    """Steps in the order in which they were asked for, whatever answered first; each child once, whoever added it."""
    order = {id(step): index for index, step in enumerate(rollout.steps)}
    state.trajectory = sorted(state.trajectory or rollout.steps, key=lambda step: order.get(id(step), len(order)))
    unique = {id(result): result for result in (*state.child_results, *children)}
    state.child_results = list(unique.values())


def aside_of(rollout: Rollout, steps: Sequence[Step]) -> Rollout:
    """A rollout of ``steps`` alone, on whose account hooks and reward functions may write without a trace."""
    return replace(rollout, steps=list(steps), rewards={}, extras={}, metrics={}, meta=dict(rollout.meta))


async def score_end(
    episode: Episode, arena: Arena, scope: EpisodeContext, children: Sequence[GenerateResult] = ()
) -> tuple[Score, dict[str, Any]]:
    """What the rubric says of ``scope.state`` after ``scope.rollout.steps``, and the extras that it saw."""
    rollout, state = scope.rollout, scope.state
    with inside(scope):
        settle(state, rollout, children)
        return await score_state(episode, arena, rollout, state), rollout.extras


async def score_state(episode: Episode, arena: Arena, rollout: Rollout, state: EpisodeState) -> Score:
    """What the rubric says of ``state``, with the extras, which are set.

    It is not asked where a text was no action: that step's reward is its actor's, and every metric is 0.
    """
    if (failed := failed_step(state)) is not None:
        actors = {step.actor_id for step in rollout.steps} - {None}
        zeros = {f"{name}/{actor}": 0.0 for name in episode.rubric.names for actor in sorted(map(str, actors))}
        return Score({str(failed.actor_id): float(failed.reward or 0.0)}, zeros)
    rollout.extras = to_python(dict(await resolve(episode.get_extras(state)) or {}))
    return await episode.rubric.score(rollout, arena, state)


async def score_ends(episode: Episode, arena: Arena, context: EpisodeContext) -> Score:
    """Score each of ``context.ends``, and return what holds for the whole rollout, whose extras are set.

    ``meta["ends"]`` then has a dict for each: ``rewards`` and ``metrics`` by name, ``origin`` (node, branch),
    ``ended``, ``score``, and ``dropped``, why the rubric dropped it. ``step.info["ends"]`` lists the ends that a step
    led to.
    """
    rollout, ends, own = context.rollout, context.ends, context.rollout.meta["own_end"]
    places = {id(step): place for place, step in enumerate(rollout.steps)}
    scopes = []
    for number, end in enumerate(ends):
        end.steps.sort(key=lambda step: places[id(step)])
        for step in end.steps:
            step.info.setdefault("ends", []).append(number)
        scope = context.branch(f"end{number}", end.state)
        scope.luck, scope.private = end.context.luck.copy(), end.context.private.copy()
        scope.rollout = aside_of(rollout, end.steps)
        scopes.append(scope)
    try:
        scored = await run_all(
            score_end(episode, arena, scope, end.children) for scope, end in zip(scopes, ends, strict=True)
        )
    finally:
        for scope in scopes:
            context.adopt(scope, selected=False)
            rollout.steps += [step for step in scope.steps if step is not None]
    for scope, (score, _) in zip(scopes, scored, strict=True):
        keep_tokens(scope.rollout, score.token_rewards)
    for number, end in enumerate(ends):
        if number != (own or 0):
            prune(end.state.data)
    rollout.extras = scored[own or 0][1]
    rollout.meta["ends"] = [
        {
            "rewards": dict(score.rewards),
            "metrics": dict(score.metrics),
            "origin": end.origin and list(end.origin),
            "ended": end.ended,
            "score": end.score,
            "dropped": score.dropped,
        }
        for (score, _), end in zip(scored, ends, strict=True)
    ]
    for step in rollout.steps:
        led_to = [rollout.meta["ends"][number]["dropped"] for number in step.info.get("ends", ())]
        if led_to and None not in led_to:
            step.trainable = False
            step.info["error"] = f"the rubric dropped it: {led_to[0]}"
    return Score(*summary(rollout.meta))


def summary(meta: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float], str | None]:
    """Rewards, metrics and the reason for dropping it of a rollout with several ends: those of its own end, or the mean
    over all, where none is its own."""
    ends, own = meta["ends"], meta["own_end"]
    if own is not None:
        return dict(ends[own]["rewards"]), dict(ends[own]["metrics"]), ends[own]["dropped"]
    kept = [end for end in ends if end["dropped"] is None]
    if not kept:
        return {}, {}, ends[0]["dropped"]
    return _means([end["rewards"] for end in kept]), _means([end["metrics"] for end in kept]), None


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}
