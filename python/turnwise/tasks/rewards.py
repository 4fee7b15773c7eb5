"""Reward helpers that tasks share: mix global and local parts, and shape a reward over turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

MixMode = Literal["weighted_sum", "convex"]

_MIXES: dict[str, Callable[[float, float, float], float]] = {
    "weighted_sum": lambda team, own, alpha: alpha * team + own,
    "convex": lambda team, own, alpha: alpha * team + (1.0 - alpha) * own,
}


def mix_rewards(global_reward: float, local_reward: float, alpha: float = 1.0, mode: MixMode = "weighted_sum") -> float:
    """Mix the team's outcome and an actor's own part into one reward.

    ``weighted_sum`` is ``alpha * global + local`` with ``alpha >= 0`` (AT-GRPO); ``convex`` is
    ``alpha * global + (1 - alpha) * local`` with ``alpha`` in [0, 1].

    Example: ``mix_rewards(1.0, 0.5, alpha=0.4) == 0.9`` and ``mix_rewards(1.0, 0.5, 0.4, "convex") == 0.7``.
    """
    if mode not in _MIXES:
        raise ValueError(f"mode={mode!r}: expected one of {sorted(_MIXES)}")
    if not alpha >= 0 or (mode == "convex" and alpha > 1):
        raise ValueError(f"alpha={alpha!r}: expected {'a number in [0, 1]' if mode == 'convex' else 'a number >= 0'}")
    return _MIXES[mode](global_reward, local_reward, alpha)


def mix_weights(alpha: float, mode: MixMode) -> list[float]:
    """Return the weights of outcome and own part: a rubric's sum with these weights is the steps' mix."""
    return [mix_rewards(1.0, 0.0, alpha, mode), mix_rewards(0.0, 1.0, alpha, mode)]


def invalid_penalty(valid: bool, cost: float) -> float:
    """Return ``-cost`` for an action that could not be read, else 0. Add it to the reward of the row that made it."""
    if not cost >= 0:
        raise ValueError(f"cost={cost!r}: expected a number >= 0")
    return 0.0 if valid else -cost


def discounted(reward: float, turn: int, last_turn: int, gamma: float) -> float:
    """``reward * gamma ** (last_turn - turn)``: earlier turns get less. Turns count from 0."""
    if not 0 <= turn <= last_turn:
        raise ValueError(f"turn={turn!r}: expected 0 <= turn <= last_turn={last_turn!r}")
    return reward * gamma ** (last_turn - turn)


def turn_ramp(reward: float, turn: int, max_turns: int) -> float:
    """``reward * (turn + 1) / max_turns``: grows evenly with the turn, which counts from 0."""
    if not 0 <= turn < max_turns:
        raise ValueError(f"turn={turn!r}: expected 0 <= turn < max_turns={max_turns!r}")
    return reward * (turn + 1) / max_turns


def binary(reward: float, threshold: float) -> float:
    """Return 1 if ``reward >= threshold``, else 0."""
    return 1.0 if reward >= threshold else 0.0
