from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import RLOOCredit


def test_worked_values(make: Any) -> None:
    samples = [make(name, reward=reward) for name, reward in zip("abcd", [1.0, 0.0, 1.0, 1.0], strict=True)]
    np.testing.assert_allclose(RLOOCredit().compute_columns(samples), [1 / 3, -1, 1 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_each_against_the_mean_of_the_others(make: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = 1000 + rng.random(7)
    samples = [make(f"t{index}", reward=reward) for index, reward in enumerate(rewards)]
    expected = [reward - np.delete(rewards, index).mean() for index, reward in enumerate(rewards)]
    np.testing.assert_allclose(RLOOCredit().compute_columns(samples), expected, atol=1e-6, err_msg=f"seed {seed}")


def test_a_long_trajectory_counts_once(make: Any) -> None:
    samples = [make("a", reward=1.0, step_index=index) for index in range(5)] + [make("b"), make("c")]
    np.testing.assert_allclose(RLOOCredit().compute_columns(samples), [1] * 5 + [-0.5, -0.5], rtol=1e-6)
