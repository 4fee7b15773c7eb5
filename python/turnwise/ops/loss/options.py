"""The option objects of the policy loss. Building one with values that make no sense raises ``ValueError``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.ops.common.layout import is_number

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
IS_LEVELS = ("token", "sequence")
DIVERGENCES = {"tv": 0.15, "kl": 0.05}  # with the usual limit of DPPO


def _check_finite(owner: str, name: str, value: float, low: float, expected: str) -> None:
    if not (is_number(value) and low <= value < math.inf):
        raise ValueError(f"{owner}.{name}={value!r}: expected {expected}")


def _check_share(owner: str, share: float) -> None:
    _check_finite(owner, "share", share, 0.0, "a number in (0, 1]")
    if not 0 < share <= 1:
        raise ValueError(f"{owner}.share={share!r}: expected a number in (0, 1]")


class Variant:
    """Base of the loss variants: frozen objects that turn a token's ratio and advantage into its loss.

    ``kind`` is the variant's number in the kernels. ``bounds`` are the three numbers that the kernels read.
    """

    __slots__ = ()
    kind: ClassVar[int]
    selects: ClassVar[bool] = False  # it selects some tokens before the loss
    by_row: ClassVar[bool] = False  # its ratio belongs to a whole sequence
    by_batch: ClassVar[bool] = False  # it may look at all tokens of a call
    compiled: ClassVar[bool] = True  # the kernels can compute it; else only the "torch" backend serves it
    weighs_itself: ClassVar[bool] = False  # the weights of a correction are part of its own ratio
    aggregations: ClassVar[tuple[str, ...]] = ()  # those that leave it its meaning; empty: all

    @property
    def bounds(self) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0

    def _check_range(self, low: float, high: float) -> None:
        name = type(self).__name__
        _check_finite(name, "low", low, 0.0, "a finite number >= 0")
        _check_finite(name, "high", high, 0.0, "a finite number >= 0")


@dataclass(frozen=True, slots=True)
class Clip(Variant):
    """PPO's clip: keeps the policy ratio in ``[1 - low, 1 + high]``.

    ``high > low`` is clip-higher (DAPO, https://arxiv.org/abs/2503.14476, eq. 10). ``dual_clip`` bounds the loss of a
    token with negative advantage by ``-A * dual_clip`` (dual-clip PPO, https://arxiv.org/abs/1912.09729, eq. 5);
    3 is usual.

    Example: ``Clip(low=0.2, high=0.28, dual_clip=3.0)``
    """

    kind: ClassVar[int] = 0
    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        self._check_range(self.low, self.high)
        if self.dual_clip is not None:
            _check_finite("Clip", "dual_clip", self.dual_clip, 1.0, "None or a finite number > 1")
            if self.dual_clip <= 1.0 + self.high:
                raise ValueError(
                    f"Clip.dual_clip={self.dual_clip!r}: expected more than 1 + high = {1.0 + self.high!r}"
                )

    @property
    def bounds(self) -> tuple[float, float, float]:
        return 1.0 - self.low, 1.0 + self.high, math.inf if self.dual_clip is None else self.dual_clip


@dataclass(frozen=True, slots=True)
class GSPO(Variant):
    """PPO's clip on one ratio per sequence, ``exp(mean(lp - old))``. Every token gets a share of its gradient
    (https://arxiv.org/abs/2507.18071, eq. 13). Meant for ``aggregation="seq-mean-token-mean"``."""

    kind: ClassVar[int] = 1
    by_row: ClassVar[bool] = True
    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        self._check_range(self.low, self.high)

    @property
    def bounds(self) -> tuple[float, float, float]:
        return 1.0 - self.low, 1.0 + self.high, math.inf


@dataclass(frozen=True, slots=True)
class LUSPO(GSPO):
    """:class:`GSPO` without its length bias: the loss of a sequence counts times its length, so long answers lose no
    weight per token (https://arxiv.org/abs/2602.05261; bounds of section 5.1). Needs
    ``aggregation="seq-mean-token-sum"`` or ``"seq-mean-token-sum-norm"``; any other would make it GSPO."""

    aggregations: ClassVar[tuple[str, ...]] = ("seq-mean-token-sum", "seq-mean-token-sum-norm")
    low: float = 2e-3
    high: float = 2.5e-3


@dataclass(frozen=True, slots=True)
class CISPO(Variant):
    """``-A * clamp(ratio, 1 - low, 1 + high) * lp``. The clamped ratio carries no gradient, so every token keeps its
    gradient (https://arxiv.org/abs/2506.13585, eq. 4). ``low=1`` means that the ratio has no lower bound."""

    kind: ClassVar[int] = 2
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        self._check_range(self.low, self.high)

    @property
    def bounds(self) -> tuple[float, float, float]:
        return 1.0 - self.low, 1.0 + self.high, 0.0


@dataclass(frozen=True, slots=True)
class Reinforce(Variant):
    """``-A * lp``: the plain policy gradient (Williams 1992). The ratio appears only in the metrics."""

    kind: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class GPG(Variant):
    """``-A * lp`` (https://arxiv.org/abs/2504.02546, eq. 5): the loss of :class:`Reinforce` under its other name."""

    kind: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class SAPO(Variant):
    """A soft gate instead of the clip, ``-A * sigmoid(tau * (ratio - 1)) * 4 / tau``, with ``tau_positive`` where
    ``A > 0`` and ``tau_negative`` elsewhere (https://arxiv.org/abs/2511.20347, eq. 6)."""

    kind: ClassVar[int] = 4
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        for name in ("tau_positive", "tau_negative"):
            _check_finite("SAPO", name, getattr(self, name), 1e-6, "a finite number > 0")

    @property
    def bounds(self) -> tuple[float, float, float]:
        return self.tau_negative, self.tau_positive, 0.0


@dataclass(frozen=True, slots=True)
class GMPO(Variant):
    """``-A * exp(mean(d))``, the geometric mean of a sequence's ratios, with ``d = lp - old`` at most ``high`` where
    ``A > 0`` and at least ``-low`` where ``A < 0`` (https://arxiv.org/abs/2507.20673, eq. 4). Advantages per token
    count with their mean. Meant for ``aggregation="seq-mean-token-mean"``."""

    kind: ClassVar[int] = 5
    by_row: ClassVar[bool] = True
    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        self._check_range(self.low, self.high)

    @property
    def bounds(self) -> tuple[float, float, float]:
        return -self.low, self.high, 0.0


@dataclass(frozen=True, slots=True)
class ClipCov(Variant):
    """PPO's clip, with loss 0 for a few tokens whose covariance of advantage and log-probability is high
    (https://arxiv.org/abs/2505.22617, eq. 11).

    It draws them at random from the unclipped tokens with a covariance between ``lower`` and ``upper``: as many as
    ``share`` of all tokens, at least one. The draw uses torch's generator (``torch.manual_seed``) and covers the tokens
    of the call.
    """

    kind: ClassVar[int] = 6
    selects: ClassVar[bool] = True
    low: float = 0.2
    high: float = 0.2
    share: float = 2e-4
    lower: float = 1.0
    upper: float = 5.0

    def __post_init__(self) -> None:
        self._check_range(self.low, self.high)
        _check_share("ClipCov", self.share)
        if not is_number(self.lower):
            raise ValueError(f"ClipCov.lower={self.lower!r}: expected a number")
        if not (is_number(self.upper) and self.lower < self.upper):
            raise ValueError(f"ClipCov.upper={self.upper!r}: expected more than lower = {self.lower!r}")

    @property
    def bounds(self) -> tuple[float, float, float]:
        return 1.0 - self.low, 1.0 + self.high, math.inf


@dataclass(frozen=True, slots=True)
class KLCov(Variant):
    """``-A * ratio``, plus ``coef * |lp - old|`` for the ``share`` of tokens (at least one) with the highest covariance
    of advantage and log-probability (https://arxiv.org/abs/2505.22617, eq. 12)."""

    kind: ClassVar[int] = 7
    selects: ClassVar[bool] = True
    share: float = 2e-4
    coef: float = 1.0

    def __post_init__(self) -> None:
        _check_share("KLCov", self.share)
        _check_finite("KLCov", "coef", self.coef, 0.0, "a finite number >= 0")

    @property
    def bounds(self) -> tuple[float, float, float]:
        return 0.0, 0.0, self.coef


@dataclass(frozen=True, slots=True)
class DPPO(Variant):
    """``-A * min(ratio, cap) * lp``, where the ratio carries no gradient, and 0 for a token that the update has already
    moved too far in the direction of its advantage (https://arxiv.org/abs/2602.04879).

    With ``p = exp(lp)`` and ``q = exp(old)``, a token with ``A > 0`` is too far if ``p > q`` and its divergence exceeds
    ``high``; one with ``A < 0`` if ``p < q`` and it exceeds ``low``. ``divergence="tv"`` is ``|p - q|``, ``"kl"`` is
    ``q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))``. A limit of ``None`` is 0.15 for ``"tv"``, 0.05 for ``"kl"``.
    The clip fractions count the tokens that are too far, ``dual_clip_fraction`` the capped ratios of the others. Plain
    PyTorch computes it.
    """

    compiled: ClassVar[bool] = False
    divergence: str = "tv"
    low: float | None = None
    high: float | None = None
    cap: float = 20.0

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"DPPO.divergence={self.divergence!r}: expected one of {', '.join(DIVERGENCES)}")
        low, high, cap = self.bounds
        self._check_range(low, high)
        _check_finite("DPPO", "cap", cap, 1.0, "a finite number >= 1")

    @property
    def bounds(self) -> tuple[float, float, float]:
        usual = DIVERGENCES[self.divergence]
        return usual if self.low is None else self.low, usual if self.high is None else self.high, self.cap


@dataclass(frozen=True, slots=True)
class DRO(Variant):
    """``-A * lp + beta / 2 * (lp - old)**2``: a policy gradient with a quadratic penalty instead of a clip, also for
    off-policy data (https://arxiv.org/abs/2405.19107). Plain PyTorch computes it."""

    compiled: ClassVar[bool] = False
    beta: float

    def __post_init__(self) -> None:
        _check_finite("DRO", "beta", self.beta, 1e-9, "a finite number > 0")


@dataclass(frozen=True, slots=True)
class VESPO(Variant):
    """``-phi(w) * A * lp`` with the ratio of a whole sequence, ``w = exp(sum(lp - old))``, and a weight that fades on
    both sides of 1 instead of a clip: ``phi(w) = exp(lam) * w**k * exp(-lam * w)``, so that ``phi(1) = 1``
    (https://arxiv.org/abs/2602.10693).

    ``k_positive`` and ``lam_positive`` apply where ``A >= 0``, the others elsewhere. ``phi`` carries no gradient. The
    weights of a ``correction`` multiply ``w`` instead of the loss, so it must have ``level="token"``. ``w`` lies
    between 1e-8 and ``exp(20)``. Plain PyTorch computes it.
    """

    by_row: ClassVar[bool] = True
    compiled: ClassVar[bool] = False
    weighs_itself: ClassVar[bool] = True
    k_positive: float = 2.0
    lam_positive: float = 3.0
    k_negative: float = 3.0
    lam_negative: float = 2.0

    def __post_init__(self) -> None:
        for name in ("k_positive", "k_negative"):
            _check_finite("VESPO", name, getattr(self, name), 0.0, "a finite number >= 0")
        for name in ("lam_positive", "lam_negative"):
            _check_finite("VESPO", name, getattr(self, name), 1e-4, "a finite number >= 1e-4")


@dataclass(frozen=True, slots=True)
class Custom(Variant):
    """A user-defined loss: ``function(logprobs [n], old_logprobs [n], advantages [n])`` returns the loss ``[n]`` of the
    ``n`` tokens that train, in PyTorch. Autograd computes its gradient.

    A token's loss may depend on other tokens only if one call covers the whole optimizer step. Correction, KL term,
    aggregation and metrics work as for the other variants. Only the ``"torch"`` backend serves it.

    Example: ``Custom(lambda logprobs, old_logprobs, advantages: -advantages * (logprobs - old_logprobs).exp())``
    """

    by_batch: ClassVar[bool] = True
    compiled: ClassVar[bool] = False
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Custom.function={self.function!r}: expected a function")


@dataclass(frozen=True, slots=True)
class KL:
    """A KL term to reference log-probabilities, ``coef`` times an estimator of ``KL(policy || reference)`` per token.

    With ``d = ref - lp``: ``k1`` is ``-d``, ``abs`` is ``|d|``, ``k2`` is ``d**2 / 2``, ``k3`` is ``exp(d) - d - 1``
    with ``d`` clamped to +-20 and the value to +-10 (http://joschu.net/blog/kl-approx.html). ``k1+`` and ``k3+`` have
    the values of ``k1`` and ``k3``, and the gradient of ``k2``, which is unbiased.

    ``importance_weighted`` multiplies the estimate by the importance ratio, and the gradient flows through both. Over
    tokens that the old policy sampled, ``k1`` and ``k3`` then average to the KL of the current policy, and their
    gradients to its gradient (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556; TRL's ``use_bias_correction_kl``). The
    ratio is the token's, ``exp(clamp(lp - old, -20, 20))``, neither clipped nor corrected; with :class:`GSPO` it is the
    sequence's. ``k1+`` and ``k3+`` can't be weighted, as their gradient is already that of the KL. The metric ``kl``
    stays the plain estimate.

    Example: ``KL("k3", coef=1e-3, importance_weighted=True)``
    """

    estimator: str = "k3"
    coef: float = 1e-3
    importance_weighted: bool = False

    def __post_init__(self) -> None:
        if self.estimator not in KL_ESTIMATORS:
            raise ValueError(f"KL.estimator={self.estimator!r}: expected one of {', '.join(KL_ESTIMATORS)}")
        _check_finite("KL", "coef", self.coef, 0.0, "a finite number >= 0")
        if not isinstance(self.importance_weighted, bool):
            raise ValueError(f"KL.importance_weighted={self.importance_weighted!r}: expected True or False")
        if self.importance_weighted and self.estimator.endswith("+"):
            raise ValueError(
                f"KL.importance_weighted=True: expected False with estimator={self.estimator!r}, whose gradient is "
                f"that of the KL already. Use estimator={self.estimator[:-1]!r}"
            )


@dataclass(frozen=True, slots=True)
class ImportanceCorrection:
    """Truncated importance weights that correct the mismatch of sampler and trainer: ``min(exp(old - rollout), cap)``.

    ``old`` are the trainer's log-probabilities before the update, ``rollout`` the sampler's. The weight multiplies the
    clipped loss (not the KL term) and carries no gradient. ``level="sequence"`` uses the sum over the tokens of a row.
    ``bounds=(low, high)`` rejects tokens: where ``exp(old - rollout)`` lies outside, the weight is 0.

    Example: ``ImportanceCorrection(level="token", cap=2.0, bounds=(0.5, 5.0))``
    """

    level: str = "token"
    cap: float = 2.0
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.level not in IS_LEVELS:
            raise ValueError(f"ImportanceCorrection.level={self.level!r}: expected one of {', '.join(IS_LEVELS)}")
        _check_finite("ImportanceCorrection", "cap", self.cap, 0.0, "a finite number > 0")
        if self.cap == 0:
            raise ValueError(f"ImportanceCorrection.cap={self.cap!r}: expected a finite number > 0")
        if self.bounds is None:
            return
        bounds = tuple(self.bounds) if isinstance(self.bounds, tuple | list) else ()
        if not (len(bounds) == 2 and all(map(is_number, bounds)) and 0 <= bounds[0] < bounds[1]):
            raise ValueError(
                f"ImportanceCorrection.bounds={self.bounds!r}: expected None or (low, high), 0 <= low < high"
            )
        if self.cap <= bounds[0]:
            raise ValueError(
                f"ImportanceCorrection.cap={self.cap!r}: expected more than bounds[0] = {bounds[0]!r}, as else every "
                "token that is kept has the same weight"
            )
        object.__setattr__(self, "bounds", bounds)  # a settings file gives a list, which can't be hashed
