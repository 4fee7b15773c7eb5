"""GRPO and its family: compare a trajectory with the other answers to its question.

    GRPO      A_i = (R_i - mean(R)) / (std(R) + eps)            Shao et al., https://arxiv.org/abs/2402.03300
    Dr. GRPO  A_i = R_i - mean(R)                               Liu et al., https://arxiv.org/abs/2503.20783
    RLOO      A_i = R_i - mean(R_j, j != i)                     Ahmadian et al., https://arxiv.org/abs/2402.14740
    MaxRL     A_i = (R_i - mean(R)) / (mean(R) + eps)           Tajwar et al., https://arxiv.org/abs/2602.02710
    OPO       A_i = R_i - sum_j(l_j R_j) / sum_j(l_j)           Hao et al., https://arxiv.org/abs/2505.23585

over the trajectories ``i`` of one question. ``R_i`` is the mean of the trajectory's rewards, and ``l_i`` its number of
completion tokens. Every model call of the trajectory gets ``A_i``. MaxRL is ``scale = "mean"``.

In a hierarchy of episodes, different levels must not be compared. :class:`HierarchyCredit` compares within one question
under one parent, one episode type and one actor, and ``R`` is the rollout's reward of that actor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from turnwise.credit.base import GroupCredit, Key
from turnwise.types import CreditCapabilities, Sample

ENOUGH = 4
"""Minimum number of games with the same reward sum to detect a constant-sum game."""


@dataclass(kw_only=True)
class GRPOCredit(GroupCredit):
    """Compares trajectories in groups ``(group_id,)``, with one value per trajectory.

    With ``positive_only``, negative advantages become 0. ``call_weight`` is ``"row"``, or ``"attempt"``: then each
    advantage is divided by the number of calls that share its value, so an attempt with many calls weighs no more than
    one with few.
    """

    normalize: bool = field(default=True, kw_only=False)
    positive_only: bool = field(default=False, kw_only=False)
    call_weight: str = "row"

    _looks_left = 8  # batches to check for advice, which is given once

    def __post_init__(self) -> None:
        if not self.normalize:
            self.scale = "none"
        if self.call_weight not in ("row", "attempt"):
            raise ValueError(f"call_weight={self.call_weight!r}: expected 'row' or 'attempt'")
        super().__post_init__()

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        if self._looks_left:
            advice = first_advice(self, samples)
            self._looks_left = 0 if advice else self._looks_left - 1
            if advice:
                warnings.warn(f"{type(self).__name__}: {advice}", stacklevel=2)
        advantages = super().compute_columns(samples)
        if self.call_weight == "attempt":
            units = [self.unit_key(sample) for sample in samples]
            calls = Counter(units)
            advantages = advantages / np.array([calls[unit] for unit in units], dtype=np.float32)
        return np.maximum(advantages, 0) if self.positive_only else advantages

    def group_key(self, sample: Sample) -> Key:
        return (sample.group_id,)

    def unit_key(self, sample: Sample) -> Key:
        return (sample.trajectory_key,)


@dataclass(kw_only=True)
class HierarchyCredit(GRPOCredit):
    """Compares in groups ``(parent_rollout_id, group_id, episode_type, actor)``, with one value per rollout and actor.

    The standard deviation is the population's (``ddof=0``).
    """

    capabilities = CreditCapabilities(step_rewards=False)
    ddof: int = 0

    def group_key(self, sample: Sample) -> Key:
        return (sample.parent_rollout_id, sample.group_id, sample.episode_type, sample.actor)

    def unit_key(self, sample: Sample) -> Key:
        return (sample.trajectory_key, sample.actor)

    def value(self, sample: Sample) -> float:
        return sample.trajectory_reward


@dataclass(kw_only=True)
class DrGRPOCredit(GRPOCredit):
    """GRPO without the division by the standard deviation.

    The division would give more weight to questions that are almost always or almost never solved. The other half of
    the method is the loss, a sum over tokens divided by a constant: ``loss.aggregation = "seq-mean-token-sum-norm"``.
    """

    normalize: bool = field(default=False, kw_only=False)


@dataclass(kw_only=True)
class RLOOCredit(DrGRPOCredit):
    """Leave-one-out: the baseline excludes the trajectory's own reward, so the policy gradient has no bias.

    The advantage equals ``n / (n - 1) * (R_i - mean(R))``.
    """

    center: str = "leave_one_out"


@dataclass(kw_only=True)
class OPOCredit(DrGRPOCredit):
    """Uses the baseline that minimises the gradient's variance if the gradient's norm grows with the length."""

    center: str = "length_weighted"


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
            "has no signal; HierarchyCredit, DrMASCredit, ATGRPOCredit and RAECredit compare each actor with itself"
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
