"""Advice for batches in which comparisons can't work: groups of one, or both sides of a game in one group."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.credit.base import GroupCredit
from turnwise.types import Sample

ENOUGH = 4
"""Minimum number of games with the same reward sum to detect a constant-sum game."""


def first_advice(rule: GroupCredit, samples: Sequence[Sample]) -> str | None:
    """Describe why ``rule``, with one value per trajectory, can't compare ``samples``; ``None`` if it can."""
    units = len({rule.unit_key(sample) for sample in samples})
    if rule.singleton == "zero" and 1 < units == len({rule.key_of(sample) for sample in samples}):
        return (
            f"each of the {units} values of this batch is alone in its group, so all advantages are 0; give attempts "
            "that are to be compared the same artifact or group_id"
        )
    if constant_sum(rule, samples):
        return (
            "the actors of each trajectory share one value, their mean, but what one earns here another loses, so it "
            "tells nothing; HierarchyCredit, DrMASCredit, ATGRPOCredit and RAECredit compare each actor with itself"
        )
    return None


def constant_sum(rule: GroupCredit, samples: Sequence[Sample]) -> bool:
    """True if several actors divide up a fixed sum in ``samples``, and ``rule`` groups them together.

    It requires at least ``ENOUGH`` trajectories, rewards of an actor that differ, and the same sum over the actors in
    all trajectories.
    """
    if len({sample.actor for sample in samples}) < 2:
        return False
    games: dict[object, dict[str, float]] = {}
    for sample in samples:
        games.setdefault(rule.unit_key(sample), {})[sample.actor] = sample.trajectory_reward
    earned = list(games.values())
    if len(earned) < ENOUGH or any(len(game) < 2 or game.keys() != earned[0].keys() for game in earned):
        return False
    sums, tolerance = (
        [sum(game.values()) for game in earned],
        1e-9 * max(abs(r) for game in earned for r in game.values()),
    )
    apart = any(abs(game[actor] - earned[0][actor]) > tolerance for game in earned for actor in game)
    return apart and max(sums) - min(sums) <= tolerance * len(earned[0])
