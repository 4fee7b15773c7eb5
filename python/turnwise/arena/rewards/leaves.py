"""Scores each end of an episode with several ends as if it were the only one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from turnwise.arena.rewards.invalid_action import failed_step
from turnwise.arena.rewards.mix import add_differences
from turnwise.arena.rewards.rubric import Rubric, Score
from turnwise.arena.rewards.token_rewards import keep_tokens
from turnwise.arena.runtime.concurrency import gather_or_cancel
from turnwise.arena.runtime.context import EpisodeContext, use_context
from turnwise.arena.runtime.user_code import close_states, hook
from turnwise.samples.ledger import note_rewards
from turnwise.state import prune, to_python
from turnwise.types import EpisodeState, GenerateResult, Rollout, Step
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.signals import exits_as_errors


class ScoredEpisode(Protocol):
    """The part of an episode that scores a final state."""

    @property
    def rubric(self) -> Rubric: ...

    def get_extras(self, state: EpisodeState) -> Any: ...

    def close(self, state: EpisodeState) -> Any: ...


def finalize_steps(state: EpisodeState, rollout: Rollout, children: Sequence[GenerateResult]) -> None:
    """Sort the steps by the order of their model calls, and keep each child once."""
    order = {id(step): index for index, step in enumerate(rollout.steps)}
    last = len(order)
    state.trajectory = sorted(state.trajectory or rollout.steps, key=lambda step: order.get(id(step), last))
    unique = {id(result): result for result in (*state.child_results, *children)}
    state.child_results = list(unique.values())


def scratch_rollout(rollout: Rollout, steps: Sequence[Step], state: EpisodeState) -> Rollout:
    """Return a rollout of ``steps`` up to ``state``, which may be written to without effect on ``rollout``."""
    return replace(
        rollout,
        artifact=state.artifact,
        steps=list(steps),
        rewards={},
        extras={},
        metrics={},
        meta=dict(rollout.meta),
        facts=replace(rollout.facts),
    )


async def score_leaf(
    episode: ScoredEpisode, arena: ArenaForHooks, scope: EpisodeContext, children: Sequence[GenerateResult] = ()
) -> tuple[Score, dict[str, Any]]:
    """Score ``scope.state`` after ``scope.rollout.steps``. Return the score and the extras."""
    rollout, state = scope.rollout, scope.state
    with use_context(scope), exits_as_errors("a rubric"):
        finalize_steps(state, rollout, children)
        return await score_state(episode, arena, rollout, state), rollout.extras


async def score_state(episode: ScoredEpisode, arena: ArenaForHooks, rollout: Rollout, state: EpisodeState) -> Score:
    """Score ``state`` with the rubric, and set the rollout's extras.

    After an invalid action the rubric is not called. The step's reward is then its actor's, and every metric is 0.
    """
    if (failed := failed_step(state)) is not None:
        actors = {step.actor_id for step in rollout.steps} - {None}
        zeros = {f"{name}/{actor}": 0.0 for name in episode.rubric.names for actor in sorted(map(str, actors))}
        return Score({str(failed.actor_id): float(failed.reward or 0.0)}, zeros)
    rollout.extras = to_python(dict(await hook(episode.get_extras, state) or {}))
    score = await episode.rubric.score(rollout, arena, state)
    before = dict(score.rewards)
    add_differences(score.rewards, state.trajectory, arena.mix_of(rollout.episode_type).difference)
    note_rewards(rollout, "difference", before, score.rewards)
    return score


async def score_leaves(episode: ScoredEpisode, arena: ArenaForHooks, context: EpisodeContext) -> Score:
    """Score each of ``context.ends``, set the rollout's extras, and return the score of the whole rollout.

    ``meta["ends"]`` gets a dict per end: ``rewards`` and ``metrics`` by name, ``from_branch`` (node, branch),
    ``ended``, ``score``, and ``dropped``, the rubric's reason for dropping it. ``step.info["ends"]`` lists the ends of
    a step.
    """
    # Give each end its own context and a rollout of the steps that led to it.
    rollout, ends, own = context.rollout, context.ends, context.rollout.facts.own_end
    indices = {id(step): index for index, step in enumerate(rollout.steps)}
    scopes = []
    for number, end in enumerate(ends):
        end.steps.sort(key=lambda step: indices[id(step)])
        for step in end.steps:
            step.info.setdefault("ends", []).append(number)
        scope = context.branch(f"end{number}", end.state)
        scope.lazy_rng, scope.private = end.context.lazy_rng.fork(), end.context.private.copy()
        scope.rollout = scratch_rollout(rollout, end.steps, end.state)
        scopes.append(scope)

    others = [end.state for number, end in enumerate(ends) if number != (own or 0)]
    context.forked += others

    # Score all ends. Their judge calls become steps of the episode, even after a failure.
    try:
        scored = await gather_or_cancel(
            score_leaf(episode, arena, scope, end.children) for scope, end in zip(scopes, ends, strict=True)
        )
    finally:
        for scope in scopes:
            context.merge(scope, selected=False)
            rollout.steps += [step for step in scope.steps if step is not None]
    for scope, (score, _) in zip(scopes, scored, strict=True):
        keep_tokens(scope.rollout, score.token_rewards)

    # Free the states of the other ends, and keep the results.
    del context.forked[len(context.forked) - len(others) :]
    for state in others:
        await close_states(episode, [state])
        prune(state.data)
    rollout.extras = scored[own or 0][1]
    rollout.meta["ends"] = [
        {
            "rewards": dict(score.rewards),
            "metrics": dict(score.metrics),
            "from_branch": end.from_branch and list(end.from_branch),
            "ended": end.ended,
            "score": end.score,
            "dropped": score.dropped,
        }
        for (score, _), end in zip(scored, ends, strict=True)
    ]

    # A step that led only to dropped ends does not train.
    for step in rollout.steps:
        led_to = [rollout.meta["ends"][number]["dropped"] for number in step.info.get("ends", ())]
        if led_to and None not in led_to:
            step.trainable = False
            step.facts.error = f"the rubric dropped it: {led_to[0]}"
    return Score(*reward_summary(rollout))


def reward_summary(rollout: Rollout) -> tuple[dict[str, float], dict[str, float], str | None]:
    """Return rewards, metrics and drop reason of a rollout with several ends: those of its own end, else means."""
    ends, own = rollout.meta["ends"], rollout.facts.own_end
    if own is not None:
        return dict(ends[own]["rewards"]), dict(ends[own]["metrics"]), ends[own]["dropped"]
    kept = [end for end in ends if end["dropped"] is None]
    if not kept:
        return {}, {}, ends[0]["dropped"]
    return _means([end["rewards"] for end in kept]), _means([end["metrics"] for end in kept]), None


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}
