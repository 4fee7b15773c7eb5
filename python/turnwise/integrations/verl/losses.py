"""Make verl policy losses of ``turnwise.ops.policy_loss``: loss, gradient and metrics in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from turnwise.ops import (
    CISPO,
    GMPO,
    GPG,
    GSPO,
    SAPO,
    Clip,
    ClipCov,
    KLCov,
    Variant,
    loss_normalizer,
    policy_loss,
    select_tokens,
)

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


# ---------------------------------------------------------------------------------------------------------------------
# The options of verl's ActorConfig
# ---------------------------------------------------------------------------------------------------------------------
def _range(config: Any) -> dict[str, float]:
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return {
        "low": config.clip_ratio if low is None else low,
        "high": config.clip_ratio if high is None else high,
    }


def _clip(config: Any) -> Clip:
    bounds, dual = _range(config), config.get("clip_ratio_c", 3.0)
    if dual <= 1 + bounds["high"]:
        raise ValueError(
            f"actor.clip_ratio_c={dual!r}: expected more than 1 + clip_ratio_high = {1 + bounds['high']!r}, "
            "as else it would undo the clip"
        )
    return Clip(**bounds, dual_clip=dual)


def _clip_cov(config: Any) -> ClipCov:
    chosen = config.policy_loss
    return ClipCov(**_range(config), share=chosen.clip_cov_ratio, lower=chosen.clip_cov_lb, upper=chosen.clip_cov_ub)


MODES: dict[str, Callable[[Any], Variant]] = {
    "vanilla": _clip,
    "gspo": lambda config: GSPO(**_range(config)),
    "cispo": lambda config: CISPO(**_range(config)),
    "gpg": lambda config: GPG(),
    "sapo": lambda config: SAPO(config.tau_pos, config.tau_neg),
    "geo_mean": lambda config: GMPO(**_range(config)),
    "clip_cov": _clip_cov,
    "kl_cov": lambda config: KLCov(config.policy_loss.kl_cov_ratio, config.policy_loss.ppo_kl_coef),
}
"""The losses of verl that ``policy_loss`` has, by verl's ``loss_mode``: ``ActorConfig -> Variant``."""

ONE_AGGREGATION = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""Losses that verl aggregates in one way, regardless of ``loss_agg_mode``."""


def batch_normalizer(mode: str, info: Mapping[str, Any], mask: Tensor) -> tuple[str, Tensor | float | None]:
    """Return ``aggregation`` and ``normalizer`` of ``policy_loss`` for verl's ``loss_agg_mode``.

    ``info`` is ``ActorConfig.global_batch_info``: ``dp_size``, ``batch_num_tokens`` and ``global_batch_size`` of the
    whole optimizer step, and ``loss_scale_factor``. Each may be missing or ``None``. Counts are divided by ``dp_size``,
    because FSDP and DDP average the gradients of the ranks. Without a count the loss takes that of ``mask [B, T]``.

    Raises ``ValueError`` for an unknown mode, and for a missing count with more than one rank.
    """
    ranks = info.get("dp_size") or 1
    tokens, rows, scale = (info.get(key) for key in ("batch_num_tokens", "global_batch_size", "loss_scale_factor"))
    if mode == "token-sum":
        return "token-mean", 1 / ranks
    if mode not in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):
        raise ValueError(
            f"loss_agg_mode={mode!r}: expected token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or "
            "seq-mean-token-sum-norm"
        )
    name, count = ("batch_num_tokens", tokens) if mode == "token-mean" else ("global_batch_size", rows)
    if count is None and ranks > 1:
        raise ValueError(f"global_batch_info[{name!r}]=None: expected the count of all {ranks} ranks")
    if mode != "seq-mean-token-sum-norm":
        return mode, None if count is None else count / ranks
    # verl's divides by the number of rows and by the width, a sum over rows that ours does in one number.
    count = loss_normalizer("seq-mean-token-sum", mask=mask) if count is None else count / ranks
    return "seq-mean-token-sum", count * (mask.shape[-1] if scale is None else scale)


def make_loss(mode: str) -> Loss:
    """Return the policy loss of verl for ``loss_mode`` ``mode``, one of :data:`MODES`.

    verl calls it with ``old_log_prob``, ``log_prob``, ``advantages`` and ``response_mask``, all ``[B, T]``,
    ``loss_agg_mode``, its ``ActorConfig`` and, for a rollout correction, ``rollout_is_weights [B, T]``. It returns the
    loss, 0-dim, and the metrics of verl's own loss under their names.

    Differences from verl's own: a batch without trained tokens has loss 0 instead of NaN, and ``geo_mean`` divides by
    the rows of the whole optimizer step, so that micro-batches and ranks add up to the mean of the step.

    Raises ``ValueError`` for ``kl_cov`` with ``rollout_is_weights``, and for an invalid clip range.
    """
    make_variant = MODES[mode]

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        if config is None:
            raise ValueError(f"config=None: expected verl's ActorConfig, from which turnwise_{mode} takes its options")
        variant = make_variant(config)
        only = ONE_AGGREGATION.get(mode, loss_agg_mode)
        if only != loss_agg_mode:
            warnings.warn(
                f"loss_agg_mode={loss_agg_mode!r} is not used: turnwise_{mode} takes {only}, as verl's {mode} does",
                stacklevel=2,
            )
        aggregation, normalizer = batch_normalizer(only, config.global_batch_info, response_mask)
        if mode == "geo_mean" and normalizer is None:
            normalizer = float(len(response_mask))  # verl's mean counts rows without tokens
        selected = None
        if rollout_is_weights is not None:
            if variant.selects:
                selected = select_tokens(log_prob.detach(), old_log_prob, advantages, variant, mask=response_mask)
            advantages = _weighted(mode, advantages, rollout_is_weights, response_mask)
        result = policy_loss(
            log_prob,
            old_log_prob,
            advantages,
            mask=response_mask,
            variant=variant,
            selected=selected,
            aggregation=aggregation,
            normalizer=normalizer,
        )
        return result.loss, _metrics(mode, result.metrics, log_prob, old_log_prob, response_mask)

    loss.__name__ = loss.__qualname__ = f"turnwise_{mode}"
    return loss


def _weighted(mode: str, advantages: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Multiply the advantages by weights ``>= 0``: each loss but KL-Cov is linear in ``A`` on either side of 0."""
    if mode == "kl_cov":
        raise ValueError(
            "rollout_is_weights: turnwise_kl_cov takes none, as its KL term has no advantage to weight. Use "
            "loss_mode=kl_cov, or algorithm.rollout_correction.rollout_is=null"
        )
    if mode == "geo_mean":  # one ratio per row, so one weight per row: the geometric mean, as in verl
        logs = torch.where(mask != 0, (weights + 1e-10).log(), 0.0)
        weights = (logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
    return advantages * weights


def _metrics(
    mode: str, metrics: Mapping[str, Tensor], log_prob: Tensor, old_log_prob: Tensor, mask: Tensor
) -> dict[str, float]:
    """Return the metrics of verl's loss, read from the device at once."""
    if mode == "gpg":
        return {}
    if mode == "kl_cov":
        distance = torch.where(mask != 0, (log_prob.detach() - old_log_prob).abs(), 0.0)
        return {"actor/ppo_kl": (distance.sum() / mask.sum().clamp(min=1)).item()}
    low, high, dual, kl = torch.stack(
        [metrics[name] for name in ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction", "approx_kl_k1")]
    ).tolist()
    if mode == "clip_cov":
        return {"actor/pg_clipfrac": dual, "actor/ppo_kl": kl}
    if mode == "geo_mean":
        return {"actor/pg_clipfrac": high, "actor/ppo_kl": kl, "actor/pg_clipfrac_lower": low}
    return {"actor/pg_clipfrac": low + high, "actor/ppo_kl": kl, "actor/pg_clipfrac_lower": dual}
