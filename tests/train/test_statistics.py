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


def test_the_method_follows_from_the_bounds_and_not_from_the_values():
    for values in ([1.0, 0.0, 1.0, 1.0], [1.0, 0.5, 1.0, 1.0], [1.0] * 4, [0.5] * 4):
        assert estimate(values, bounds=(0, 1)).method == "wilson" and estimate(values).method == "bootstrap"
        share, scaled = estimate(values, bounds=(0, 1)), estimate([20 * each - 10 for each in values], bounds=(-10, 10))
        assert (scaled.low, scaled.high) == pytest.approx((20 * share.low - 10, 20 * share.high - 10))
        assert 0 <= share.low < share.mean <= share.high <= 1 and share.high - share.low > 0.1
    assert estimate([1.0] * 4).high == math.inf, "equal numbers don't say how far others lie"
    with pytest.raises(ValueError, match=r"values=0 to 2: expected numbers within bounds=\(0, 1\)"):
        estimate([0.0, 2.0], bounds=(0, 1))
    graded = estimate([0.4, 0.6] * 50, bounds=(0, 1))
    assert graded.high - graded.low < 0.3 * np.diff(wilson(0.5, 100)), "they vary less than zeros and ones"
    # A value that is nearly 1 hardly changes the interval.
    near, ones = estimate([1.0] * 9 + [0.999], bounds=(0, 1)), estimate([1.0] * 10, bounds=(0, 1))
    assert near.low == pytest.approx(ones.low, abs=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_intervals_of_bounded_values_hold_the_mean_as_often_as_they_say(seed):
    """95% of 400 intervals, but for four standard errors of 1.1%: graded values, clusters, and paired differences."""
    rng = np.random.default_rng(seed)

    def clustered():
        chances = rng.beta(1, 1, 20).repeat(8)
        return estimate((rng.random(160) < chances).astype(float).tolist(), list(np.arange(20).repeat(8)), (0, 1))

    def paired():
        first, second = rng.random(30) < 0.7, rng.random(30) < 0.5
        return paired_difference(first.tolist(), second.tolist(), bounds=(0, 1)).difference

    def graded():
        return estimate(rng.beta(8, 4, 20).tolist(), bounds=(0, 1))

    for measure, mean in ((graded, 2 / 3), (clustered, 1 / 2), (paired, 0.2)):
        held = [found.low <= mean <= found.high for found in (measure() for _ in range(400))]
        assert np.mean(held) >= 0.95 - 4 * 0.011, f"seed {seed}"


def test_shares_get_wilsons_interval_and_other_means_a_bootstrap():
    share = estimate([1.0, 0.0, 1.0, 1.0], bounds=(0, 1))
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
    together, alone = estimate(values, clusters), estimate(values, bounds=(0, 1))
    assert (together.mean, together.method) == (0.5, "bootstrap")
    means = [np.mean(chosen) for chosen in itertools.product([1.0, 1.0, 0.0, 0.0], repeat=4)]
    assert (together.low, together.high) == (0.0, 1.0) and np.mean(np.array(means) == 0.0) > 0.025
    assert alone.high - alone.low < 0.2 and (alone.low, alone.high) == wilson(0.5, 200)
    found = estimate(values, clusters, (0, 1))
    assert (found.low, found.high) == pytest.approx(wilson(0.5, 4))
    assert estimate([1.0] * 6, [0, 0, 1, 1, 2, 2], (0, 1)).low == wilson(1.0, 3)[0], (
        "three trials, not six, and no width of 0"
    )
    assert estimate([0.5, 2.0], ["q", "q"]).high == math.inf, "one question bounds nothing"
    # Of one question with values in 0 to 1, Wilson's interval of one trial; it was infinite.
    found = estimate([0.25, 0.75], ["q", "q"], (0, 1))
    assert (found.low, found.high, found.method) == (*wilson(0.5, 1), "wilson")
    assert (found.low, found.high) == pytest.approx((0.0546, 0.9454), abs=1e-4)  # 0.5 -+ z/2 * (1 + z^2)^-0.5
    at = paired_difference([1.0, 1.0], [0.0, 1.0], ["q", "q"], (0, 1)).difference
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
    found = paired_difference(first, second, bounds=(0, 1))
    assert (found.better, found.worse, found.test) == (4, 1, "sign-flip permutation")
    assert found.p == mcnemar(4, 1) == 0.375 == paired_difference([0.5 * x for x in first], [0.5 * x for x in second]).p
    assert found.difference.mean == 3 / 8 and found.difference.low <= 3 / 8 <= found.difference.high
    assert (found.difference.method, paired_difference(first, second).difference.method) == ("wilson", "bootstrap")
    back = paired_difference(second, first)
    assert (back.difference.mean, back.p, back.better) == (-3 / 8, found.p, 1)
    # Equal policies are not told apart.
    found = paired_difference([0.5, 0.2], [0.5, 0.2], bounds=(0, 1))
    assert found.difference.low < 0 < found.difference.high
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
