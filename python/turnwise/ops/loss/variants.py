"""Compute each variant's loss per token in plain PyTorch, with one small function per option object."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.layout import (
    RowLayout,
    Streams,
    check_stream_values,
    check_streams,
    check_tensors,
    sees_values,
    trained_tokens,
)
from turnwise.ops.loss.options import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GPG,
    GSPO,
    LUSPO,
    SAPO,
    VESPO,
    Clip,
    ClipCov,
    Custom,
    KLCov,
    Reinforce,
    Variant,
)

LOG_RATIO_BOUND = 20.0
LOG_WEIGHT_FLOOR = math.log(1e-8)


class Tokens(NamedTuple):
    """The inputs of a variant. Streams are 0 where masked. ``log_ratio`` is ``logprobs - old`` clamped to +-20.

    ``correction`` are the weights of an importance correction, for a variant that ``weighs_itself``.
    """

    logprobs: Tensor
    old: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    selected: Tensor | None
    rows: RowLayout
    correction: Tensor | None = None


class TokenLoss(NamedTuple):
    """One variant's loss per token, and the tokens that it clipped low, high or by the dual clip (or selected)."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def _surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    negative = advantages < 0
    below, above = negative & (ratio < 1 - low), (advantages > 0) & (ratio > 1 + high)
    return TokenLoss(loss, below, above, torch.zeros_like(negative))


def _clip(t: Tokens, v: Clip) -> TokenLoss:
    """PPO: ``max(-A * ratio, -A * clip(ratio))``, bounded by ``-A * dual_clip`` for ``A < 0``."""
    token = _surrogate(t.ratio, t.advantages, v.low, v.high)
    if v.dual_clip is None:
        return token
    bound = -t.advantages * v.dual_clip
    dual_clipped = (t.advantages < 0) & (token.loss > bound)
    return token._replace(loss=torch.where(dual_clipped, bound, token.loss), clipped_dual=dual_clipped)


def _row_mean(t: Tokens, values: Tensor) -> Tensor:
    """The mean over a row's trained tokens, repeated at every token of the row."""
    count = t.rows.sum(t.mask.to(values.dtype)).clamp(min=1)
    return t.rows.spread(t.rows.sum(values) / count)


def _gspo(t: Tokens, v: GSPO) -> TokenLoss:
    mean = _row_mean(t, (t.logprobs - t.old).detach())
    ratio = (t.logprobs - t.logprobs.detach() + mean).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return _surrogate(ratio, t.advantages, v.low, v.high)


def importance_ratio(t: Tokens, variant: Variant) -> Tensor:
    """The factor of an importance-weighted KL term: the token's own ratio, or the sequence's ratio for GSPO."""
    if not isinstance(variant, GSPO):
        return t.ratio
    return _row_mean(t, t.logprobs - t.old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _cispo(t: Tokens, v: CISPO) -> TokenLoss:
    weight = t.ratio.detach().clamp(1 - v.low, 1 + v.high)
    below, above = t.ratio < 1 - v.low, t.ratio > 1 + v.high
    return TokenLoss(-t.advantages * weight * t.logprobs, below, above, torch.zeros_like(below))


def _policy_gradient(t: Tokens, v: Reinforce | GPG) -> TokenLoss:
    none = torch.zeros_like(t.mask)
    return TokenLoss(-t.advantages * t.logprobs, none, none, none)


def _sapo(t: Tokens, v: SAPO) -> TokenLoss:
    tau = torch.full_like(t.ratio, v.tau_negative).masked_fill(t.advantages > 0, v.tau_positive)
    none = torch.zeros_like(t.mask)
    return TokenLoss(-t.advantages * torch.sigmoid(tau * (t.ratio - 1)) * (4 / tau), none, none, none)


def _gmpo(t: Tokens, v: GMPO) -> TokenLoss:
    d, up, down = t.log_ratio, t.advantages > 0, t.advantages < 0
    bounded = torch.where(up, d.clamp(max=v.high), torch.where(down, d.clamp(min=-v.low), torch.zeros_like(d)))
    ratio = _row_mean(t, torch.where(t.mask, bounded, 0.0)).exp()
    return TokenLoss(
        -_row_mean(t, t.advantages) * ratio, down & (d < -v.low), up & (d > v.high), torch.zeros_like(t.mask)
    )


def _clip_cov(t: Tokens, v: ClipCov) -> TokenLoss:
    assert t.selected is not None
    token = _surrogate(t.ratio, t.advantages, v.low, v.high)
    return token._replace(loss=torch.where(t.selected, 0.0, token.loss), clipped_dual=t.selected)


def _kl_cov(t: Tokens, v: KLCov) -> TokenLoss:
    assert t.selected is not None
    none = torch.zeros_like(t.mask)
    loss = -t.advantages * t.ratio + torch.where(t.selected, v.coef * t.log_ratio.abs(), 0.0)
    return TokenLoss(loss, none, none, t.selected)


def _dppo(t: Tokens, v: DPPO) -> TokenLoss:
    low, high, cap = v.bounds
    p, q = t.logprobs.detach().exp(), t.old.exp()
    divergence = (p - q).abs()
    if v.divergence == "kl":
        rest = (-torch.expm1(t.old) + 1e-8) / (-torch.expm1(t.logprobs.detach()) + 1e-8)
        divergence = q * (t.old - t.logprobs.detach()) + (1 - q) * rest.log()
    below = (t.advantages < 0) & (p < q) & (divergence > low)
    above = (t.advantages > 0) & (p > q) & (divergence > high)
    weight = t.ratio.detach().clamp(max=cap)
    loss = torch.where(below | above, 0.0, -t.advantages * weight * t.logprobs)
    return TokenLoss(loss, below, above, (t.ratio > cap) & ~(below | above))


def _dro(t: Tokens, v: DRO) -> TokenLoss:
    none = torch.zeros_like(t.mask)
    return TokenLoss(-t.advantages * t.logprobs + 0.5 * v.beta * (t.logprobs - t.old).square(), none, none, none)


def _vespo(t: Tokens, v: VESPO) -> TokenLoss:
    log_ratio = t.log_ratio.detach()
    if t.correction is not None:  # a rejected token has weight 0
        log_ratio = log_ratio + t.correction.log().clamp(LOG_WEIGHT_FLOOR, LOG_RATIO_BOUND)
    log_w = t.rows.spread(t.rows.sum(torch.where(t.mask, log_ratio, 0.0))).clamp(LOG_WEIGHT_FLOOR, LOG_RATIO_BOUND)
    up = t.advantages >= 0
    k = torch.full_like(log_w, v.k_negative).masked_fill(up, v.k_positive)
    lam = torch.full_like(log_w, v.lam_negative).masked_fill(up, v.lam_positive)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    none = torch.zeros_like(t.mask)
    return TokenLoss(-phi * t.advantages * t.logprobs, none, none, none)


def _custom(t: Tokens, v: Custom) -> TokenLoss:
    trained = t.mask.nonzero(as_tuple=True)
    loss = v.function(t.logprobs[trained], t.old[trained], t.advantages[trained])
    if not isinstance(loss, Tensor) or loss.shape != trained[0].shape or not loss.is_floating_point():
        got = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"variant={v!r} gave {got}: expected the loss of each token, floats {tuple(trained[0].shape)}")
    none = torch.zeros_like(t.mask)
    return TokenLoss(torch.zeros_like(t.logprobs).index_put(trained, loss.to(t.logprobs.dtype)), none, none, none)


_LOSS: dict[type[Variant], Callable[[Tokens, Any], TokenLoss]] = {
    Clip: _clip,
    GSPO: _gspo,
    LUSPO: _gspo,
    CISPO: _cispo,
    Reinforce: _policy_gradient,
    GPG: _policy_gradient,
    SAPO: _sapo,
    GMPO: _gmpo,
    ClipCov: _clip_cov,
    KLCov: _kl_cov,
    DPPO: _dppo,
    DRO: _dro,
    VESPO: _vespo,
    Custom: _custom,
}


def is_known(variant: object) -> bool:
    """True for the option objects of this package. The ops accept no others."""
    return type(variant) in _LOSS


def token_loss(tokens: Tokens, variant: Variant) -> TokenLoss:
    return _LOSS[type(variant)](tokens, variant)


# ---------------------------------------------------------------------------------------------------------------------
# Selection by covariance: torch ops that never wait for the device
# ---------------------------------------------------------------------------------------------------------------------
def _first(keys: Tensor, count: Tensor) -> Tensor:
    """Mark the ``count`` (0-dim, on the device) largest ``keys`` with True. Ties go to the lower index."""
    order = torch.sort(keys.flatten(), descending=True, stable=True).indices
    chosen = torch.arange(order.numel(), device=keys.device) < count
    return torch.zeros_like(chosen).scatter(0, order, chosen).reshape(keys.shape)


@torch.no_grad()
def select_by_covariance(s: Streams, variant: Variant) -> Tensor:
    """Select the tokens that :class:`ClipCov` or :class:`KLCov` treats differently: bool, the shape of ``logprobs``."""
    rows = RowLayout(s.logprobs, s.cu_seqlens)
    mask = trained_tokens(s.mask, s.logprobs)
    dtype = torch.promote_types(s.logprobs.dtype, torch.float32)

    def stream(values: Tensor) -> Tensor:
        return torch.where(mask, values.to(dtype), 0.0)

    # Covariance of advantage and log-probability per token, and the number of tokens to select.
    tokens = mask.sum()
    count = tokens.clamp(min=1)
    logprobs, advantages = stream(s.logprobs), stream(rows.spread(s.advantages))
    covariance = (advantages - advantages.sum() / count) * (logprobs - logprobs.sum() / count)
    assert isinstance(variant, ClipCov | KLCov)
    number = (tokens.double() * variant.share).floor().clamp(min=1)
    if isinstance(variant, KLCov):
        return _first(torch.where(mask, covariance, -torch.inf), number) & mask
    # Clip-Cov draws at random among the unclipped tokens whose covariance is in range.
    ratio = (logprobs - stream(s.old_logprobs)).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - variant.low, 1 + variant.high)
    spared = mask & ~(clipped > plain) & (covariance > variant.lower) & (covariance < variant.upper)
    draw = torch.rand(mask.shape, device=mask.device)
    return _first(torch.where(spared, draw, -1.0), number) & spared


def select_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    variant: Variant,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Select the tokens that ``variant`` treats differently: bool, in the shape of ``logprobs``.

    Pass the result to :func:`policy_loss` as ``selected``. :class:`ClipCov` and :class:`KLCov` compare a token with all
    others. If an optimizer step is split into micro-batches, select over the whole step and give each micro-batch its
    part. Arguments and their checks are those of :func:`policy_loss`. Raises ``TypeError`` for a variant that selects
    no tokens.
    """
    if not (is_known(variant) and variant.selects):
        raise TypeError(f"variant={variant!r}: expected one that singles out tokens, ClipCov or KLCov")
    s = Streams(logprobs, old_logprobs, advantages, mask, cu_seqlens)
    check_tensors(s)
    check_streams(s, None)
    if sees_values(logprobs):
        check_stream_values(s, None)
    return select_by_covariance(s, variant)
