"""Turn-level returns within groups: compares what actors earned from a model call to the end.

    G_t = sum over k >= t of gamma^(k - t) r_k        A_t = (G_t - mean) / (std + eps)

over the same actor's calls in the same turn of all attempts at the question. The rule lies between GRPO, where all
turns share one number, and AT-GRPO, where a turn counts only its own reward: here an early move also gets credit for
later rewards. ``gamma = 0`` is AT-GRPO.

The combination is turnwise's own: the discounted returns of GiGPO (Feng et al., https://arxiv.org/abs/2505.10978) in
the groups of AT-GRPO (Zhao et al., https://arxiv.org/abs/2510.11062).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import GroupCredit, Key
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


def discounted_returns(samples: Sequence[Sample], gamma: float) -> np.ndarray:
    """Return ``[B]`` float64: ``G_t = sum over k >= t of gamma^(k - t) r_k``, over one actor's calls in one rollout.

    ``r_k`` is the call's own reward. A call without one gets 0, except the actor's last call, which gets the actor's
    reward of the rollout. Raises ``ValueError`` for a call that led to several ends, and for a sibling in a tree
    unless it led to an end, as with ``select="none"``: its later rewards are then shared or unknown.
    """
    # Collect the calls of each actor in each trajectory.
    calls: dict[tuple[Hashable, str], list[int]] = {}
    for index, sample in enumerate(samples):
        ends = len(sample.info.get("ends", ()))
        if ends > 1 or (sample.tree_node is not None and not ends):
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.rollout_id!r} grew in a tree, of which only one branch "
                "was played on, or led to several ends: returns need plain trajectories (rollout.branches = 1, or "
                "rollout.tree.select = 'none')"
            )
        calls.setdefault((sample.trajectory_key, sample.actor), []).append(index)
    # Sum up from the last call backwards.
    returns = np.zeros(len(samples))
    for indices in calls.values():
        indices.sort(key=lambda index: samples[index].step_index)
        later = 0.0
        for index in reversed(indices):
            sample = samples[index]
            own = sample.reward if sample.has_step_reward else sample.trajectory_reward * (index == indices[-1])
            returns[index] = later = own + gamma * later
    return returns


def check_gamma(gamma: float) -> None:
    """Raise ``ValueError`` for an invalid discount."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma!r}: expected a number in [0, 1]")
