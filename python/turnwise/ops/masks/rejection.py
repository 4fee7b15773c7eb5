"""Reject tokens and sequences on which sampler and trainer disagree too much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.layout import RowLayout, is_number
from turnwise.ops.masks.checks import check_pair

LEVELS = ("token", "seq-sum", "seq-mean", "seq-max")
ESTIMATORS = ("k1", "k2", "k3")
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class Rejection:
    """One criterion of :func:`rejection_mask`. With ``d = old - rollout``, clamped to +-20, per token:

    - ``"k1"``, the ratio: keeps where ``low <= exp(d) <= high``. ``low`` is ``1 / high`` unless given.
    - ``"k2"``, ``d**2 / 2``, and ``"k3"``, ``exp(d) - d - 1``: keep where at most ``high``; they take no ``low``.

    ``level="token"`` judges each token. The others judge a sequence by the sum, the mean or the largest of its tokens'
    values; ``"seq-mean"`` with ``"k1"`` is the geometric mean of the ratios.

    Example: ``Rejection("seq-mean", "k1", high=1.01)``
    """

    level: str
    estimator: str
    high: float
    low: float | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"Rejection.level={self.level!r}: expected one of {', '.join(LEVELS)}")
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"Rejection.estimator={self.estimator!r}: expected one of {', '.join(ESTIMATORS)}")
        if not (is_number(self.high) and 0 < self.high < math.inf):
            raise ValueError(f"Rejection.high={self.high!r}: expected a finite number > 0")
        if self.estimator != "k1":
            if self.low is not None:
                raise ValueError(f"Rejection.low={self.low!r}: expected None, as {self.estimator} is never negative")
            return
        if self.level == "seq-max":
            raise ValueError("Rejection.level='seq-max': expected estimator 'k2' or 'k3', as k1 has two ends")
        if self.low is None:
            object.__setattr__(self, "low", 1 / self.high)
        if not (is_number(self.low) and 0 < self.low < self.high):  # type: ignore[operator]
            raise ValueError(
                f"Rejection.low={self.low!r}: expected more than 0 and less than high = {self.high!r}; without it, low "
                "is 1 / high"
            )

    @property
    def name(self) -> str:
        return f"{self.level}-{self.estimator}"


class RejectionMask(NamedTuple):
    """The result of :func:`rejection_mask`. ``metrics`` maps a name to a 0-dim float32 tensor."""

    keep: Tensor
    metrics: dict[str, Tensor]


@torch.no_grad()
def rejection_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    criteria: Rejection | Sequence[Rejection],
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> RejectionMask:
    """Mark the tokens that pass all ``criteria``: ``keep``, bool in the shape of ``old_logprobs``, and metrics.

    ``old_logprobs`` are of the trainer before the update, ``rollout_logprobs`` of the sampler; both ``[B, T]`` with
    ``mask``, or packed ``[N]`` with ``cu_seqlens``. Masked tokens may hold any value and are never marked. Pass
    ``keep`` as ``mask=`` to :func:`policy_loss`, beside any ``correction``; rejected tokens then count in no mean.
    (verl's ``compute_rollout_rejection_mask``; its bounds of ``k1`` are those of ``exp(rollout - old)``, so ``low`` and
    ``high`` here are ``1 / high`` and ``1 / low`` there.)

    Metrics: ``rejected``, the share of trained tokens that fail; ``rejected_rows``, the share of sequences with such a
    token among those that train; and ``rejected/seq-mean-k1``, the share of tokens that fail this criterion. Raises
    ``ValueError`` or ``TypeError`` naming the argument.

    Example: ``rejection_mask(old, rollout, [Rejection("token", "k1", 2.0), Rejection("seq-max", "k2", 2.5)], mask=m)``
    """
    chosen = [criteria] if isinstance(criteria, Rejection) else list(criteria)
    if not chosen or not all(isinstance(each, Rejection) for each in chosen):
        raise TypeError(f"criteria={criteria!r}: expected one or several of Rejection")
    check_pair("old_logprobs", old_logprobs, rollout_logprobs, mask, cu_seqlens)
    rows = RowLayout(old_logprobs, cu_seqlens)
    trained = torch.ones_like(old_logprobs, dtype=torch.bool) if mask is None else mask != 0
    d = old_logprobs.double() - rollout_logprobs.double()
    d = torch.where(trained, d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), 0.0)
    keep, tokens = trained, trained.sum().clamp(min=1)
    metrics: dict[str, Tensor] = {}
    for each in chosen:
        passed = _passes(each, d, rows, trained)
        metrics[f"rejected/{each.name}"] = (trained & ~passed).sum() / tokens
        keep = keep & passed
    rejected = trained & ~keep
    active = (rows.sum(trained.float()) > 0).sum().clamp(min=1)
    metrics["rejected"] = rejected.sum() / tokens
    metrics["rejected_rows"] = (rows.sum(rejected.float()) > 0).sum() / active
    return RejectionMask(keep, metrics)


def _passes(criterion: Rejection, d: Tensor, rows: RowLayout, trained: Tensor) -> Tensor:
    """The tokens that pass one criterion: bool, also at tokens that don't train."""
    values = {"k1": d, "k2": 0.5 * d.square(), "k3": d.exp() - d - 1}[criterion.estimator]
    match criterion.level:
        case "seq-sum":
            values = rows.spread(rows.sum(values))
        case "seq-mean":
            values = rows.spread(rows.sum(values) / rows.sum(trained.double()).clamp(min=1))
        case "seq-max":
            values = rows.spread(_row_max(values, rows))
    if criterion.low is None:
        return values <= criterion.high
    return (values >= math.log(criterion.low)) & (values <= math.log(criterion.high))


def _row_max(values: Tensor, rows: RowLayout) -> Tensor:
    """The largest of a row's values, which are >= 0: ``[B]``."""
    if rows.row is None:
        return values.amax(dim=1) if values.shape[1] else values.new_zeros(rows.count)
    return values.new_zeros(rows.count).scatter_reduce(0, rows.row, values, "amax")
