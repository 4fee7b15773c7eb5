"""Grouped advantages of NumPy columns, by the compiled core of ``turnwise.ops`` and without torch.

Rewards that differ only by rounding count as equal, such as 0.1 + 0.2 and 0.3. Divided by their deviation, such rewards
would look like a signal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from turnwise import _C
from turnwise.utils.grouping import MODES, SCALES, check_choice, check_options

FLOAT64, FLOAT32 = 2.0**-50, 2.0**-21
"""Four roundings of each type, relative to the largest magnitude, as in ``ops.group_advantage``."""


def number(keys: Sequence[Hashable]) -> tuple[np.ndarray, int]:
    """Number the distinct keys in order of first appearance: ids ``[B]`` int64, and how many there are.

    Raises ``TypeError`` for a key that can't be hashed.
    """
    ids = np.empty(len(keys), dtype=np.int64)
    return ids, _C.factorize([keys], ids)


def grouped_advantage(
    rewards: np.ndarray,
    groups: Sequence[Hashable],
    *,
    units: Sequence[Hashable] | None = None,
    lengths: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """Return advantages ``[B]`` float64 of ``rewards [B]`` within ``groups``, as ``ops.group_advantage`` does.

    Tied groups (:func:`tied_groups`) get 0. The rows of each unit in ``units`` count once, with their mean.
    ``options`` are those of ``ops.group_advantage``, all of them. ``scale`` may also be ``"mean"``, which divides by
    the group's mean plus ``eps``, and treats a group of one as ``"none"`` does. Raises ``ValueError`` for a reward that
    is not finite, for a negative one under ``scale="mean"``, and for a group of one under ``singleton="error"``.
    """
    rule = rule_of("rows" if units is None else "trajectory", **options)
    rewards = np.ascontiguousarray(rewards, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise ValueError(f"rewards[{bad[0]}]={rewards[bad[0]]!r}: expected a finite number")
    ids, count = number(groups)
    unit_ids = None if units is None else number(units)[0]
    if options["singleton"] == "error" and (options["center"], options["scale"]) != ("none", "none"):
        _check_singletons(ids, unit_ids, groups)
    advantages = np.empty_like(rewards)
    if len(rewards):
        weights = None if lengths is None else np.ascontiguousarray(lengths, dtype=np.float64)
        _C.group_advantage(rewards, ids, advantages, count, unit_ids, weights, None, rule, 1)
        if options["scale"] == "mean":
            advantages /= _mean_divisors(rewards, ids, count, unit_ids, options["eps"])[ids]
        if (options["center"], options["scale"]) != ("none", "none"):
            advantages[tied_groups(rewards, ids, count, unit_ids)[ids]] = 0.0
    return advantages


def attempt_advantage(
    rewards: np.ndarray,
    groups: Sequence[Hashable],
    attempts: Sequence[Hashable],
    *,
    units: Sequence[Hashable] | None = None,
    lengths: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """Return :func:`grouped_advantage` where the units of one attempt count in a group as one, ``[B]`` float64.

    With ``n_a`` units in attempt ``a``, and ``m_a`` the mean of their values ``v_u``:

        mean = mean over a of m_a      std = sqrt(sum over a, u of (v_u - mean)^2 / n_a / (attempts - ddof))

    and each unit gets ``(v_u - centre) / scale``. ``"leave_one_out"`` leaves out the unit's whole attempt. Where the
    units of each attempt are equal, the advantages are those of :func:`grouped_advantage` with one unit per attempt.
    A group of one attempt is a group of one.
    """
    rewards = np.ascontiguousarray(rewards, dtype=np.float64)
    each = range(len(rewards)) if units is None else units
    places: dict[Hashable, dict[Hashable, dict[Hashable, list[int]]]] = {}
    for row, (group, attempt, unit) in enumerate(zip(groups, attempts, each, strict=True)):
        places.setdefault(group, {}).setdefault(attempt, {}).setdefault(unit, []).append(row)
    advantages = np.empty_like(rewards)
    for group, of_group in places.items():
        rows = [rows for of_attempt in of_group.values() for rows in of_attempt.values()]
        attempt_of = np.repeat(np.arange(len(of_group)), [len(of_attempt) for of_attempt in of_group.values()])
        values = np.array([rewards[one].min() + (rewards[one] - rewards[one].min()).mean() for one in rows])
        sizes = np.ones(len(rows)) if lengths is None else np.array([lengths[one].sum() for one in rows], float)
        tie = tolerance(rewards[[row for one in rows for row in one]])
        found = _of_attempts(group, values, attempt_of, sizes, tie, **options)
        for one, advantage in zip(rows, found.tolist(), strict=True):
            advantages[one] = advantage
    return advantages


def _of_attempts(
    group: Hashable,
    values: np.ndarray,
    attempts: np.ndarray,
    lengths: np.ndarray,
    tie: float,
    *,
    center: str,
    scale: str,
    ddof: int,
    eps: float,
    singleton: str,
    min_std: float,
) -> np.ndarray:
    """Return the advantages of the units of one group: ``values [U]``, the number of each unit's attempt ``[U]``."""
    if scale == "mean" and values.min() < 0:
        raise ValueError(f"rewards={values.min()!r}: expected numbers >= 0 with scale='mean', such as 0 and 1")
    counts, compares = np.bincount(attempts), (center, scale) != ("none", "none")
    if len(counts) == 1 and compares:
        if singleton == "error":
            raise ValueError(f"group {group!r} has a single member, and singleton='error'")
        raw = values / (1 + eps) if scale == "std" else values
        return raw if singleton == "raw" else np.zeros_like(values)
    weights, offsets = 1 / counts[attempts], values - values.min()
    means = np.bincount(attempts, weights * offsets)
    mean = means.mean()
    deviations = offsets - mean
    if center == "leave_one_out":
        centred = offsets - (means.sum() - means[attempts]) / (len(counts) - 1)
    elif center == "length_weighted":
        total = (weights * lengths).sum()
        centred = offsets - ((weights * lengths * offsets).sum() / total if total else mean)
    else:
        centred = deviations if center == "mean" else values
    std = np.sqrt((weights * deviations**2).sum() / (len(counts) - ddof)) if len(counts) > 1 else 0.0
    if std < min_std or (compares and np.ptp(values) <= tie):
        return np.zeros_like(values)
    if scale == "mean":
        return centred / (values.min() + mean + eps)
    return centred / (std + eps) if scale == "std" else centred


def rule_of(
    pool: str, *, center: str, scale: str, ddof: int, eps: float, singleton: str, min_std: float
) -> _C.GroupAdvantageRule:
    """Return the options as the compiled module takes them. Raises ``ValueError`` that names a wrong one.

    The module doesn't know the scale ``"mean"``; the rule is then that of ``"none"``.
    """
    check_choice("scale", scale, (*SCALES, "mean"))
    if scale == "mean" and center == "none":
        raise ValueError("center='none': expected another one with scale='mean', which needs deviations from a centre")
    scale = "none" if scale == "mean" else scale
    check_options(pool, center, scale, ddof, eps, singleton, min_std)
    return _C.GroupAdvantageRule(*MODES[pool, center, scale, singleton], int(ddof), float(eps), float(min_std))


def _mean_divisors(
    rewards: np.ndarray, groups: np.ndarray, count: int, units: np.ndarray | None, eps: float
) -> np.ndarray:
    """Return the mean of each group plus ``eps``, ``[count]``; 1 for a group of one, or whose rewards are all 0."""
    if len(negative := np.flatnonzero(rewards < 0)):
        value = float(rewards[negative[0]])
        raise ValueError(f"rewards[{negative[0]}]={value!r}: expected numbers >= 0 with scale='mean', such as 0 and 1")
    means, of = _members(rewards, groups, units)
    sizes = np.bincount(of, minlength=count)
    means_of_groups = np.bincount(of, means, minlength=count) / np.maximum(sizes, 1)
    return np.where((sizes > 1) & (means_of_groups > 0), means_of_groups + eps, 1.0)


def _check_singletons(ids: np.ndarray, units: np.ndarray | None, groups: Sequence[Hashable]) -> None:
    rows = np.arange(len(ids)) if units is None else units
    pairs = np.unique(np.stack([ids, rows]), axis=1)[0]
    ids_of_members, members = np.unique(pairs, return_counts=True)
    if len(alone := ids_of_members[members == 1]):
        key = groups[int(np.flatnonzero(ids == alone[0])[0])]
        raise ValueError(f"group {key!r} has a single member, and singleton='error'")


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
    """Return a mask ``[count]`` bool of the groups of ``values [B]`` with several members that are all equal.

    ``groups`` and ``units`` are ids from 0. The rows of one unit in a group are one member, their mean.
    """
    means, of = _members(values, groups, units)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, of, means)
    np.maximum.at(high, of, means)
    several = np.bincount(of, minlength=count) > 1
    return several & (high - low <= tolerances(values, groups, count))


def _members(values: np.ndarray, groups: np.ndarray, units: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the value and the group of each member ``[M]``: of each row, or of each unit in a group, as its mean."""
    if units is None:
        return values, groups
    pairs, entry, rows = np.unique(groups * (units.max(initial=0) + 1) + units, return_inverse=True, return_counts=True)
    base = np.full(len(pairs), np.inf)
    np.minimum.at(base, entry, values)
    return base + np.bincount(entry, values - base[entry]) / rows, pairs // (units.max(initial=0) + 1)
