"""GiGPO, group in group: compares whole episodes, and steps of episodes that reached the same state.

    A = A_episode + omega * A_step
    A_episode = (R - mean) / (std + eps)        over the attempts of an actor at a question, R the sum of its rewards
    A_step = (G_t - mean) / (std + eps)         over the calls from the same anchor state in these attempts,
                                                G_t = sum over k >= t of gamma^(k - t) r_k

Attempts with the same start often reach the same states, so steps get their own baseline without further samples. A
state reached only once has no peers, and its A_step is 0. (Feng et al., https://arxiv.org/abs/2505.10978;
``scale = "none"`` is the paper's F_norm = 1.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import GroupCredit, Key
from turnwise.credit.rules.turn_returns import check_gamma, discounted_returns
from turnwise.types import CreditCapabilities, Sample
from turnwise.types.prompts import prompt_tokens


def anchor_state(sample: Sample) -> Hashable:
    """Return ``step.info["state"]``, any hashable that the episode puts there, else the prompt's token ids.

    A prompt with the history of the chat rarely occurs twice. In that case, let the episode set the state.
    """
    return sample.info["state"] if "state" in sample.info else tuple(prompt_tokens(sample))


@dataclass(kw_only=True)
class GiGPOCredit(GroupCredit):
    """Compares trajectories in groups ``(group_id, actor)``, and rows with equal ``anchor(sample)``. Not for trees."""

    capabilities = CreditCapabilities(trees=False, step_rewards=False)
    gamma: float = 0.95
    omega: float = 1.0
    anchor: Callable[[Sample], Hashable] = anchor_state

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        if not callable(self.anchor):
            raise TypeError(f"anchor={self.anchor!r}: expected a callable, sample -> state")
        if not self.omega >= 0:
            raise ValueError(f"omega={self.omega!r}: expected a number >= 0")
        super().__post_init__()

    def group_key(self, sample: Sample) -> Key:
        return (sample.group_id, sample.actor)

    def unit_key(self, sample: Sample) -> Key:
        return (sample.trajectory_key, sample.actor)

    def values(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the undiscounted sum of the actor's rewards in the rollout for each call: its first call's return."""
        returns = discounted_returns(samples, 1.0)
        first: dict[Key, int] = {}
        for index, sample in enumerate(samples):
            unit = self.unit_key(sample)
            if unit not in first or sample.step_index < samples[first[unit]].step_index:
                first[unit] = index
        return returns[[first[self.unit_key(sample)] for sample in samples]]

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        states = [(*self.key_of(sample), self.anchor(sample)) for sample in samples]
        by_step = self.grouped(samples, states, discounted_returns(samples, self.gamma))
        return (self.grouped_by_key(samples) + self.omega * by_step).astype(np.float32)
