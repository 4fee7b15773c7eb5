"""Uncertainty of a measurement: intervals of means and shares, paired comparisons, pass@k.

Seeds are fixed, so equal data give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964
"""The 97.5% quantile of the normal distribution: all intervals are 95% intervals."""

DRAWS = 10_000
"""Bootstrap and permutation draws."""

_AT_ONCE = 2_000_000  # most numbers in one block of draws


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of ``count`` values, with the bounds of its 95% interval, computed by ``method``."""

    mean: float
    low: float
    high: float
    count: int
    method: str


def wilson(share: float, n: float, z: float = Z) -> tuple[float, float]:
    """Return Wilson's score interval of a share of ``n`` trials (E. B. Wilson, JASA 22, 1927); 0 to 1 for none."""
    if not n:
        return 0.0, 1.0
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 and 1 one bound is exactly the share; rounding would miss it.
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


Bounds = tuple[float, float]
"""Least and largest value that a metric can have."""


def estimate(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, bounds: Bounds | None = None
) -> Estimate:
    """Return the mean of ``values`` and its interval. ``clusters`` names the cluster of each value: values of one
    cluster, such as the samples of one question, are not independent.

    The method follows from the ``bounds`` of the metric, not from the values. With them it is Wilson's interval for
    :func:`trials`. Without them it is the percentile bootstrap over clusters (B. Efron and R. Tibshirani, An
    Introduction to the Bootstrap, 1993, chapter 13), which bounds nothing if all clusters are equal. Raises
    ``ValueError`` for no values, and for one beyond the bounds.
    """
    if not len(values):
        raise ValueError("values is empty: expected at least one")
    data = np.asarray(values, dtype=np.float64)
    mean, (sums, sizes) = float(data.mean()), _by_cluster(data, clusters)
    if bounds is None:
        return Estimate(mean, *_bootstrap(sums, sizes), len(data), "bootstrap")
    least, width = bounds[0], bounds[1] - bounds[0]
    if data.min() < least or data.max() > bounds[1]:
        raise ValueError(f"values={data.min():g} to {data.max():g}: expected numbers within bounds={bounds!r}")
    share = min(max((mean - least) / width, 0.0), 1.0)
    low, high = wilson(share, trials((sums - least * sizes) / width, sizes))
    return Estimate(mean, least + width * low, least + width * high, len(data), "wilson")


def trials(sums: np.ndarray, sizes: np.ndarray) -> float:
    """Return how many independent trials say as much about a share as clusters of values in 0 to 1.

    It is the number of values divided by their design effect (L. Kish, Survey Sampling, 1965, section 8.2): the squared
    deviations of the clusters' ``sums`` from the mean times their ``sizes``, relative to those of independent zeros and
    ones, and at most the effect of equal values in each cluster. ``Z ** 2`` clusters of zeros or ones are added, half
    of each (A. Agresti and B. Coull, The American Statistician 52, 1998), so that a few values that happen to be alike
    don't count as many trials. Clusters of one value that is 0 or 1 are a trial each.
    """
    count, values, size = len(sums), sizes.sum(), (sizes**2).sum() / sizes.sum()
    if count == 1:
        return float(values / size)
    share, more = sums.sum() / values, Z**2 * size
    deviations = count / (count - 1) * ((sums - share * sizes) ** 2).sum()
    added = (sums.sum() + more / 2) / (values + more)
    spread = more * added * (1 - added)
    effect = (deviations + size * spread) / (values * share * (1 - share) + spread)
    return float(values / min(size, effect))


def _by_cluster(data: np.ndarray, clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and size of each cluster, in order of first appearance."""
    if clusters is None:
        return data, np.ones(len(data))
    ids: dict[Hashable, int] = {}
    indices = np.array([ids.setdefault(cluster, len(ids)) for cluster in clusters])
    return np.bincount(indices, weights=data), np.bincount(indices).astype(np.float64)


def _bootstrap(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    count, rng = len(sums), np.random.default_rng(0)
    if count < 2:
        return -math.inf, math.inf
    if np.ptp(sums / sizes) == 0:
        return -math.inf, math.inf
    means, block = [], max(1, _AT_ONCE // count)
    for start in range(0, DRAWS, block):
        chosen = rng.integers(count, size=(min(block, DRAWS - start), count))
        means.append(sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


# -- Paired comparisons ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Result of ``first - second`` on the same questions with the same seeds. ``difference`` has the mean over all
    values and its interval. ``p`` is the two-sided p-value by ``test``. ``better`` and ``worse`` count the clusters in
    which the first has more, and less."""

    difference: Estimate
    p: float
    test: str
    better: int
    worse: int


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    bounds: Bounds | None = None,
) -> PairedDifference:
    """Compare two measurements of the same questions, value by value.

    The interval is :func:`estimate`'s for the differences, whose bounds follow from those of the values. The test is a
    permutation test that flips the sign of whole clusters (R. A. Fisher, The Design of Experiments, 1935, section 21).
    For differences of one size it is McNemar's exact test (Q. McNemar, Psychometrika 12, 1947). Raises ``ValueError``
    for unequal lengths or no values.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"first has {len(first)} values, second {len(second)}: expected as many, and at least one")
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    sums, _ = _by_cluster(one - other, clusters)
    widths = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    difference = estimate((one - other).tolist(), clusters, widths)
    better, worse = int((sums > 0).sum()), int((sums < 0).sum())
    return PairedDifference(difference, _sign_flips(sums), "sign-flip permutation", better, worse)


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of ``better`` against ``worse`` discordant pairs, a binomial with p = 0.5."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)


def _sign_flips(sums: np.ndarray) -> float:
    """Return the share of sign patterns whose sum is at least as far from 0 as the true sum.

    It counts all patterns of sums of one size, and of up to 12 others. Beyond, it draws some, and counts the true one
    among them.
    """
    nonzero = sums[sums != 0]
    if len(nonzero) and np.ptp(np.abs(nonzero)) <= 1e-9 * np.abs(nonzero[0]):
        return mcnemar(int((nonzero > 0).sum()), int((nonzero < 0).sum()))
    if len(nonzero) <= 12:
        patterns = 1 - 2 * ((np.arange(2 ** len(nonzero))[:, None] >> np.arange(len(nonzero))) & 1)
        extra = 0
    else:
        patterns = np.random.default_rng(0).choice((-1, 1), size=(DRAWS, len(nonzero)))
        extra = 1
    # A tie must count, though sums in another order differ in their last bits.
    far = np.abs(patterns @ nonzero) >= abs(nonzero.sum()) - 1e-9 * np.abs(nonzero).sum()
    return float((far.sum() + extra) / (len(patterns) + extra))


# -- Several attempts at one question ----------------------------------------------------------------------------------
def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased probability that one of ``k`` attempts succeeds, given ``c`` successes of ``n``:
    ``1 - C(n - c, k) / C(n, k)`` (M. Chen et al., https://arxiv.org/abs/2107.03374, eq. 1). Raises ``ValueError``
    unless ``0 <= c <= n`` and ``1 <= k <= n``.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"n={n!r}, c={c!r}, k={k!r}: expected 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
