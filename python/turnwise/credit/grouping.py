"""Grouped advantages of NumPy columns, by the compiled core of ``turnwise.ops`` and without torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from turnwise import _C
from turnwise.credit.ties import tied_groups
from turnwise.utils.grouping import MODES, check_options


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

    Tied groups (:mod:`turnwise.credit.ties`) get 0. The rows of one of ``units`` count once, with their mean.
    ``options`` are those of ``ops.group_advantage``, all of them. Raises ``ValueError`` for a reward that is not
    finite, and for a group of one under ``singleton="error"``.
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
        if (options["center"], options["scale"]) != ("none", "none"):
            advantages[tied_groups(rewards, ids, count, unit_ids)[ids]] = 0.0
    return advantages


def rule_of(
    pool: str, *, center: str, scale: str, ddof: int, eps: float, singleton: str, min_std: float
) -> _C.GroupAdvantageRule:
    """Return the options as the compiled module takes them. Raises ``ValueError`` that names a wrong one."""
    check_options(pool, center, scale, ddof, eps, singleton, min_std)
    return _C.GroupAdvantageRule(*MODES[pool, center, scale, singleton], int(ddof), float(eps), float(min_std))


def _check_singletons(ids: np.ndarray, units: np.ndarray | None, groups: Sequence[Hashable]) -> None:
    rows = np.arange(len(ids)) if units is None else units
    pairs = np.unique(np.stack([ids, rows]), axis=1)[0]
    found, members = np.unique(pairs, return_counts=True)
    if len(alone := found[members == 1]):
        key = groups[int(np.flatnonzero(ids == alone[0])[0])]
        raise ValueError(f"group {key!r} has a single member, and singleton='error'")
