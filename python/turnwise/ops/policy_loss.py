"""Clipped policy loss over token streams: loss, gradient and metrics in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .aggregation import check_aggregation, check_normalizer
from .backends import resolve
from .options import KL, Clip, ImportanceCorrection
from .policy_loss_reference import Objective, metric_names, reference
from .streams import Streams, check_stream_values, check_streams


class PolicyLoss(NamedTuple):
    """``loss`` 0-dim; ``metrics`` name -> 0-dim float32; ``actor_metrics`` name -> ``[num_actors]`` float32, empty
    without ``actor_ids``. Metrics carry no gradient and stay on the device."""

    loss: Tensor
    metrics: dict[str, Tensor]
    actor_metrics: dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    clip: Clip = Clip(),  # noqa: B008
    kl: KL | None = None,
    ref_logprobs: Tensor | None = None,
    correction: ImportanceCorrection | None = None,
    rollout_logprobs: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
    backend: str | None = None,
) -> PolicyLoss:
    """PPO's clipped loss with dual clip, KL term and importance correction (https://arxiv.org/abs/1707.06347, eq. 7).

    Padded: ``logprobs [B, T]`` with ``mask [B, T]``. Packed: ``logprobs [N]`` with ``cu_seqlens [B+1]`` (int32 or int64,
    from 0 to N), and ``mask [N]`` if some tokens don't train. ``old_logprobs``, ``ref_logprobs`` and
    ``rollout_logprobs`` have the shape of ``logprobs``; ``advantages`` is ``[B]`` (one per sequence; taken so wherever
    it fits) or per token. Floats are float32, bfloat16, float16 (computed in float32) or float64 (reference only).
    A token trains where ``mask`` (bool, integer or 0/1 float) is not 0; masked tokens may hold anything, NaN too.

    Per token, with ``ratio = exp(clamp(logprobs - old_logprobs, -20, 20))``:
    ``max(-A * ratio, -A * clamp(ratio, 1 - clip.low, 1 + clip.high))``, for ``A < 0`` at most ``-A * clip.dual``, times
    the weight of ``correction``, plus ``kl.coef`` times the KL estimate.

    ``aggregation``: ``"token-mean"``, ``sum(l) / tokens``; ``"seq-mean-token-sum"``, row sums over the number of
    non-empty rows; ``"seq-mean-token-mean"``, row means over the same; ``"seq-mean-token-sum-norm"``,
    ``sum(l) / max_length``; ``"agent-mean"``, token mean within each actor, then mean over the actors that have tokens.
    ``normalizer``, from :func:`loss_normalizer` over a whole optimizer step, replaces the count of this batch, so that
    micro-batches add up to the gradient of the whole. It is a number or 0-dim, ``[num_actors]`` for ``"agent-mean"``.

    ``actor_ids [B]`` with ``num_actors`` gives metrics by actor as well. Metrics (token means): clip fractions low
    (``A < 0``), high (``A > 0``) and dual, ``approx_kl_k1``, ``approx_kl_k3``, ``ratio_mean``, ``ratio_max``,
    ``tokens``; ``kl`` with ``ref_logprobs``; with ``rollout_logprobs`` ``mismatch_kl``, the mean of
    ``rollout - old``, and ``ess``, the effective sample size over tokens as a share, ``(sum w)**2 / (n * sum w**2)``.

    Gradient flows to ``logprobs`` alone, once: a second derivative needs ``backend="torch"``. An empty batch, or one
    with every token masked, has loss 0. Raises ``ValueError`` or ``TypeError`` naming the argument,
    ``BackendUnavailable`` if the named backend can't serve.
    """
    check_aggregation(aggregation, actor_ids, max_length)
    if kl is not None and ref_logprobs is None:
        raise ValueError("ref_logprobs=None: expected log-probabilities, as kl is given")
    if correction is not None and rollout_logprobs is None:
        raise ValueError("rollout_logprobs=None: expected log-probabilities, as correction is given")
    streams = Streams(
        logprobs, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, actor_ids
    )
    check_streams(streams, num_actors)
    if normalizer is not None:
        normalizer = torch.as_tensor(normalizer, dtype=torch.float32, device=logprobs.device)
        check_normalizer(aggregation, normalizer, num_actors)
    actors = num_actors if actor_ids is not None and num_actors is not None else 0
    objective = Objective(clip, kl, correction, aggregation, actors, max_length)
    resolve(backend)
    if logprobs.device.type == "cpu":
        check_stream_values(streams, num_actors)
    loss, table = reference(streams, objective, normalizer)
    names = metric_names(ref_logprobs is not None, rollout_logprobs is not None)
    metrics = dict(zip(names, table[0].unbind(), strict=True))
    actor_metrics = dict(zip(names, table[1:].unbind(1), strict=True)) if actor_ids is not None else {}
    return PolicyLoss(loss, metrics, actor_metrics)
