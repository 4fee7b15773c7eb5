"""The small option objects of the ops. Combinations that make no sense raise when they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass

KL_KINDS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
LEVELS = ("token", "sequence")


def _require_finite(owner: str, name: str, value: float, low: float, expected: str) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= low):
        raise ValueError(f"{owner}.{name}={value!r}: expected {expected}")


@dataclass(frozen=True, slots=True)
class Clip:
    """Where the policy ratio is clipped: to ``[1 - low, 1 + high]``, and for negative advantages at ``dual`` as well.

    ``high > low`` is clip-higher (DAPO, https://arxiv.org/abs/2503.14476, eq. 10). ``dual`` bounds the loss of a token
    with negative advantage by ``-A * dual`` (dual-clip PPO, https://arxiv.org/abs/1912.09729, eq. 5); 3 is usual.

    Example: ``Clip(low=0.2, high=0.28, dual=3.0)``
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        _require_finite("Clip", "low", self.low, 0.0, "a finite number >= 0")
        _require_finite("Clip", "high", self.high, 0.0, "a finite number >= 0")
        if self.dual is not None:
            _require_finite("Clip", "dual", self.dual, 1.0, "None or a finite number > 1")
            if self.dual <= 1.0 + self.high:
                raise ValueError(
                    f"Clip.dual={self.dual!r}: expected more than 1 + high = {1.0 + self.high!r}, as it lies beyond"
                )


@dataclass(frozen=True, slots=True)
class KL:
    """A KL term to reference log-probabilities, ``coef`` times an estimator of ``KL(policy || reference)`` per token.

    With ``d = ref - lp``: ``k1`` is ``-d``, ``abs`` is ``|d|``, ``k2`` is ``d**2 / 2``, ``k3`` is ``exp(d) - d - 1``
    with ``d`` clamped to +-20 and the value to +-10 (http://joschu.net/blog/kl-approx.html). ``k1+`` and ``k3+`` have
    that value and the gradient of ``k2``, which is the unbiased one.

    Example: ``KL("k3", coef=1e-3)``
    """

    kind: str = "k3"
    coef: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in KL_KINDS:
            raise ValueError(f"KL.kind={self.kind!r}: expected one of {', '.join(KL_KINDS)}")
        _require_finite("KL", "coef", self.coef, 0.0, "a finite number >= 0")


@dataclass(frozen=True, slots=True)
class ImportanceCorrection:
    """Truncated importance weights against the mismatch of sampler and trainer: ``min(exp(old - rollout), cap)``.

    ``old`` are the trainer's log-probabilities before the update, ``rollout`` the sampler's. The weight multiplies the
    clipped loss (not the KL term) and carries no gradient. ``level="sequence"`` uses the sum over the tokens of a row.

    Example: ``ImportanceCorrection(level="token", cap=2.0)``
    """

    level: str = "token"
    cap: float = 2.0

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"ImportanceCorrection.level={self.level!r}: expected one of {', '.join(LEVELS)}")
        _require_finite("ImportanceCorrection", "cap", self.cap, 0.0, "a finite number > 0")
        if self.cap == 0:
            raise ValueError(f"ImportanceCorrection.cap={self.cap!r}: expected a finite number > 0")
