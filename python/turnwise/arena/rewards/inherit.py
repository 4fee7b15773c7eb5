"""The rewards of sub-agents' trajectories: their own, or those of the trajectory that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from turnwise.samples.ledger import noted
from turnwise.types import CHILD, GenerateResult


def inherit_rewards(attempt: GenerateResult) -> None:
    """Give the sub-agents of a finished attempt their rewards. May be called again after the attempt's changed.

    A child without a reward of its own gets its parent's: that of its actor in the attempt, or the own reward of the
    child that opened it. If the rubric dropped the attempt, children that take its reward don't train.

    Raises ``ValueError`` for a child whose actor has no reward in the attempt.
    """
    _pass_on(attempt, attempt, attempt.rollout.rewards.get)


def _pass_on(attempt: GenerateResult, node: GenerateResult, reward_of: Callable[[str], float | None]) -> None:
    dropped = attempt.rollout.facts.dropped
    for child in children_of(node):
        rollout, actor = child.rollout, child.rollout.meta[CHILD]["actor"]
        if rollout.error is not None:
            continue
        if not rollout.meta[CHILD]["inherits"]:
            own = rollout.rewards[actor]
            _pass_on(attempt, child, lambda _, own=own: own)  # type: ignore[misc]
            continue
        if node is attempt and dropped is not None:
            _drop(child, dropped)
            continue
        reward = reward_of(actor)
        if reward is not None:
            with noted(rollout, "inherited"):
                rollout.rewards = {actor: reward}
        elif any(step.trainable for step in rollout.steps):
            raise ValueError(
                f"actor {actor!r} of a child of episode {attempt.rollout.episode_type!r} acted and has no reward: the "
                f"rubric rewards {sorted(attempt.rollout.rewards)}, and the child has no reward of its own"
            )
        _pass_on(attempt, child, reward_of)


def _drop(child: GenerateResult, reason: str) -> None:
    """Drop a child, and those below it that take its reward."""
    child.rollout.facts.dropped, child.is_trainable, child.rollout.rewards = reason, False, {}
    for below in children_of(child):
        if below.rollout.error is None and below.rollout.meta[CHILD]["inherits"]:
            _drop(below, reason)


def fail_children(node: GenerateResult) -> None:
    """Fail all children of an attempt, or of a child, that failed itself: none of them trains."""
    for child in children_of(node):
        if child.rollout.error is None:
            child.rollout.error = f"rollout {node.rollout.id!r} failed, and this is a part of it"
        child.rollout.rewards = {}
        fail_children(child)


def children_of(node: GenerateResult) -> Iterator[GenerateResult]:
    """Yield the trajectories of the sub-agents right below ``node``."""
    return (child for child in node.children if CHILD in child.rollout.meta)
