"""Aggregate losses per token into one number, with normalisers that may span a whole optimizer step.

An aggregation gives each row ``b`` a weight ``w_b``. The loss is the sum of ``w_b * mask * loss`` over all tokens. The
weight depends on a global normaliser, so any split into micro-batches adds up to the same loss and gradient.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from turnwise.ops.common.layout import (
    RowLayout,
    bounded,
    check_actor_values,
    check_actors,
    check_cu_seqlens,
    check_cu_seqlens_values,
    check_mask_type,
    check_mask_values,
    check_optional,
    count_actors,
    is_number,
    is_transformed,
    sees_values,
)


def _inverse(value: Tensor) -> Tensor:
    return torch.where(value > 0, 1 / value, torch.zeros_like(value))


class Aggregation:
    """Computes the weight of each row from ``lengths [B]``, the number of its trained tokens."""

    name: ClassVar[str]
    index: ClassVar[int]  # its number in the kernels
    by_length: ClassVar[bool] = False  # the weight also depends on the row's length
    by_actor: ClassVar[bool] = False  # the normaliser is one number per actor

    def normalizer(
        self, lengths: Tensor, actor_ids: Tensor | None, num_actors: int | None, max_length: float | None
    ) -> Tensor:
        raise NotImplementedError

    def weights(self, lengths: Tensor, normalizer: Tensor, actor_ids: Tensor | None) -> Tensor:
        """The weight ``[B]`` of each token in a row."""
        return _inverse(normalizer).expand(lengths.shape)

    def check(self, actor_ids: object, max_length: float | None) -> None:
        """Raise ``ValueError`` if an input that this aggregation needs is missing."""


class TokenMean(Aggregation):
    name, index = "token-mean", 0

    def normalizer(
        self, lengths: Tensor, actor_ids: Tensor | None, num_actors: int | None, max_length: float | None
    ) -> Tensor:
        return lengths.sum()


class SeqMeanTokenSum(Aggregation):
    name, index = "seq-mean-token-sum", 1

    def normalizer(
        self, lengths: Tensor, actor_ids: Tensor | None, num_actors: int | None, max_length: float | None
    ) -> Tensor:
        return (lengths > 0).to(lengths.dtype).sum()


class SeqMeanTokenMean(SeqMeanTokenSum):
    name, index = "seq-mean-token-mean", 2
    by_length = True

    def weights(self, lengths: Tensor, normalizer: Tensor, actor_ids: Tensor | None) -> Tensor:
        return _inverse(lengths) * _inverse(normalizer)


class SeqMeanTokenSumNorm(Aggregation):
    name, index = "seq-mean-token-sum-norm", 3

    def normalizer(
        self, lengths: Tensor, actor_ids: Tensor | None, num_actors: int | None, max_length: float | None
    ) -> Tensor:
        assert max_length is not None
        return torch.full((), max_length, dtype=lengths.dtype, device=lengths.device)

    def check(self, actor_ids: object, max_length: float | None) -> None:
        if not (is_number(max_length) and max_length is not None and 0 < max_length < math.inf):
            raise ValueError(f"max_length={max_length!r}: expected a positive number, as aggregation={self.name!r}")


class AgentMean(Aggregation):
    name, index = "agent-mean", 4
    by_actor = True

    def normalizer(
        self, lengths: Tensor, actor_ids: Tensor | None, num_actors: int | None, max_length: float | None
    ) -> Tensor:
        assert actor_ids is not None and num_actors is not None
        ids, outside = bounded(actor_ids, num_actors)
        counted = torch.where(outside, torch.nan, lengths.double())
        return torch.zeros(num_actors, dtype=counted.dtype, device=lengths.device).index_add(0, ids, counted)

    def weights(self, lengths: Tensor, normalizer: Tensor, actor_ids: Tensor | None) -> Tensor:
        assert actor_ids is not None
        active = (normalizer > 0).to(lengths.dtype).sum()
        ids, outside = bounded(actor_ids, normalizer.shape[0])
        return (_inverse(normalizer) * _inverse(active))[ids].masked_fill(outside, torch.nan)

    def check(self, actor_ids: object, max_length: float | None) -> None:
        if actor_ids is None:
            raise ValueError(f"actor_ids=None: expected an actor per sequence, as aggregation={self.name!r}")


_ALL = (TokenMean(), SeqMeanTokenSum(), SeqMeanTokenMean(), SeqMeanTokenSumNorm(), AgentMean())
_BY_NAME = {aggregation.name: aggregation for aggregation in _ALL}
AGGREGATIONS = tuple(_BY_NAME)
"""Names of the ways to aggregate the losses of tokens into one number."""


def find_aggregation(name: str, actor_ids: object, max_length: float | None) -> Aggregation:
    """Find an aggregation by name. Raises ``ValueError`` for an unknown name or a missing input."""
    aggregation = _BY_NAME.get(name) if isinstance(name, str) else None
    if aggregation is None:
        raise ValueError(f"aggregation={name!r}: expected one of {', '.join(AGGREGATIONS)}")
    aggregation.check(actor_ids, max_length)
    return aggregation


def as_normalizer(normalizer: Any, device: torch.device) -> Tensor:
    """Convert a number or a tensor to float32 on the device of the streams."""
    if is_number(normalizer):  # torch.full fills it in on the device; copying a number to a GPU would wait
        return torch.full((), float(normalizer), dtype=torch.float32, device=device)
    if not isinstance(normalizer, Tensor | np.ndarray):
        raise TypeError(
            f"normalizer: expected a number or a tensor, got {type(normalizer).__name__} {normalizer!r:.60}"
        )
    if isinstance(normalizer, Tensor) and normalizer.is_complex():
        raise TypeError(f"normalizer has dtype {normalizer.dtype}: expected real numbers")
    return torch.as_tensor(normalizer, dtype=torch.float32, device=device)


def check_normalizer(aggregation: Aggregation, normalizer: Tensor, num_actors: int | None) -> None:
    expected = (num_actors,) if aggregation.by_actor else ()
    if tuple(normalizer.shape) != expected and not (expected == () and normalizer.numel() == 1):
        raise ValueError(
            f"normalizer has shape {tuple(normalizer.shape)}: expected {expected}, as aggregation={aggregation.name!r}"
        )


def check_normalizer_values(normalizer: Tensor) -> None:
    """Check that the normaliser is >= 0. Reading it makes a GPU wait."""
    if not is_transformed(normalizer) and not bool((normalizer >= 0).all()):
        raise ValueError(f"normalizer={normalizer.tolist()!r}: expected counts >= 0")


def aggregate(
    values: Tensor,
    aggregation: str = "token-mean",
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
) -> Tensor:
    """Aggregate values per token into one number, as :func:`policy_loss` does with its losses.

    Use it for an entropy bonus or another custom term. ``values`` are ``[B, T]`` with ``mask [B, T]``, or ``[N]``
    with ``cu_seqlens``, any float; masked ones may hold any value. The other arguments are those of
    :func:`policy_loss`. Returns a 0-dim tensor in the dtype of ``values`` (at least float32), with a gradient to them.
    Raises ``ValueError`` or ``TypeError`` naming the argument.

    Example: ``loss - 0.01 * aggregate(entropies, mask=mask, normalizer=loss_normalizer("token-mean", mask=whole))``
    """
    rule = find_aggregation(aggregation, actor_ids, max_length)
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise TypeError(f"values: expected a tensor of floats, got {getattr(values, 'dtype', type(values).__name__)}")
    check_optional(mask=mask, cu_seqlens=cu_seqlens, actor_ids=actor_ids)
    if mask is not None and mask.shape != values.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: expected {tuple(values.shape)}, as values")
    if values.dim() != (2 if cu_seqlens is None else 1):
        expected = "[B, T]" if cu_seqlens is None else "[N], as cu_seqlens is given"
        raise ValueError(f"values has shape {tuple(values.shape)}: expected {expected}")
    trained = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    # Computed even if a normaliser is given, as this checks mask, boundaries and actors.
    layout = {"mask": trained, "cu_seqlens": cu_seqlens, "actor_ids": actor_ids}
    divisor = loss_normalizer(aggregation, **layout, num_actors=num_actors, max_length=max_length)
    trained = trained != 0
    if normalizer is not None:
        divisor = as_normalizer(normalizer, values.device)
        check_normalizer(rule, divisor, num_actors)
        if sees_values(values):
            check_normalizer_values(divisor)
    rows = RowLayout(values, cu_seqlens)
    weights = rule.weights(rows.sum(trained.double()), divisor.double(), actor_ids)
    kept = torch.where(trained, values.to(torch.promote_types(values.dtype, torch.float32)), 0.0)
    return (rows.sum(kept.double()) * weights).sum().to(kept.dtype)


def loss_normalizer(
    aggregation: str,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
) -> Tensor:
    """Compute the normaliser of a whole optimizer step. Pass it to :func:`policy_loss` of each micro-batch.

    Padded rows need ``mask [B, T]``; packed ones ``cu_seqlens [B+1]``, with or without ``mask [N]``. ``"agent-mean"``
    needs ``actor_ids [B]`` and ``num_actors``, ``"seq-mean-token-sum-norm"`` needs ``max_length``.

    Returns float32: the number of trained tokens (``"token-mean"``), of rows with trained tokens
    (``"seq-mean-token-sum"``, ``"seq-mean-token-mean"``), ``max_length`` (``"seq-mean-token-sum-norm"``), or the
    trained tokens of each actor, ``[num_actors]`` (``"agent-mean"``). Normalisers of parts of a step, or of several
    ranks, add up to that of the whole; only that of ``"seq-mean-token-sum-norm"`` is a constant. Raises ``ValueError``
    or ``TypeError`` naming the argument. Values are checked on the CPU only.

    Example: ``loss_normalizer("token-mean", mask=mask)``
    """
    rule = find_aggregation(aggregation, actor_ids, max_length)
    check_optional(mask=mask, cu_seqlens=cu_seqlens, actor_ids=actor_ids)
    lengths = _lengths(mask, cu_seqlens)
    if actor_ids is not None:
        check_actors(actor_ids, num_actors, lengths.shape[0])
        num_actors = count_actors(num_actors)
        if sees_values(actor_ids):
            check_actor_values(actor_ids, num_actors)
    return rule.normalizer(lengths, actor_ids, num_actors, max_length).float()


def _lengths(mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Count the trained tokens of each row: ``[B]`` float64."""
    if mask is None and cu_seqlens is None:
        raise ValueError("mask=None: expected mask [B, T], or cu_seqlens [B + 1]")
    if mask is not None and mask.dim() != (2 if cu_seqlens is None else 1):
        expected = "[B, T], or [N] with cu_seqlens" if cu_seqlens is None else "[N], as cu_seqlens is given"
        raise ValueError(f"mask has shape {tuple(mask.shape)}: expected {expected}")
    if mask is not None:
        check_mask_type(mask)
    if mask is not None and sees_values(mask):
        check_mask_values(mask)
    if cu_seqlens is None:
        assert mask is not None
        return (mask != 0).sum(dim=1).double()
    check_cu_seqlens(cu_seqlens)
    if sees_values(cu_seqlens):
        check_cu_seqlens_values(cu_seqlens, None if mask is None else mask.shape[0])
    if mask is None:
        return (cu_seqlens[1:] - cu_seqlens[:-1]).double()
    return RowLayout(mask, cu_seqlens).sum((mask != 0).double())
