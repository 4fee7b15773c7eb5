"""Multiplies the rewards of turns by the factors of their episode's :class:`~turnwise.arena.RewardMix`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.arena.rewards.mix import shape_turns
from turnwise.arena.stages.stage import Stage
from turnwise.samples.collect import nodes_of
from turnwise.types import GenerateResult


class TurnShaping(Stage):
    """Shapes the rewards of multi-turn episodes by turn, as ``reward.turn_shaping`` says."""

    name = "turn_shaping"
    always = True
    changes, effect = "rewards", "scales"
    before = ("overlong",)  # whose penalty is the same in each turn

    def rewarded(self, arena: Any, results: Sequence[GenerateResult]) -> None:
        for rollout in (node.rollout for node in nodes_of(results)):
            max_turns = getattr(arena.episodes.get(rollout.episode_type), "max_turns", None)
            if rollout.error is None and max_turns is not None:
                shape_turns(rollout, arena.mix_of(rollout.episode_type), max_turns)
