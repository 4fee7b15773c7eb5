"""Intervals, paired comparisons and pass@k beside brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from turnwise.train.eval.statistics import estimate, mcnemar, paired_difference, pass_at_k, wilson


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.5, 10, 0.2366, 0.7634), (1.0, 20, 0.8389, 1.0), (0.0, 20, 0.0, 0.1611), (0.9, 200, 0.8506, 0.9343)],
)
def test_wilson_interval(share, n, low, high):
    """Values of R's prop.test(correct=FALSE), by hand from the formula."""
    assert wilson(share, n) == (pytest.approx(low, abs=2e-4), pytest.approx(high, abs=2e-4))


def test_shares_get_wilsons_interval_and_other_means_a_bootstrap():
    share = estimate([1.0, 0.0, 1.0, 1.0])
    assert (share.mean, share.method, share.count) == (0.75, "wilson", 4)
    assert (share.low, share.high) == wilson(0.75, 4)
    mean = estimate([0.5, 2.0, 1.0])
    assert mean.method == "bootstrap" and mean.mean == pytest.approx(3.5 / 3) and mean == estimate([0.5, 2.0, 1.0])
    with pytest.raises(ValueError, match="values is empty"):
        estimate([])
    # Of 5 values all 5^5 resamples can be listed: the quantiles are theirs, but for the chance of 10,000 draws.
    values = [0.0, 0.3, 1.0, 2.5, 4.0]
    means = np.array([np.mean(chosen) for chosen in itertools.product(values, repeat=5)])
    found = estimate(values)
    for bound, at in ((found.low, 0.025), (found.high, 0.975)):
        # The share of resamples up to the bound is binomial around 2.5% of 10,000: six standard errors are 0.0094.
        assert np.mean(means < bound) - 0.0094 <= at <= np.mean(means <= bound) + 0.0094


def test_the_samples_of_one_question_are_one_trial():
    """Four questions with fifty equal answers each say as much as four answers."""
    values, clusters = [1.0] * 100 + [0.0] * 100, [place // 50 for place in range(200)]
    together, alone = estimate(values, clusters), estimate(values)
    assert (together.mean, together.method) == (0.5, "bootstrap")
    means = [np.mean(chosen) for chosen in itertools.product([1.0, 1.0, 0.0, 0.0], repeat=4)]
    assert (together.low, together.high) == (0.0, 1.0) and np.mean(np.array(means) == 0.0) > 0.025
    assert alone.high - alone.low < 0.2
    assert estimate([1.0] * 6, [0, 0, 1, 1, 2, 2]).low == wilson(1.0, 3)[0], "three trials, not six, and no width of 0"
    assert estimate([0.5, 2.0], ["q", "q"]).high == math.inf, "one question bounds nothing"
    # Of one question with values in 0 to 1, Wilson's interval of one trial; it was infinite.
    found = estimate([0.25, 0.75], ["q", "q"])
    assert (found.low, found.high, found.method) == (*wilson(0.5, 1), "wilson")
    assert (found.low, found.high) == pytest.approx((0.0546, 0.9454), abs=1e-4)  # 0.5 -+ z/2 * (1 + z^2)^-0.5
    at = paired_difference([1.0, 1.0], [0.0, 1.0], ["q", "q"]).difference
    assert (at.mean, at.low, at.high) == (0.5, *(2 * bound - 1 for bound in wilson(0.75, 1)))
    assert paired_difference([3.0], [1.0]).difference.high == math.inf
    assert wilson(0.0, 0) == (0.0, 1.0), "no trial excludes anything"
    # Sizes of clusters weigh.
    found = estimate([1.0, 3.0, 5.0, 9.0], ["a", "a", "a", "b"])
    assert found.mean == 4.5 and (found.low, found.high) == (3.0, 9.0)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (3, 0), (0, 6), (5, 2), (4, 4), (10, 3)])
def test_mcnemar_by_throwing_every_coin(better, worse):
    n = better + worse
    far = abs(better - worse)
    thrown = [abs(2 * sum(coins) - n) >= far for coins in itertools.product((0, 1), repeat=n)]
    assert mcnemar(better, worse) == pytest.approx(np.mean(thrown), abs=1e-12)


def test_paired_shares():
    first, second = [1, 1, 1, 0, 1, 0, 1, 1], [0, 1, 0, 0, 1, 1, 0, 0]
    found = paired_difference(first, second)
    assert (found.better, found.worse, found.test) == (4, 1, "McNemar, exact")
    assert found.p == mcnemar(4, 1) == 0.375
    assert found.difference.mean == 3 / 8 and found.difference.low <= 3 / 8 <= found.difference.high
    assert found.difference.method == "paired bootstrap"
    back = paired_difference(second, first)
    assert (back.difference.mean, back.p, back.better) == (-3 / 8, found.p, 1)
    # Equal policies are not told apart.
    found = paired_difference([0.5, 0.2], [0.5, 0.2])
    assert (found.p, found.difference.mean, found.better, found.worse) == (1.0, 0.0, 0, 0)
    with pytest.raises(ValueError, match="first has 1 values, second 2"):
        paired_difference([1.0], [1.0, 0.0])


def test_pairs_are_compared_and_not_the_two_means():
    """Questions differ much, the policies little and always in one direction: only pairs can show it."""
    rng = np.random.default_rng(3)
    second = rng.normal(0, 10, 40)
    first = second + rng.uniform(0.1, 0.3, 40)
    found = paired_difference(first.tolist(), second.tolist())
    assert 0.1 < found.difference.low < found.difference.high < 0.3 and found.better == 40
    assert found.p == 1 / 10_001 and found.test == "sign-flip permutation"


@pytest.mark.parametrize("clusters", [None, [0, 0, 1, 2, 2, 3, 4, 5]])
def test_sign_flips_are_all_of_them_where_they_are_few(clusters):
    first, second = [0.5, 1.0, 2.0, 0.0, 0.3, 1.0, 0.9, 0.1], [0.4, 1.2, 1.0, 0.5, 0.0, 0.2, 0.9, 0.0]
    places = clusters or range(8)
    sums = {place: 0.0 for place in places}
    for place, one, other in zip(places, first, second, strict=True):
        sums[place] += one - other
    told = list(sums.values())
    patterns = itertools.product((1, -1), repeat=len(told))
    far = [abs(sum(s * d for s, d in zip(p, told, strict=True))) >= abs(sum(told)) - 1e-9 for p in patterns]
    assert paired_difference(first, second, clusters).p == pytest.approx(np.mean(far))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n):
    for c in range(n + 1):
        answers = [place < c for place in range(n)]
        for k in range(1, n + 1):
            subsets = [any(chosen) for chosen in itertools.combinations(answers, k)]
            assert pass_at_k(n, c, k) == pytest.approx(np.mean(subsets), abs=1e-12)


def test_counts_that_cannot_be():
    for bad in ((4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError, match="expected 1 <= k <= n and 0 <= c <= n"):
            pass_at_k(*bad)
