"""GRPO: a trajectory against the other answers to its question.

    A_i = (R_i - mean(R)) / (std(R) + eps)

over the trajectories ``i`` of one question, ``R_i`` being the mean of the trajectory's rewards; every model call of the
trajectory carries ``A_i``. (Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300.) Without ``normalize`` the
division is left out (Dr. GRPO, https://arxiv.org/abs/2503.20783).

In a hierarchy of episodes one level must not be compared with another: with ``hierarchy`` the group is the question
under one parent, one episode type and one actor, and ``R`` is the rollout's reward of that actor.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from turnwise.credit.advice import first_advice
from turnwise.credit.base import GroupCredit, Key
from turnwise.types import Sample


@dataclass(kw_only=True)
class GRPOCredit(GroupCredit):
    """Group ``(uid,)``, one value per trajectory.

    With ``hierarchy``: group ``(parent node, uid, episode type, actor)``, one value per rollout and actor. With
    ``positive_only``, what is below the mean gets 0.
    """

    normalize: bool = field(default=True, kw_only=False)
    positive_only: bool = field(default=False, kw_only=False)
    hierarchy: bool = False

    _looks_left = 8  # at batches that may call for advice, which comes once

    def __post_init__(self) -> None:
        if not self.normalize:
            self.scale = "none"
        super().__post_init__()

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Advantages ``[B]`` float32 of ``samples``, in their order."""
        if self._looks_left:
            advice = first_advice(self, samples)
            self._looks_left = 0 if advice else self._looks_left - 1
            if advice:
                warnings.warn(f"{type(self).__name__}: {advice}", stacklevel=2)
        advantages = super().compute_columns(samples)
        return np.maximum(advantages, 0) if self.positive_only else advantages

    def group_key(self, sample: Sample) -> Key:
        if self.hierarchy:
            return (sample.parent_node, sample.uid, sample.episode_type, sample.actor)
        return (sample.uid,)

    def unit_key(self, sample: Sample) -> Key:
        return (sample.play, sample.actor) if self.hierarchy else (sample.play,)

    def value(self, sample: Sample) -> float:
        return sample.trajectory_reward if self.hierarchy else sample.reward


@dataclass(kw_only=True)
class HierarchyCredit(GRPOCredit):
    """``GRPOCredit(hierarchy=True)`` with the population's standard deviation (``ddof=0``)."""

    hierarchy: bool = True
    ddof: int = 0
