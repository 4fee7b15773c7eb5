"""The effective sample size of a step: the share of its tokens that would weigh as much with equal importance weights.

``ess = (sum w)**2 / (n * sum w**2)`` over all tokens that train, with the weight ``w`` that multiplies a token's loss:
that of the token, or of its sequence. The sums are of the whole step, so ``ess`` does not depend on how it is cut into
micro-batches or over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.ops import ImportanceCorrection, PolicyLoss
from turnwise.ops.common.layout import RowLayout
from turnwise.ops.loss.reference import correction_weights
from turnwise.ops.loss.variants import LOG_RATIO_BOUND
from turnwise.train.model.micro_batch import MicroBatch

ESS, MEAN, SQUARE = "ess", "importance_weight", "importance_weight_square"
"""Metrics: the effective sample size; the mean weight of a token, and that of its square, which both add up."""


@torch.no_grad()
def with_moments(
    out: PolicyLoss, micro: MicroBatch, old_logprobs_N: Tensor, correction: ImportanceCorrection | None, actors: int
) -> PolicyLoss:
    """Replace the effective sample size of a micro-batch by the means that it consists of, overall and by actor."""
    if ESS not in out.metrics:
        return out
    mask_N = micro.mask_N.bool()
    mismatch_N = torch.where(mask_N, old_logprobs_N.float() - micro.rollout_logprobs_N, 0.0)
    if correction is None:
        weights_N = mismatch_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    else:
        weights_N, _ = correction_weights(mismatch_N, RowLayout(mismatch_N, micro.cu_seqlens), correction)
    columns = torch.stack([torch.ones_like(weights_N), weights_N, weights_N.square()], -1).double() * mask_N[:, None]
    sums = columns.new_zeros(actors, 3).index_add_(0, micro.actor_ids_B[micro.row_N], columns)
    names = (MEAN, SQUARE)
    whole, by_actor = (table[..., 1:] / table[..., :1].clamp_min(1) for table in (sums.sum(0), sums))
    kept, kept_by_actor = ({k: v for k, v in m.items() if k != ESS} for m in (out.metrics, out.actor_metrics))
    return out._replace(
        metrics={**kept, **dict(zip(names, whole, strict=True))},
        actor_metrics={**kept_by_actor, **dict(zip(names, by_actor.unbind(1), strict=True))},
    )


def with_sample_sizes(metrics: dict[str, float]) -> dict[str, float]:
    """Replace each mean of squares in a step's ``metrics`` by the effective sample size, ``mean**2 / mean of squares``.

    Example: ``{"importance_weight": 1.0, "importance_weight_square": 2.0}`` has an ``ess`` of 0.5
    """
    for key in [key for key in metrics if key.endswith(SQUARE)]:
        square, prefix = metrics.pop(key), key.removesuffix(SQUARE)
        metrics[prefix + ESS] = metrics[prefix + MEAN] ** 2 / square if square else 0.0
    return metrics
