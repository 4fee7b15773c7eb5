"""Drop the sequences that went wrong and that the policy has left since."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from turnwise.ops.common.layout import RowLayout, is_number
from turnwise.ops.masks.checks import check_pair


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    threshold: float,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Mark the tokens to keep: bool, the shape of ``logprobs``.

    A token is dropped if its advantage is negative and the mean of ``rollout_logprobs - logprobs`` over the trained
    tokens of its sequence is more than ``threshold``: an estimate of the KL from the policy that sampled it
    (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 9; TRL's ``off_policy_mask_threshold``, for example 0.5). A
    model learns from its own mistakes, but those of a distant policy destabilise it.

    ``logprobs`` are of the current policy, ``rollout_logprobs`` of the sampler, or ``old_logprobs`` to see the drift of
    updates alone. A NaN there, which an engine returns for a token that it could not score, counts as no drift. Streams
    and ``advantages`` have the shapes of :func:`policy_loss`. Masked tokens may hold any value and are never marked.
    Multiply per-token advantages by the result to drop the policy gradient alone, as TRL does, or pass it as ``mask=``.
    Raises ``ValueError`` or ``TypeError`` naming the argument.

    Example: ``off_policy_mask(logprobs, rollout_logprobs, advantages, 0.5, mask=mask)``
    """
    if not (is_number(threshold) and 0 <= threshold < math.inf):
        raise ValueError(f"threshold={threshold!r}: expected a finite number >= 0")
    check_pair("logprobs", logprobs, rollout_logprobs, mask, cu_seqlens)
    rows = RowLayout(logprobs, cu_seqlens)
    if not isinstance(advantages, Tensor):
        raise TypeError(f"advantages: expected a tensor, got {type(advantages).__name__}")
    if advantages.shape not in ((rows.count,), (rows.count, 1), logprobs.shape):
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}: expected ({rows.count},), one per sequence, or "
            f"{tuple(logprobs.shape)}, one per token"
        )
    trained = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask != 0
    drift = torch.where(trained & ~rollout_logprobs.isnan(), rollout_logprobs.double() - logprobs.double(), 0.0)
    mean = rows.sum(drift) / rows.sum(trained.double()).clamp(min=1)
    return trained & ((rows.spread(advantages) >= 0) | rows.spread(mean <= threshold))
