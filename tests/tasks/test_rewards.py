from __future__ import annotations

import pytest

from turnwise.tasks.rewards import binary, discounted, invalid_penalty, mix_rewards, turn_ramp


def test_mixes_by_hand():
    assert mix_rewards(1.0, 0.5, alpha=0.4) == pytest.approx(0.9)
    assert mix_rewards(1.0, 0.5, alpha=0.4, mode="convex") == pytest.approx(0.4 + 0.6 * 0.5)
    assert mix_rewards(0.0, 0.75) == 0.75
    assert mix_rewards(1.0, 1.0, alpha=3.0) == 4.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": 1.5, "mode": "convex"}, r"alpha=1.5.*\[0, 1\]"),
        ({"mode": "sum"}, "mode='sum'.*convex.*weighted_sum"),
    ],
)
def test_bad_mixes_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        mix_rewards(1.0, 1.0, **arguments)


def test_shaping_by_hand():
    assert [discounted(8.0, turn, 2, 0.5) for turn in range(3)] == [2.0, 4.0, 8.0]
    assert [turn_ramp(8.0, turn, 4) for turn in range(4)] == [2.0, 4.0, 6.0, 8.0]
    assert [binary(reward, 0.5) for reward in (0.49, 0.5, 1.0)] == [0.0, 1.0, 1.0]
    assert [invalid_penalty(True, 0.25), invalid_penalty(False, 0.25)] == [0.0, -0.25]


def test_bad_shaping_is_named():
    with pytest.raises(ValueError, match="turn=3"):
        discounted(1.0, 3, 2, 0.9)
    with pytest.raises(ValueError, match="turn=4"):
        turn_ramp(1.0, 4, 4)
    with pytest.raises(ValueError, match="cost=-1"):
        invalid_penalty(False, -1)
