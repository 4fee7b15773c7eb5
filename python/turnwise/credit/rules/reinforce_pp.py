"""REINFORCE++: whitens rewards over the whole batch, without groups.

    A_i = (d_i - mean(d)) / (std(d) + eps)        d_i = R_i,  with ``baseline``  d_i = R_i - mean(R of the question)

The mean and the standard deviation run over the tokens that a policy trains on in this batch, so a completion counts
in proportion to its length. A batch has many more samples than a group, so its statistics vary less, and a question
with one answer still gets an advantage. With ``baseline`` the rule first subtracts each question's mean, because
difficulties differ (REINFORCE++-baseline). (Hu et al., https://arxiv.org/abs/2501.03262; the KL penalty that the paper
subtracts from the reward is ``loss.kl.apply_to = "reward"``.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import CENTERED, EQUAL, Credit
from turnwise.credit.grouping import tolerance
from turnwise.credit.rules.grpo import GRPOCredit
from turnwise.types import Sample


@dataclass(kw_only=True)
class ReinforcePPCredit(Credit):
    """Whitens ``R``, the mean of a trajectory's rewards as in GRPO, for each policy separately."""

    baseline: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not self.eps >= 0:
            raise ValueError(f"eps={self.eps!r}: expected a number >= 0")

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        deviations, rewards = self._deviations(samples), np.array([sample.reward for sample in samples])
        tokens = np.array([trained_tokens(sample) * sample.weight for sample in samples], dtype=np.float64)
        advantages = np.zeros(len(samples), dtype=np.float32)
        for of_policy in by_policy(samples):
            rows = of_policy & (tokens > 0)
            if rows.any() and np.ptp(deviations[rows]) > tolerance(rewards[rows]):
                advantages[rows] = self._whiten(deviations[rows], tokens[rows])
        return advantages

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the cause of a zero advantage, for each of ``rows`` of ``samples``. A policy's group is the batch."""
        deviations, causes = self._deviations(samples), np.full(len(samples), CENTERED, dtype=object)
        rewards = np.array([sample.reward for sample in samples])
        for of_policy in by_policy(samples):
            if np.ptp(deviations[of_policy]) <= tolerance(rewards[of_policy]):
                causes[of_policy] = EQUAL
        return [str(cause) for cause in causes[list(rows)]]

    def _deviations(self, samples: Sequence[Sample]) -> np.ndarray:
        by_question = GRPOCredit(normalize=False, center="mean" if self.baseline else "none")
        return by_question.grouped_by_key(samples)

    def _whiten(self, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Scale ``values [b]`` to mean 0 and standard deviation 1 under ``weights [b]``."""
        offsets = values - values.min()
        deviations = offsets - np.average(offsets, weights=weights)
        std = np.sqrt(np.average(deviations**2, weights=weights))
        return deviations / (std + self.eps)


def by_policy(samples: Sequence[Sample]) -> Iterator[np.ndarray]:
    """Return a mask ``[B]`` bool per policy: which of ``samples`` it sampled."""
    policies = np.array([sample.policy for sample in samples], dtype=object)
    return (policies == policy for policy in dict.fromkeys(policies.tolist()))


def trained_tokens(sample: Sample) -> int:
    """Return the number of completion tokens that the loss counts."""
    return len(sample.completion_token_ids) if sample.loss_mask is None else sum(sample.loss_mask)
