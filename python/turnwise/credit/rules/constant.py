"""Constant credit: every model call gets the same advantage.

    A = value

With the loss ``-A * log p`` this is supervised fine-tuning (maximum likelihood) on samples or demonstrations. The rule
comes from no paper: it is turnwise's own.
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
    """Gives every call the advantage ``value``, whatever its reward."""

    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"value={self.value!r}: expected a finite number")

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32."""
        return np.full(len(samples), self.value, dtype=np.float32)
