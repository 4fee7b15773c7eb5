"""The options of grouped advantages, which ``ops`` computes on tensors and ``credit`` on arrays."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

POOLS = ("rows", "trajectory")
CENTERS = ("mean", "leave_one_out", "none", "length_weighted")
SCALES = ("std", "none")
SINGLETONS = ("zero", "raw", "error")

MODES = {
    (pool, center, scale, singleton): (i == 1, j, k, m)
    for i, pool in enumerate(POOLS)
    for j, center in enumerate(CENTERS)
    for k, scale in enumerate(SCALES)
    for m, singleton in enumerate(SINGLETONS)
}
"""The names as the compiled module takes them."""


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def check_options(pool: str, center: str, scale: str, ddof: int, eps: float, singleton: str, min_std: float) -> None:
    check_choice("pool", pool, POOLS)
    check_choice("center", center, CENTERS)
    check_choice("scale", scale, SCALES)
    check_choice("singleton", singleton, SINGLETONS)
    if not (isinstance(ddof, Integral) and not isinstance(ddof, bool) and ddof in (0, 1)):
        raise ValueError(f"ddof={ddof!r}: expected 0 or 1")
    for name, value in (("eps", eps), ("min_std", min_std)):
        if not _is_finite_size(value):
            raise ValueError(f"{name}={value!r}: expected a finite number >= 0")


def _is_finite_size(value: Any) -> bool:
    """True for a number >= 0 of Python, NumPy or torch."""
    if isinstance(value, bool):
        return False
    try:
        return bool(0 <= value < math.inf)
    except (TypeError, ValueError, RuntimeError):  # no number, or an array of several
        return False
