"""Policy loss where each rank of a group holds some tokens of every sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.layout import Streams, check_cu_seqlens_values, check_layout, row_count
from turnwise.ops.loss.arguments import LossOptions, check_call, named_metrics, prepare, with_selected
from turnwise.ops.loss.options import KL, Clip, Custom, ImportanceCorrection, Variant
from turnwise.ops.loss.policy_loss import PolicyLoss
from turnwise.ops.loss.reference import reference
from turnwise.ops.parallel.group import GroupRows, checksum, exchange, member_of, share, start_of


def sequence_parallel_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    group: Any = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    clip: Clip | None = None,
    variant: Variant | None = None,
    kl: KL | None = None,
    ref_logprobs: Tensor | None = None,
    correction: ImportanceCorrection | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    selected: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
) -> PolicyLoss:
    """Compute :func:`policy_loss` of tokens that are split over the ranks of ``group``.

    Padded: each rank holds some columns ``[B, T_r]`` of all rows. Packed: each rank holds a contiguous part ``[N_r]``
    of one stream, in the order of the ranks, and ``cu_seqlens [B+1]`` are the boundaries in the whole stream. The sizes
    may differ, and may be 0. ``logprobs``, ``old_logprobs``, ``mask`` and the other streams are this rank's tokens.
    ``advantages [B]``, ``cu_seqlens``, ``actor_ids``, ``normalizer`` and the options are the same on every rank.
    Advantages per token are this rank's; a shape counts as one per sequence if it does so on every rank.

    Every rank calls, and gets the loss and the metrics of one process with all tokens: lengths, normalisers, ratios of
    sequences (GSPO, GMPO) and corrections by sequence are sums over the group. The gradient of ``logprobs`` is this
    rank's part of the gradient of that one loss. Do not sum or average the loss over the group again.

    It runs in plain PyTorch on any device, with all-reduces of ``[B]`` and ``[B, metrics]``. The ranks first compare
    their arguments, which makes a GPU wait. :class:`ClipCov` and :class:`KLCov` need ``selected``, this rank's part of
    :func:`select_tokens`; :class:`Custom` is rejected, as its function would see only this rank's tokens. Raises
    ``ValueError`` or ``TypeError`` naming the argument, on every rank, and ``RuntimeError`` without a process group.

    Example: ``sequence_parallel_policy_loss(logprobs, old, advantages, cu_seqlens=cu, variant=GSPO()).loss.backward()``
    """
    streams = Streams(
        logprobs, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, None, actor_ids, entropy,
        selected,
    )  # fmt: skip
    options = LossOptions(clip, variant, kl, correction, aggregation, normalizer, num_actors, max_length)
    return compute_sequence_parallel(streams, options, group)


def compute_sequence_parallel(s: Streams, options: LossOptions, group: Any) -> PolicyLoss:
    """Compare the ranks' arguments, place this rank's tokens among all, and compute the loss of all."""
    member = member_of(group)
    ranks = exchange(member, lambda: _describe(s, options))
    if s.cu_seqlens is not None:
        total, start = sum(size for size, *_ in ranks), start_of(member, (size for size, *_ in ranks))
        if int(s.cu_seqlens[-1]) != total:
            raise ValueError(f"cu_seqlens[-1]={int(s.cu_seqlens[-1])}: expected {total}, the tokens of all ranks")
        s = s._replace(cu_seqlens=(s.cu_seqlens - start).clamp(0, s.logprobs.shape[0]))
    rows = GroupRows(s.logprobs, s.cu_seqlens, member, per_token=not all(by_row for _, by_row, _ in ranks))
    for rank, (_, _, values) in enumerate(ranks):
        if not rows.per_token and values != ranks[0][2]:
            raise ValueError(f"advantages: {values} on rank {rank} of the group, expected {ranks[0][2]}, as on rank 0")
    s, objective = prepare(s, options)
    loss, table = reference(s, objective, rows)
    return PolicyLoss(share(loss, member), *named_metrics(s, table))


def _describe(s: Streams, options: LossOptions) -> tuple[dict[str, Any], tuple[int, bool, str]]:
    """Check this rank's arguments. Returns what must be equal on all ranks, and the rank's own: its tokens, whether its
    advantages may be one per sequence, and their checksum."""
    given = [name for name, value in s._asdict().items() if value is not None and name != "selected"]
    s, objective = prepare(s, options)
    if isinstance(objective.variant, Custom):
        raise ValueError(f"variant={options.variant!r}: expected one of turnwise's own, as tokens are split over ranks")
    if objective.variant.selects and s.selected is None:
        raise ValueError(f"selected=None: expected this rank's part of select_tokens, as variant={options.variant!r}")
    check_layout("logprobs", s.logprobs, s.cu_seqlens)
    tokens, rows = s.logprobs.shape[-1], row_count(s.logprobs, s.cu_seqlens)
    cu_seqlens, normalizer = s.cu_seqlens, options.normalizer
    if cu_seqlens is not None:
        check_cu_seqlens_values(cu_seqlens, None)
        # Boundaries that fit the local tokens, so that all other checks see a batch of this rank alone.
        s = s._replace(cu_seqlens=cu_seqlens.clamp(max=tokens))
    if cu_seqlens is None or int(cu_seqlens[-1]) >= tokens:
        check_call(s, objective, check=True)
    with_selected(s, objective.variant)
    facts: dict[str, Any] = {
        "function": "sequence_parallel_policy_loss",
        "rows": rows,
        "streams": given,
        "requires_grad of logprobs": s.logprobs.requires_grad and torch.is_grad_enabled(),
        "dtype of logprobs": s.logprobs.dtype,
        "cu_seqlens": checksum(cu_seqlens),
        "actor_ids": checksum(s.actor_ids),
        **{name: repr(value) for name, value in options._asdict().items()},
        "normalizer": checksum(normalizer) if isinstance(normalizer, Tensor) else repr(normalizer),
    }
    by_row = tuple(s.advantages.shape) in ((rows,), (rows, 1))
    return facts, (tokens, by_row, checksum(s.advantages))
