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


def wilson(share: float, n: int, z: float = Z) -> tuple[float, float]:
    """Return Wilson's score interval of a share of ``n`` trials (E. B. Wilson, JASA 22, 1927); 0 to 1 for none."""
    if not n:
        return 0.0, 1.0
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 and 1 one bound is exactly the share; rounding would miss it.
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


def estimate(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Return the mean of ``values`` and its interval. ``clusters`` names the cluster of each value: values of one
    cluster, such as the samples of one question, are not independent.

    Zeros and ones get Wilson's interval if each cluster has one value, or if all are equal (with the clusters as
    trials). Other values get the percentile bootstrap over clusters (B. Efron and R. Tibshirani, An Introduction to the
    Bootstrap, 1993, chapter 13). A single cluster of values in 0 to 1 counts as one trial of Wilson's interval, because
    no distribution there varies more; for other values the bounds are infinite. Raises ``ValueError`` for no values.
    """
    if not len(values):
        raise ValueError("values is empty: expected at least one")
    data = np.asarray(values, dtype=np.float64)
    sums, sizes = _by_cluster(data, clusters)
    mean, is_share = float(data.mean()), bool(np.isin(data, (0.0, 1.0)).all())
    if is_share and (len(sums) == len(data) or mean in (0.0, 1.0)):
        low, high = wilson(mean, len(sums))
        return Estimate(mean, low, high, len(data), "wilson")
    if len(sums) == 1 and ((data >= 0) & (data <= 1)).all():
        low, high = wilson(mean, 1)
        return Estimate(mean, low, high, len(data), "wilson")
    low, high = _bootstrap(sums, sizes)
    return Estimate(mean, low, high, len(data), "bootstrap")


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
    first: Sequence[float], second: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> PairedDifference:
    """Compare two measurements of the same questions, value by value.

    The interval is a paired bootstrap, which draws whole clusters of differences; for a single cluster see
    :func:`estimate`. The test is McNemar's exact one if all values are 0 or 1, one per cluster (Q. McNemar,
    Psychometrika 12, 1947). Otherwise it is a permutation test that flips the sign of whole clusters (R. A. Fisher,
    The Design of Experiments, 1935, section 21). Raises ``ValueError`` for unequal lengths or no values.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"first has {len(first)} values, second {len(second)}: expected as many, and at least one")
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    sums, sizes = _by_cluster(one - other, clusters)
    low, high = _bootstrap(sums, sizes)
    method = "paired bootstrap"
    if len(sums) == 1 and ((one >= 0) & (one <= 1) & (other >= 0) & (other <= 1)).all():
        method, (low, high) = "wilson", (2 * bound - 1 for bound in wilson((float((one - other).mean()) + 1) / 2, 1))
    difference = Estimate(float((one - other).mean()), low, high, len(one), method)
    better, worse = int((sums > 0).sum()), int((sums < 0).sum())
    if len(sums) == len(one) and np.isin(np.concatenate([one, other]), (0.0, 1.0)).all():
        return PairedDifference(difference, mcnemar(better, worse), "McNemar, exact", better, worse)
    return PairedDifference(difference, _sign_flips(sums), "sign-flip permutation", better, worse)


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of ``better`` against ``worse`` discordant pairs, a binomial with p = 0.5."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)


def _sign_flips(sums: np.ndarray) -> float:
    """Return the share of sign patterns whose sum is at least as far from 0 as the true sum.

    Up to 12 non-zero sums it tries all patterns; beyond, random ones, and counts the true pattern among them.
    """
    nonzero = sums[sums != 0]
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
