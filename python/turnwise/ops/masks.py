"""Choose the tokens that train: by entropy, by drift from the sampler, by the mismatch of sampler and trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.layout import (
    RowLayout,
    check_advantages,
    check_floats,
    check_like,
    check_mask,
    check_mask_values,
    check_optional,
    check_token_values,
    check_tokens,
    is_number,
    sees_values,
    trained_tokens,
)

LEVELS = ("token", "seq-sum", "seq-mean", "seq-max")
ESTIMATORS = ("k1", "k2", "k3")
LOG_RATIO_BOUND = 20.0


# ---------------------------------------------------------------------------------------------------------------------
# By entropy
# ---------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def top_entropy_mask(entropy: Tensor, share: float = 0.2, *, mask: Tensor | None = None) -> Tensor:
    """Mark the tokens whose entropy is in the top ``share`` of all trained ones: bool, the shape of ``entropy``.

    At these tokens a chain of thought forks ("Beyond the 80/20 Rule", https://arxiv.org/abs/2506.01939,
    which recommends a share of 0.2; TRL's ``top_entropy_quantile``). The bound is the quantile ``1 - share`` of the
    entropies of the call, linear between neighbours. So pass a whole optimizer step, and cut the result into
    micro-batches. Ties with the bound are kept. At least one token is kept.

    ``entropy`` is ``[B, T]`` or ``[N]`` floats; ``mask`` has its shape. Masked tokens may hold any value and are never
    marked. Multiply per-token advantages by the result: the others then have no policy gradient, but keep their KL term
    and count in every mean, as in the paper. Pass it as ``mask=`` to leave them out altogether. Nothing waits for the
    device. Raises ``ValueError`` or ``TypeError`` naming the argument.

    Example: ``policy_loss(lp, old, advantages[:, None] * top_entropy_mask(entropy, mask=mask), mask=mask)``
    """
    check_optional(mask=mask)
    check_floats(entropy=entropy)
    if not (is_number(share) and 0 < share <= 1):
        raise ValueError(f"share={share!r}: expected a number in (0, 1]")
    check_mask(mask, entropy, "entropy")
    if mask is not None and sees_values(mask):
        check_mask_values(mask)
    trained = trained_tokens(mask, entropy)
    if not entropy.numel():
        return trained
    # The tokens at or above an interpolated quantile are those at or above its upper neighbour. The small number keeps
    # a product like 0.8 * 5 from ending above the whole number that it is.
    ordered = torch.where(trained, entropy, torch.inf).flatten().sort().values
    index = ((1 - share) * (trained.sum().double() - 1) - 1e-9).ceil().clamp(min=0).long()
    return trained & (entropy >= ordered.gather(0, index[None]))


# ---------------------------------------------------------------------------------------------------------------------
# By drift from the sampler
# ---------------------------------------------------------------------------------------------------------------------
def _check_pair(
    name: str, logprobs: Any, rollout_logprobs: Any, mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Check the log-probabilities of two policies over the same tokens; ``name`` is that of ``logprobs``."""
    check_optional(mask=mask, cu_seqlens=cu_seqlens)
    check_floats(**{name: logprobs, "rollout_logprobs": rollout_logprobs})
    check_like(name, logprobs, rollout_logprobs=rollout_logprobs)
    check_tokens(name, logprobs, mask, cu_seqlens)
    if sees_values(logprobs):
        check_token_values(logprobs, mask, cu_seqlens)


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
    updates only. A NaN there, which an engine returns for a token that it could not score, counts as no drift. Streams
    and ``advantages`` have the shapes of :func:`policy_loss`. Masked tokens may hold any value and are never marked.
    Multiply per-token advantages by the result to drop only the policy gradient, as TRL does, or pass it as ``mask=``.
    Raises ``ValueError`` or ``TypeError`` naming the argument.

    Example: ``off_policy_mask(logprobs, rollout_logprobs, advantages, 0.5, mask=mask)``
    """
    if not (is_number(threshold) and 0 <= threshold < math.inf):
        raise ValueError(f"threshold={threshold!r}: expected a finite number >= 0")
    _check_pair("logprobs", logprobs, rollout_logprobs, mask, cu_seqlens)
    rows = RowLayout(logprobs, cu_seqlens)
    if not isinstance(advantages, Tensor):
        raise TypeError(f"advantages: expected a tensor, got {type(advantages).__name__}")
    check_advantages(advantages, logprobs, rows.count)
    trained = trained_tokens(mask, logprobs)
    drift = torch.where(trained & ~rollout_logprobs.isnan(), rollout_logprobs.double() - logprobs.double(), 0.0)
    mean = rows.sum(drift) / rows.sum(trained.double()).clamp(min=1)
    return trained & ((rows.spread(advantages) >= 0) | rows.spread(mean <= threshold))


@torch.no_grad()
def second_moment_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    threshold: float = 0.04,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Mark the tokens to keep: bool, the shape of ``logprobs``.

    The tokens with the largest ``(logprobs - rollout_logprobs)**2`` are dropped until the mean of the others is at most
    ``threshold`` (M2PO, https://arxiv.org/abs/2510.01161, which uses 0.04). So few tokens bound the variance of the
    importance weights of stale rows, where a clip would drop many. Tokens of one size are dropped together.

    The arguments are those of :func:`off_policy_mask`. The mean is that of the call, so pass a whole optimizer step,
    and cut the result into micro-batches. The paper's loss is ``ratio * advantage`` without a clip, a mean over all
    tokens: multiply per-token advantages by the result. Nothing waits for the device, apart from checks.

    Example: ``second_moment_mask(logprobs, rollout_logprobs, 0.04, mask=mask)``
    """
    if not (is_number(threshold) and 0 <= threshold < math.inf):
        raise ValueError(f"threshold={threshold!r}: expected a finite number >= 0")
    _check_pair("logprobs", logprobs, rollout_logprobs, mask, cu_seqlens)
    trained = trained_tokens(mask, logprobs)
    drift = torch.where(trained & ~rollout_logprobs.isnan(), rollout_logprobs.double() - logprobs.double(), 0.0)
    squares = drift.square()
    # The mean of the smallest squares grows with their number, so those that fit come first.
    ordered = torch.where(trained, squares, torch.inf).flatten().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    bound = torch.cat([ordered, ordered.new_full((1,), torch.inf)])[(means <= threshold).sum()]
    return trained & (squares < bound)


# ---------------------------------------------------------------------------------------------------------------------
# By the mismatch of sampler and trainer
# ---------------------------------------------------------------------------------------------------------------------
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
    ``keep`` as ``mask=`` to :func:`policy_loss`, along with any ``correction``; rejected tokens then count in no mean.
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
    _check_pair("old_logprobs", old_logprobs, rollout_logprobs, mask, cu_seqlens)
    rows = RowLayout(old_logprobs, cu_seqlens)
    trained = trained_tokens(mask, old_logprobs)
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
            values = rows.spread(rows.max(values))
    if criterion.low is None:
        return values <= criterion.high
    return (values >= math.log(criterion.low)) & (values <= math.log(criterion.high))
