"""The formulas of the policy loss for Triton, equal to those of ``csrc/ops/policy_loss_math.h``: one function each.

Each variant returns four values per token: the loss; its derivative by the log-probability; whether the token is
clipped low; and an integer, 1 if it is clipped high, ``OTHER`` if the dual clip bounds it or it is selected, else 0.
NaN passes through every clamp.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import triton
import triton.language as tl

from turnwise.ops.loss import options
from turnwise.ops.loss.reference import KL_BOUND, LOG_RATIO_BOUND

# The numbers that the options give their variants, estimators and levels.
GSPO, CISPO, GRADIENT = (tl.constexpr(v.kind) for v in (options.GSPO, options.CISPO, options.Reinforce))
SAPO, GMPO = tl.constexpr(options.SAPO.kind), tl.constexpr(options.GMPO.kind)
CLIP_COV, KL_COV = tl.constexpr(options.ClipCov.kind), tl.constexpr(options.KLCov.kind)
K1, ABS, K2, K3, K1_PLUS, K3_PLUS = (tl.constexpr(i + 1) for i in range(len(options.KL_ESTIMATORS)))
TOKEN, SEQUENCE = (tl.constexpr(i + 1) for i in range(len(options.IS_LEVELS)))

FAR = tl.constexpr(LOG_RATIO_BOUND)
MAX_KL = tl.constexpr(KL_BOUND)
INF = tl.constexpr(math.inf)
OTHER = tl.constexpr(65536)  # counts in the upper half of an integer whose lower half counts ones
LOG2E, LN2 = tl.constexpr(1 / math.log(2)), tl.constexpr(math.log(2))
SAME = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def exp(x):
    """For tokens: 1e-7 for |x| < 1, 2e-6 at 20. Subnormal results, for which ``tl.exp`` is slower, don't occur."""
    return tl.exp2(x * LOG2E)


@triton.jit
def exact_exp(x):
    """For rows: adds back what the rounding of x * log2(e) loses."""
    power = x * LOG2E
    lost = tl.fma(x, LOG2E, -power)
    two = tl.exp2(power)
    return tl.fma(two, lost * LN2, two)


@triton.jit
def clamp(x, low, high):
    return tl.maximum(low, tl.minimum(high, x, propagate_nan=SAME), propagate_nan=SAME)


@triton.jit
def surrogate(ratio, cut, advantage, scaled, low, high, dual):
    """PPO. With the sign of A known, the clip bounds the ratio on one side, and the dual clip of A < 0 on the other."""
    negative, positive = advantage < 0, advantage > 0
    lowest = tl.where(negative, low, -INF)
    highest = tl.where(positive, high, tl.where(negative, dual, INF))
    below, above = ratio < lowest, ratio > highest
    loss = -scaled * clamp(ratio, lowest, highest)
    grad = tl.where(cut | below | above, 0.0, -scaled * ratio)
    return loss, grad, below, tl.where(above, tl.where(positive, 1, OTHER), 0)


@triton.jit
def cispo(logprob, ratio, scaled, low, high):
    grad = -scaled * clamp(ratio, low, high)
    return grad * logprob, grad, ratio < low, tl.where(ratio > high, 1, 0)


@triton.jit
def policy_gradient(logprob, scaled, none):
    return -scaled * logprob, -scaled, none, tl.where(none, 1, 0)


@triton.jit
def sapo(ratio, cut, advantage, scaled, none, tau_negative, tau_positive):
    tau = tl.where(advantage > 0, tau_positive, tau_negative)
    decay = exp(clamp(tau * (1 - ratio), -80.0, 80.0))
    gate = 1 / (1 + decay)
    loss = -scaled * gate * (4 / tau)
    grad = -scaled * (4 * gate) * (gate * decay) * ratio
    return loss, tl.where(cut, 0.0, grad), none, tl.where(none, 1, 0)


@triton.jit
def gmpo_bounded(log_ratio, advantage, low, high):
    """The log-ratio as it enters GMPO's mean."""
    above = tl.minimum(high, log_ratio, propagate_nan=SAME)
    below = tl.maximum(low, log_ratio, propagate_nan=SAME)
    return tl.where(advantage > 0, above, tl.where(advantage < 0, below, 0.0))


@triton.jit
def gmpo(log_ratio, cut, advantage, scaled, row_ratio, low, high):
    up, down = advantage > 0, advantage < 0
    below, above = down & (log_ratio < low), up & (log_ratio > high)
    loss = -scaled * row_ratio
    open_ = (up | down) & ((cut | below | above) == 0)
    return loss, tl.where(open_, loss, 0.0), below, tl.where(above, 1, 0)


@triton.jit
def clip_cov(ratio, cut, advantage, scaled, selected, low, high, dual):
    loss, grad, below, upper = surrogate(ratio, cut, advantage, scaled, low, high, dual)
    upper += tl.where(selected, OTHER, 0)  # Clip-Cov has no dual clip, so OTHER only means selected
    return tl.where(selected, 0.0, loss), tl.where(selected, 0.0, grad), below, upper


@triton.jit
def kl_cov(log_ratio, ratio, cut, scaled, selected, none, coef):
    plain = -scaled * ratio
    sign = tl.where(log_ratio > 0, coef, tl.where(log_ratio < 0, -coef, 0.0))
    loss = plain + tl.where(selected, coef * tl.abs(log_ratio), 0.0)
    grad = plain + tl.where(selected, sign, 0.0)
    return loss, tl.where(cut, 0.0, grad), none, tl.where(selected, OTHER, 0)


@triton.jit
def kl_term(d, KL: tl.constexpr):
    """Value and derivative of an estimator of KL(policy || reference), d = ref - logprob."""
    if (KL == K1) | (KL == K1_PLUS):
        value = -d
        grad = -d if KL == K1_PLUS else d * 0 + 1
    elif KL == K2:
        value, grad = 0.5 * d * d, -d
    elif KL == ABS:
        value = tl.abs(d)
        grad = tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))
    else:
        bounded = clamp(d, -FAR, FAR)
        growth = exp(bounded) - 1
        k3 = growth - bounded
        value = tl.minimum(k3, MAX_KL, propagate_nan=SAME)
        # k3 is never far below 0, so only the upper bound applies. Beyond +-20 it always does.
        grad = -d if KL == K3_PLUS else tl.where(k3 > MAX_KL, 0.0, -growth)
    return value, grad


@triton.jit
def importance_weighted(kl, slope, ratio, carried):
    """An estimate times an importance ratio, and the derivative through both; ``carried`` is the estimate that the
    derivative of the ratio brings to a token."""
    return ratio * kl, ratio * (slope + carried)


@triton.jit
def token_loss(
    logprob, log_ratio, ratio, cut, advantage, scaled, weight, selected, row_ratio, row_cut, low, high, dual,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """The variant's own loss, times the token's weight.

    ``scaled`` is the advantage (GMPO: the row's) times the weight, and 0 where masked, as is the log-ratio.
    """
    none = cut & (cut == 0)
    if VARIANT == GSPO:
        out = surrogate(row_ratio, row_cut, advantage, scaled, low, high, dual)
    elif VARIANT == CISPO:
        out = cispo(logprob, ratio, scaled, low, high)
    elif VARIANT == GRADIENT:
        out = policy_gradient(logprob, scaled, none)
    elif VARIANT == SAPO:
        out = sapo(ratio, cut, advantage, scaled, none, low, high)
    elif VARIANT == GMPO:
        out = gmpo(log_ratio, cut, advantage, scaled, row_ratio, low, high)
    elif VARIANT == CLIP_COV:
        out = clip_cov(ratio, cut, advantage, scaled, selected, low, high, dual)
    elif VARIANT == KL_COV:
        out = kl_cov(log_ratio, ratio, cut, scaled, selected, none, dual * weight)
    else:
        out = surrogate(ratio, cut, advantage, scaled, low, high, dual)
    return out
