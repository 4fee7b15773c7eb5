"""Rules without a baseline: the reward itself, or a constant.

episodic  A = R        Each model call gets its actor's reward of the rollout: REINFORCE without a baseline (Williams,
                       1992, https://doi.org/10.1007/BF00992696).
constant  A = value    With the loss ``-A * log p`` this is supervised fine-tuning (maximum likelihood) on samples or
                       demonstrations. It comes from no paper: it is turnwise's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import Credit
from turnwise.types import CreditCapabilities, Sample


@dataclass(kw_only=True)
class EpisodicCredit(Credit):
    """Uses the rollout's reward of the actor as the advantage."""

    capabilities = CreditCapabilities(step_rewards=False)

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32."""
        return np.array([sample.trajectory_reward for sample in samples], dtype=np.float32)


@dataclass(kw_only=True)
class ConstantCredit(Credit):
    """Gives every call the advantage ``value``, whatever its reward."""

    capabilities = CreditCapabilities(mixed_rewards=False)
    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"value={self.value!r}: expected a finite number")

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32."""
        return np.full(len(samples), self.value, dtype=np.float32)
