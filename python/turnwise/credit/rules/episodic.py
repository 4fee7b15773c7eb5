"""Episodic credit: ``A = R``. Each model call gets its actor's reward of the rollout.

This is REINFORCE without a baseline (Williams, 1992, https://doi.org/10.1007/BF00992696).
"""

from __future__ import annotations

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
