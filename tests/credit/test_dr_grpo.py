from __future__ import annotations

import numpy as np

from turnwise.credit import DrGRPOCredit, GRPOCredit
from turnwise.types import Sample


def test_worked_values(worked: list[Sample]) -> None:
    gap = ((0.9 + 1 + 1) / 3) / 2
    np.testing.assert_allclose(DrGRPOCredit().compute_columns(worked), [gap] * 3 + [-gap] * 2, rtol=1e-6)


def test_small_differences_stay_small(worked: list[Sample]) -> None:
    for sample in worked:
        sample.reward = sample.trajectory_reward = 1e-3 * sample.reward
    assert abs(DrGRPOCredit().compute_columns(worked)).max() < 1e-3
    assert abs(GRPOCredit().compute_columns(worked)).max() > 0.5
