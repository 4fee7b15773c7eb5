"""Value of a problem to its proposer, by the share of attempts that solved it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Curve = Literal["variance", "linear", "hard"]

CURVES: dict[Curve, Callable[[float], float]] = {
    "variance": lambda p: 4.0 * p * (1.0 - p),
    "linear": lambda p: 1.0 - abs(2.0 * p - 1.0),
    "hard": lambda p: 1.0 - p if p > 0 else 0.0,
}
"""Maps from a pass rate in [0, 1] to a value in [0, 1]. It is 0 if every attempt solves the problem, or if none does.

``variance``: four times the variance of an attempt's outcome, the learnability of Rutherford et al. (No Regrets, 2024,
arXiv:2408.15099). ``linear``: R-Zero's uncertainty (Huang et al. 2025, arXiv:2508.05004). ``hard``: Absolute Zero's
reward, larger for harder problems as long as some attempt solves them (Zhao et al. 2025, arXiv:2505.03335).
"""
