"""Constant credit: ``A = value`` for every model call. With the loss ``-A * log p`` this is supervised fine-tuning on
what was sampled, or on demonstrations."""

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
