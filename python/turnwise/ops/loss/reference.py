"""The policy loss in plain PyTorch: differentiable, any device. The tests compare every other backend with it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.layout import RowLayout, Streams, bounded, trained_tokens
from turnwise.ops.loss.aggregation import Aggregation
from turnwise.ops.loss.options import KL, ImportanceCorrection, Variant
from turnwise.ops.loss.variants import LOG_RATIO_BOUND, Tokens, importance_ratio, token_loss

METRICS = (
    "tokens",
    "clip_fraction_low",
    "clip_fraction_high",
    "dual_clip_fraction",
    "approx_kl_k1",
    "approx_kl_k3",
    "ratio_mean",
    "ratio_max",
)
METRICS_REF = ("kl",)
METRICS_ROLLOUT = ("mismatch_kl", "ess", "rejected")
METRICS_ENTROPY = ("entropy",)

KL_BOUND = 10.0


class Objective(NamedTuple):
    """The options of a policy loss, checked and complete. :func:`prepare` makes it from :class:`LossOptions`."""

    variant: Variant
    kl: KL | None
    correction: ImportanceCorrection | None
    aggregation: Aggregation
    num_actors: int
    max_length: float | None

    @property
    def by_row(self) -> bool:
        """True if a token's loss depends on the log-probabilities of its sequence."""
        return self.variant.by_row or (self.correction is not None and self.correction.level == "sequence")

    def row_weights(self, s: Streams, lengths: Tensor) -> Tensor:
        """The weight ``[B]`` float64 of each token in a row, from ``lengths [B]``, the rows' trained tokens."""
        normalizer = s.normalizer
        if normalizer is None:
            normalizer = self.aggregation.normalizer(lengths, s.actor_ids, self.num_actors, self.max_length)
        return self.aggregation.weights(lengths, normalizer.double(), s.actor_ids)


_NAMES = {
    (has_ref, has_rollout, has_entropy): METRICS
    + METRICS_REF * has_ref
    + METRICS_ROLLOUT * has_rollout
    + METRICS_ENTROPY * has_entropy
    for has_ref, has_rollout, has_entropy in itertools.product((False, True), repeat=3)
}


def metric_names(has_ref: bool, has_rollout: bool, has_entropy: bool) -> tuple[str, ...]:
    """The names of a call's metrics, in the order in which every backend returns them."""
    return _NAMES[has_ref, has_rollout, has_entropy]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate ``KL(policy || reference)`` per token. An estimator with ``+`` has the gradient of ``k2`` instead."""
    d = ref_logprobs - logprobs
    if estimator.endswith("+"):
        k2 = 0.5 * d.square()
        return kl_estimate(logprobs, ref_logprobs, estimator[:-1]).detach() + (k2 - k2.detach())
    match estimator:
        case "k1":
            return -d
        case "abs":
            return d.abs()
        case "k2":
            return 0.5 * d.square()
        case _:
            d = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            return (d.exp() - d - 1).clamp(-KL_BOUND, KL_BOUND)


def correction_weights(mismatch: Tensor, rows: RowLayout, correction: ImportanceCorrection) -> tuple[Tensor, Tensor]:
    """Compute ``min(exp(mismatch), cap)`` per token or per sequence, and the mask of rejected weights.

    ``mismatch`` is ``old - rollout``, and 0 where masked. Level ``"sequence"`` uses its sum over the row.
    """
    if correction.level == "sequence":
        mismatch = rows.spread(rows.sum(mismatch))
    weight = mismatch.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if correction.bounds is None:
        return weight.clamp(max=correction.cap), torch.zeros_like(weight, dtype=torch.bool)
    low, high = correction.bounds
    rejected = (weight < low) | (weight > high)
    return torch.where(rejected, 0.0, weight.clamp(max=correction.cap)), rejected


def reference(s: Streams, objective: Objective, rows: RowLayout | None = None) -> tuple[Tensor, Tensor]:
    """Compute the loss and its metrics ``[1 + num_actors, K]``. ``rows`` replaces the layout made from the streams.

    The first row covers all tokens, the others one actor each. Columns are in the order of :func:`metric_names`.
    """
    dtype = torch.float64 if s.logprobs.dtype == torch.float64 else torch.float32
    rows = RowLayout(s.logprobs, s.cu_seqlens) if rows is None else rows
    mask = trained_tokens(s.mask, s.logprobs)
    outside = None
    if s.actor_ids is not None:
        ids, outside = bounded(s.actor_ids, objective.num_actors)
        s = s._replace(actor_ids=ids)

    def stream(values: Tensor) -> Tensor:
        # Masked tokens may hold any value, NaN included, so they become 0 before any arithmetic.
        return torch.where(mask, values.to(dtype), 0.0)

    logprobs, old = stream(s.logprobs), stream(s.old_logprobs.detach())
    advantages = stream(rows.spread_advantages(s.advantages.detach()))
    log_ratio = (logprobs - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    correction, rejected = None, torch.zeros_like(mask)
    if s.rollout_logprobs is not None:
        mismatch = old - stream(s.rollout_logprobs.detach())
        weight = mismatch.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if objective.correction is not None:
            correction, rejected = correction_weights(mismatch, rows, objective.correction)
    tokens = Tokens(logprobs, old, log_ratio, ratio, advantages, mask, s.selected, rows, correction)
    token = token_loss(tokens, objective.variant)
    loss = token.loss if correction is None or objective.variant.weighs_itself else token.loss * correction

    # Per-token columns of the metrics. The KL term is added to the loss.
    columns = [mask, token.clipped_low, token.clipped_high, token.clipped_dual]
    columns += [-log_ratio, ratio - 1 - log_ratio, ratio]
    if s.ref_logprobs is not None:
        term = objective.kl or KL("k3", coef=0.0)
        kl = kl_estimate(logprobs, stream(s.ref_logprobs.detach()), term.estimator)
        columns.append(kl)
        weight_of_kl = importance_ratio(tokens, objective.variant) if term.importance_weighted else 1.0
        loss = loss + term.coef * weight_of_kl * kl
    if s.rollout_logprobs is not None:
        used = weight if correction is None else correction
        columns += [-mismatch, used, used.square(), rejected]
    if s.entropy is not None:
        columns.append(stream(s.entropy.detach()))

    # Weigh the rows, and sum in float64.
    weights = objective.row_weights(s, rows.sum(mask.double()))
    total = (rows.sum(torch.where(mask, loss, 0.0).double()) * weights).sum().to(dtype)
    if outside is not None:
        total = torch.where(outside.any(), torch.nan, total)
    with torch.no_grad():
        sums = torch.stack([rows.sum(torch.where(mask, c.detach().double(), 0.0)) for c in columns], dim=1)
        metrics = _metrics(sums, ratio.detach(), mask, rows, s, objective)
    return total, metrics.float()


def _metrics(sums: Tensor, ratio: Tensor, mask: Tensor, rows: RowLayout, s: Streams, objective: Objective) -> Tensor:
    """Turn row sums ``[B, columns]`` into metrics ``[1 + num_actors, K]``."""
    # Sums and the largest ratio: of the whole batch first, then of each actor.
    row_max = rows.max(torch.where(mask, ratio, 0.0).double())
    groups = [(sums.sum(dim=0), row_max.amax() if rows.count else row_max.new_zeros(()))]
    if s.actor_ids is not None:
        actor_sums = sums.new_zeros(objective.num_actors, sums.shape[1]).index_add(0, s.actor_ids, sums)
        actor_max = sums.new_zeros(objective.num_actors).scatter_reduce(0, s.actor_ids.long(), row_max, "amax")
        groups += list(zip(actor_sums, actor_max, strict=True))
    # Columns 1 to 6 become token means; the optional columns follow in the order in which they were appended.
    table = torch.stack([total for total, _ in groups])
    tokens = table[:, :1]
    means = table / tokens.clamp(min=1)
    columns = [tokens, means[:, 1:7], torch.stack([largest for _, largest in groups])[:, None]]
    extra = 7
    if s.ref_logprobs is not None:
        columns.append(means[:, extra : extra + 1])
        extra += 1
    if s.rollout_logprobs is not None:
        total, square = table[:, extra + 1], table[:, extra + 2]
        ess = torch.where(square > 0, total.square() / (square * tokens[:, 0]).clamp(min=1e-300), 0.0)
        columns += [means[:, extra : extra + 1], ess[:, None], means[:, extra + 3 : extra + 4]]
        extra += 4
    if s.entropy is not None:
        columns.append(means[:, extra : extra + 1])
    return torch.cat(columns, dim=1)
