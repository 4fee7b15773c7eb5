"""Equal rewards: rewards that differ only by rounding count as equal.

Two ways to earn the same sum give 0.1 + 0.2 and 0.3. Divided by their deviation, such rewards would look like a signal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FLOAT64, FLOAT32 = 2.0**-50, 2.0**-21
"""Four roundings of each type, relative to the largest magnitude, as in ``ops.group_advantage``."""


def tolerance(rewards: Sequence[float] | np.ndarray) -> float:
    """Return the largest difference that rounding explains between sums or means of ``rewards [n]``.

    That is four roundings of the largest magnitude: in float32 if all rewards are float32 numbers but not all whole, as
    whole numbers are exact; else in float64. It is at least four roundings of 1, as larger rewards may have cancelled
    out.
    """
    values = np.asarray(rewards, dtype=np.float64)
    return float(tolerances(values, np.zeros(len(values), dtype=np.int64), 1)[0])


def tolerances(values: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """Return the :func:`tolerance` of each of ``count`` groups of ``values [B]`` float64, ``[count]``."""
    largest, narrow, whole = np.zeros(count), np.ones(count, dtype=bool), np.ones(count, dtype=bool)
    np.maximum.at(largest, groups, np.abs(values))
    with np.errstate(over="ignore"):
        np.logical_and.at(narrow, groups, values.astype(np.float32) == values)
    np.logical_and.at(whole, groups, values == np.rint(values))
    return np.maximum(np.where(narrow & ~whole, FLOAT32, FLOAT64) * largest, FLOAT64)


def tied_groups(values: np.ndarray, groups: np.ndarray, count: int, units: np.ndarray | None = None) -> np.ndarray:
    """Tell which of ``count`` groups of ``values [B]`` have several members that are all equal, ``[count]`` bool.

    ``groups`` and ``units`` are ids from 0. The rows of one unit in a group are one member, their mean.
    """
    means, of = values, groups
    if units is not None:
        pairs, entry, rows = np.unique(
            groups * (units.max(initial=0) + 1) + units, return_inverse=True, return_counts=True
        )
        base = np.full(len(pairs), np.inf)
        np.minimum.at(base, entry, values)
        means = base + np.bincount(entry, values - base[entry]) / rows
        of = pairs // (units.max(initial=0) + 1)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, of, means)
    np.maximum.at(high, of, means)
    several = np.bincount(of, minlength=count) > 1
    return several & (high - low <= tolerances(values, groups, count))
