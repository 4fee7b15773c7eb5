from __future__ import annotations

import pytest

from turnwise.tasks.proposer_solver.curves import CURVES


@pytest.mark.parametrize(
    ("curve", "at"),
    [
        ("variance", {0.0: 0.0, 0.25: 0.75, 0.5: 1.0, 1.0: 0.0}),
        ("linear", {0.0: 0.0, 0.25: 0.5, 0.5: 1.0, 0.75: 0.5, 1.0: 0.0}),
        ("hard", {0.0: 0.0, 0.25: 0.75, 0.5: 0.5, 1.0: 0.0}),
    ],
)
def test_worth_by_hand(curve, at):
    assert {p: CURVES[curve](p) for p in at} == at


def test_every_curve_is_tested():
    assert set(CURVES) == {"variance", "linear", "hard"}
