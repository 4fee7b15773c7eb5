"""Turn-level returns within groups: compares what actors earned from a model call to the end.

    G_t = sum over k >= t of gamma^(k - t) r_k        A_t = (G_t - mean) / (std + eps)

over the same actor's calls in the same turn of all attempts at the question. The rule lies between GRPO, where all
turns share one number, and AT-GRPO, where a turn counts only its own reward: here an early move also gets credit for
later rewards. ``gamma = 0`` is AT-GRPO.

The combination is turnwise's own: the discounted returns of GiGPO (Feng et al., https://arxiv.org/abs/2505.10978) in
the groups of AT-GRPO (Zhao et al., https://arxiv.org/abs/2510.11062).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import GroupCredit, Key
from turnwise.credit.returns import check_gamma, discounted_returns
from turnwise.types import CreditCapabilities, Sample


@dataclass(kw_only=True)
class TurnReturnsCredit(GroupCredit):
    """Compares discounted returns in groups ``(group_id, actor, turn)``. For plain trajectories, not for trees."""

    capabilities = CreditCapabilities(trees=False, step_rewards=False)
    gamma: float = 0.95

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        super().__post_init__()

    def group_key(self, sample: Sample) -> Key:
        return (sample.group_id, sample.actor, sample.turn)

    def values(self, samples: Sequence[Sample]) -> np.ndarray:
        return discounted_returns(samples, self.gamma)
