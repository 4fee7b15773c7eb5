from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import ATGRPOCredit, TurnReturnsCredit


def test_an_early_move_is_paid_for_what_it_made_possible(make: Any) -> None:
    """Both first moves earn nothing themselves; the one of ``a`` leads to 1, discounted to 0.5."""
    samples = [
        make("a", reward=0.0),
        make("a", reward=1.0, turn=1, step_index=1),
        make("b", reward=0.0),
        make("b", reward=0.0, turn=1, step_index=1),
    ]
    advantages = TurnReturnsCredit(gamma=0.5, scale="none").compute_columns(samples)
    np.testing.assert_allclose(advantages, [0.25, 0.5, -0.25, -0.5], rtol=1e-6)
    assert ATGRPOCredit().compute_columns(samples)[0] == 0


@pytest.mark.parametrize("seed", range(3))
def test_without_a_future_it_is_at_grpo(make: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [
        make(f"t{copy}", actor, float(rng.random()), turn=turn, step_index=2 * turn + place, group_id=f"q{copy % 2}")
        for copy in range(8)
        for turn in range(3)
        for place, actor in enumerate(("solver", "verifier"))
    ]
    expected = ATGRPOCredit(eps=1e-6).compute_columns(samples)
    np.testing.assert_array_equal(TurnReturnsCredit(gamma=0).compute_columns(samples), expected, f"seed {seed}")


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"gamma=1.5"):
        TurnReturnsCredit(gamma=1.5)
    with pytest.raises(ValueError, match="center='median'"):
        TurnReturnsCredit(center="median")
