"""Pass@k advantages against the published closed form."""

from __future__ import annotations

import warnings
from math import comb
from typing import Any

import numpy as np
import pytest

from turnwise.credit import GRPOCredit, PassAtKCredit


@pytest.mark.parametrize(("right", "wrong"), [(1, 7), (3, 5), (6, 2)])
def test_the_closed_form_of_right_and_wrong(make: Any, right: int, wrong: int) -> None:
    k, n = 3, right + wrong
    mean = 1 - comb(wrong, k) / comb(n, k)
    std = (mean * (1 - mean)) ** 0.5 + 1e-6
    samples = [make(f"t{index}", reward=float(index < right)) for index in range(n)]
    advantages = PassAtKCredit(k=k).compute_columns(samples)
    if wrong < k:
        assert not advantages.any(), "every subset has a right answer: there is nothing to learn"
        return
    of_wrong = 1 - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)
    expected = [(1 - mean) / std] * right + [(of_wrong - mean) / std] * wrong
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_k_of_one_is_grpo(make: Any) -> None:
    samples = [make(f"t{index}", reward=reward) for index, reward in enumerate([0.3, 1.0, 0.0, 0.3, 2.0])]
    expected = GRPOCredit(ddof=0).compute_columns(samples)
    np.testing.assert_allclose(PassAtKCredit(k=1).compute_columns(samples), expected, rtol=1e-5)


def test_trajectories_and_questions(make: Any) -> None:
    rows = [make("a", reward=1.0), make("a", reward=1.0, step_index=1), make("b"), make("c")]
    alone = PassAtKCredit(k=2).compute_columns(rows)
    assert alone[0] == alone[1] > 0 > alone[2] == alone[3], "a trajectory counts once, and its calls share its value"
    others = [
        make("x", group_id="other"),
        make("y", group_id="other", reward=1.0),
        *(make(name, group_id="tied") for name in "stu"),
    ]
    rule = PassAtKCredit(k=2)
    assert rule.compute_columns(rows + others).tolist() == [*alone, 0, 0, 0, 0, 0], "two answers are one subset"
    assert rule.zero_causes(rows + others, range(4, 9)) == ["alone"] * 2 + ["equal_rewards"] * 3


def test_a_batch_of_too_few_answers_warns(make: Any) -> None:
    samples = [make(f"t{index}", reward=float(index)) for index in range(4)]
    with pytest.warns(UserWarning, match="k=4: no question of the batch has more than 4 answers"):
        assert not PassAtKCredit(k=4).compute_columns(samples).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PassAtKCredit(k=3).compute_columns(samples).any() and PassAtKCredit().compute_columns([]).shape == (0,)
