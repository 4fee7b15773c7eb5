from __future__ import annotations

import numpy as np

from turnwise.credit import DrMASCredit
from turnwise.types import Sample


def test_worked_values(worked: list[Sample]) -> None:
    expected = [0.48418, 0.66575, 0.70711, -1.14993, -0.70711]
    np.testing.assert_allclose(DrMASCredit().compute_columns(worked), expected, atol=1e-5)
    without_std = [0.26667, 0.36667, 0.5, -0.63333, -0.5]
    np.testing.assert_allclose(DrMASCredit(scale="none").compute_columns(worked), without_std, atol=1e-5)


def test_one_agents_scale_does_not_reach_another(worked: list[Sample]) -> None:
    before = DrMASCredit().compute_columns(worked)
    for sample in worked:
        if sample.actor == "solver":
            sample.reward *= 1000
    after = DrMASCredit().compute_columns(worked)
    verifier = [sample.actor == "verifier" for sample in worked]
    assert (before[verifier] == after[verifier]).all()
    np.testing.assert_allclose(before, after, atol=1e-4)
