"""Constant credit: every model call is as good as any other.

    A = value

With the loss ``-A * log p`` this is supervised fine-tuning, maximum likelihood, on what was sampled or on
demonstrations. No paper stands behind it: the rule is turnwise's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import Credit
from turnwise.types import Sample


@dataclass(kw_only=True)
class ConstantCredit(Credit):
    """The same advantage for all, whatever the reward."""

    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"value={self.value!r}: expected a finite number")

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Advantages ``[B]`` float32."""
        return np.full(len(samples), self.value, dtype=np.float32)
