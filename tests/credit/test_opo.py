from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import OPOCredit


def test_worked_values(make: Any) -> None:
    """A right answer of 3 tokens, a wrong one of 1: the baseline is 3 / 4."""
    samples = [make("a", reward=1.0, completion_token_ids=[1, 2, 3]), make("b", reward=0.0)]
    np.testing.assert_allclose(OPOCredit().compute_columns(samples), [0.25, -0.75], rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_lengths_of_a_trajectorys_calls_add_up(make: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples, rewards, lengths = [], rng.random(5), []
    for index, reward in enumerate(rewards):
        calls = rng.integers(1, 9, size=rng.integers(1, 4)).tolist()
        samples += [make(f"t{index}", reward=reward, completion_token_ids=[2] * length) for length in calls]
        lengths.append(sum(calls))
    baseline = np.average(rewards, weights=lengths)
    expected = [rewards[int(sample.trajectory[1:])] - baseline for sample in samples]
    np.testing.assert_allclose(OPOCredit().compute_columns(samples), expected, atol=1e-6, err_msg=f"seed {seed}")
