"""Advantages per token against the baseline that minimises the gradient's variance, in plain PyTorch on any device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from turnwise.ops.advantage.checks import is_integral
from turnwise.ops.common.layout import (
    RowLayout,
    check_floats,
    check_like,
    check_optional,
    check_token_values,
    check_tokens,
    is_number,
    row_count,
    trained_tokens,
)


@torch.no_grad()
def optimal_token_baseline(
    token_rewards: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
    group_ids: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    weights: Tensor | None = None,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Compute ``(advantages, returns)`` with one baseline per group and token position, ``A = G - B``.

    ``G`` are the rewards to go. ``B[t] = sum(G[t] * W[t]) / (sum(W[t]) + eps)`` over the rows of the group that reach
    position ``t``, where ``W[t]`` is the sum up to ``t`` of ``1 - 2 * pi + sum_pi_squared``: the squared norm of a
    token's gradient at the logits. So the rows with the largest gradients weigh most (the Optimal Token Baseline,
    https://arxiv.org/abs/2602.07078; verl's ``optimal_token_baseline`` and ``tir_optimal_token_baseline``). A position
    counts trained tokens only, so an environment's turns in between shift no position. ``B`` is 0 at positions that
    only one row of the group reaches. The squares of ``weights``, those of an importance correction, multiply the terms
    of ``W``.

    Streams are ``[B, T]`` with ``mask``, or packed ``[N]`` with ``cu_seqlens``: ``token_rewards``; ``old_logprobs`` of
    the policy that sampled, so ``pi = exp(old_logprobs)``; ``sum_pi_squared``, the sum over the vocabulary of squared
    probabilities, ``(2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)`` exponentiated. Masked tokens may hold any
    value and get 0. ``group_ids [B]`` are integers. Sums are float64; results are float32 (float64 if ``token_rewards``
    are). On a GPU it waits for the device. Raises ``ValueError`` or ``TypeError`` naming the argument.

    Example: rows with rewards 1 and 0 at their only token, each drawn at ``pi = .5`` of two tokens
    (``sum_pi_squared = .5``), have ``B = .5`` and advantages .5 and -.5.
    """
    streams = {"token_rewards": token_rewards, "old_logprobs": old_logprobs, "sum_pi_squared": sum_pi_squared}
    _check(streams | ({} if weights is None else {"weights": weights}), group_ids, mask, cu_seqlens, eps)
    rows = RowLayout(token_rewards, cu_seqlens)
    trained = trained_tokens(mask, token_rewards)

    def stream(values: Tensor) -> Tensor:
        return torch.where(trained, values.double(), 0.0)

    def up_to(values: Tensor) -> Tensor:
        """The sum over a row up to each token, that token included."""
        if rows.row is None:
            return values.cumsum(dim=1)
        sums = rows.sum(values)
        return values.cumsum(dim=0) - rows.spread(sums.cumsum(dim=0) - sums)

    rewards = stream(token_rewards)
    returns = torch.where(trained, rows.spread(rows.sum(rewards)) - up_to(rewards) + rewards, 0.0)
    norms = 1 - 2 * stream(old_logprobs).exp() + stream(sum_pi_squared)
    if weights is not None:
        norms = norms * stream(weights).square()
    norms = up_to(torch.where(trained, norms, 0.0))

    # One cell per group and position. Its sums run over the trained tokens there, one of each row that is long enough.
    positions = (up_to(trained.double()) - 1)[trained].long()
    _, groups = torch.unique(group_ids, return_inverse=True)
    width = int(positions.max()) + 1 if positions.numel() else 0
    cells = rows.spread(groups)[trained] * width + positions
    table = norms.new_zeros(3, (int(groups.max()) + 1 if groups.numel() else 0) * width)
    w, g = norms[trained], returns[trained]
    total, weight, count = table.index_add(1, cells, torch.stack([g * w, w, torch.ones_like(w)]))
    baseline = torch.where(count > 1, total / (weight + eps), 0.0)[cells]
    advantages = torch.zeros_like(returns).masked_scatter(trained, g - baseline)
    dtype = torch.promote_types(token_rewards.dtype, torch.float32)
    return advantages.to(dtype), returns.to(dtype)


def _check(streams: dict[str, Any], group_ids: Any, mask: Any, cu_seqlens: Any, eps: float) -> None:
    """Raise for the first argument that is wrong."""
    check_optional(mask=mask, cu_seqlens=cu_seqlens)
    if not (is_number(eps) and 0 <= eps < math.inf):
        raise ValueError(f"eps={eps!r}: expected a finite number >= 0")
    like = streams["token_rewards"]
    check_floats(**streams)
    check_like("token_rewards", like, **streams)
    check_tokens("token_rewards", like, mask, cu_seqlens)
    if not isinstance(group_ids, Tensor) or not is_integral(group_ids):
        raise TypeError(f"group_ids: expected integers, got {getattr(group_ids, 'dtype', type(group_ids).__name__)}")
    count = row_count(like, cu_seqlens)
    if group_ids.shape != (count,) or group_ids.device != like.device:
        raise ValueError(
            f"group_ids has shape {tuple(group_ids.shape)} on {group_ids.device}: expected ({count},) on {like.device}"
        )
    if like.is_cpu:
        check_token_values(like, mask, cu_seqlens)
