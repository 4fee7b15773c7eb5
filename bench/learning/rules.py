"""Credit rules that only the learning table uses: what Dr. MAS and RAE are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import GroupCredit, Key
from turnwise.credit.rules.rae import RAECredit
from turnwise.types import Sample


@dataclass(kw_only=True)
class GlobalCredit(GroupCredit):
    """Compares every call with all calls of its question, whoever made them: one mean and deviation for all agents."""

    def group_key(self, sample: Sample) -> Key:
        return (sample.group_id,)


@dataclass(kw_only=True)
class SharedBaselineCredit(RAECredit):
    """RAE with one baseline for both seats, which play equally often: the mean of what each alone would have."""

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        advantages = super().compute_columns(samples)
        shared = sum(self._values.values()) / len(self._values)
        self._values = dict.fromkeys(self._values, shared)
        return advantages
