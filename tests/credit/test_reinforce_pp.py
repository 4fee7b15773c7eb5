"""Whitening over the tokens of the batch, against the same with every token written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import ReinforcePPCredit


def test_worked_values(make: Any) -> None:
    """Four tokens with 1, 1, 1, 0: mean 0.75, standard deviation sqrt(0.1875) = 0.4330."""
    samples = [make("a", reward=1.0, completion_token_ids=[1, 2, 3]), make("b", reward=0.0, group_id="other")]
    np.testing.assert_allclose(ReinforcePPCredit().compute_columns(samples), [0.57735, -1.73205], atol=1e-5)
    assert ReinforcePPCredit(baseline=True).compute_columns(samples).tolist() == [0, 0], "each alone with its question"


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_equals_whitening_of_every_token(make: Any, baseline: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [
        make(
            f"t{index}",
            reward=1000 + float(rng.random()),
            group_id=f"q{index % 3}",
            policy=f"p{index // 3 % 2}",
            completion_token_ids=[2] * 6,
            loss_mask=(rng.random(6) < 0.6).astype(int).tolist(),
        )
        for index in range(18)
    ]
    rewards = np.array([sample.reward for sample in samples])
    counts = np.array([sum(s.loss_mask or []) for s in samples])
    if baseline:
        for uid in ("q0", "q1", "q2"):
            rows = [i for i, s in enumerate(samples) if s.group_id == uid]
            rewards[rows] -= np.mean(rewards[rows])
    expected = np.zeros(len(samples))
    for policy in ("p0", "p1"):
        rows = np.array([s.policy == policy for s in samples])
        tokens = np.repeat(rewards[rows], counts[rows])
        expected[rows] = (rewards[rows] - tokens.mean()) / tokens.std()
    expected[counts == 0] = 0
    advantages = ReinforcePPCredit(baseline=baseline).compute_columns(samples)
    np.testing.assert_allclose(advantages, expected, atol=1e-6, err_msg=f"seed {seed}")


def test_equal_rewards_say_nothing(make: Any) -> None:
    samples = [make(name, reward=0.1, completion_token_ids=[2] * size) for name, size in (("a", 3), ("b", 7), ("c", 1))]
    for eps in (1e-8, 0.0):
        assert ReinforcePPCredit(eps=eps).compute_columns(samples).tolist() == [0, 0, 0]
    other = [make(name, reward=reward, policy="other") for name, reward in (("d", 0.0), ("e", 1.0), ("f", 0.5))]
    assert ReinforcePPCredit().compute_columns(samples + other)[5] == 0
    causes = ["equal_rewards"] * 3 + ["zero_advantage"]
    assert ReinforcePPCredit().zero_causes(samples + other, [0, 1, 2, 5]) == causes, "the batch is its policy's group"


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="eps=-1"):
        ReinforcePPCredit(eps=-1)
