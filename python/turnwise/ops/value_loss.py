"""Compute PPO's clipped value loss over token streams, in plain PyTorch on any device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.layout import check_floats, check_like, check_optional, is_number, trained_tokens
from turnwise.ops.loss.aggregation import aggregate


class ValueLoss(NamedTuple):
    """The result of :func:`value_loss`: ``loss``, 0-dim, and ``metrics``, a dict of 0-dim tensors without gradient."""

    loss: Tensor
    metrics: dict[str, Tensor]


def _check(values: Tensor, old_values: Tensor | None, returns: Tensor, clip: float | None) -> None:
    if clip is not None and not (is_number(clip) and 0 < clip < math.inf):
        raise ValueError(f"clip={clip!r}: expected None or a finite number > 0")
    if clip is not None and old_values is None:
        raise ValueError(f"old_values=None: expected the values before the update, as clip={clip!r}")
    old = {} if old_values is None else {"old_values": old_values}
    check_floats(values=values, **old, returns=returns)
    check_like("values", values, **old, returns=returns)


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    clip: float | None = 0.2,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
) -> ValueLoss:
    """Compute the critic's loss, ``max((V - R)**2, (clamp(V, V_old - clip, V_old + clip) - R)**2) / 2`` per token.

    The clip keeps a value near the old one, as PPO's keeps the policy (the reference implementation of
    https://arxiv.org/abs/1707.06347; verl's ``compute_value_loss``). ``clip=None`` is the plain squared error; then
    ``old_values`` may be ``None``.

    Streams are ``[B, T]`` with ``mask``, or packed ``[N]`` with ``cu_seqlens``: ``values`` of the critic,
    ``old_values`` before the update, and ``returns``, which :func:`gae` gives. They are floats, computed in float32 at
    least. Masked tokens may hold any value. The other arguments are those of :func:`policy_loss`. The gradient flows to
    ``values``.

    Metrics are token means: ``clip_fraction``, the share of tokens whose clipped loss is the larger one;
    ``value_mean``; ``explained_variance``, ``1 - Var(R - V) / Var(R)``, and 0 if all returns are equal. Raises
    ``ValueError`` or ``TypeError`` naming the argument.

    Example: ``value_loss(torch.tensor([[1.]]), torch.tensor([[0.]]), torch.tensor([[1.]])).loss`` is ``.8**2 / 2``, as
    the clipped value is .2.
    """
    _check(values, old_values, returns, clip)
    check_optional(mask=mask)
    dtype = torch.promote_types(values.dtype, torch.float32)
    trained = trained_tokens(mask, values)
    if trained.shape != values.shape:
        raise ValueError(f"mask has shape {tuple(trained.shape)}: expected {tuple(values.shape)}, as values")

    def stream(given: Tensor) -> Tensor:
        return torch.where(trained, given.to(dtype), 0.0)

    v, target = stream(values), stream(returns.detach())
    plain = (v - target).square()
    losses, clipped = plain, torch.zeros_like(trained)
    if clip is not None:
        assert old_values is not None
        old = stream(old_values.detach())
        bounded = (v.clamp(old - clip, old + clip) - target).square()
        losses, clipped = torch.maximum(plain, bounded), bounded > plain
    loss = aggregate(
        losses / 2,
        aggregation,
        mask=mask,
        cu_seqlens=cu_seqlens,
        normalizer=normalizer,
        actor_ids=actor_ids,
        num_actors=num_actors,
        max_length=max_length,
    )
    return ValueLoss(loss, _metrics(v.detach(), target, trained, clipped))


@torch.no_grad()
def _metrics(values: Tensor, returns: Tensor, trained: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    count = trained.sum().clamp(min=1)

    def mean(given: Tensor) -> Tensor:
        return torch.where(trained, given.double(), 0.0).sum() / count

    def variance(given: Tensor) -> Tensor:
        return mean((given.double() - mean(given)).square())

    spread = variance(returns)
    explained = torch.where(spread > 0, 1 - variance(returns - values) / spread.clamp(min=1e-300), 0.0)
    metrics = {"clip_fraction": mean(clipped), "value_mean": mean(values), "explained_variance": explained}
    return {name: value.float() for name, value in metrics.items()}
