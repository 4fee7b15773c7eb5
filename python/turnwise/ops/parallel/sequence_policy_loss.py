"""Policy loss where each rank of a group holds some tokens of every sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.layout import Streams, check_cu_seqlens_values, check_layout, check_tensors, row_count
from turnwise.ops.loss.arguments import check_call, make_normalizer, make_objective, make_selected, named_metrics
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
    :func:`select_tokens`; :class:`Custom` is refused, as its function would see this rank's tokens alone. Raises
    ``ValueError`` or ``TypeError`` naming the argument, on every rank, and ``RuntimeError`` without a process group.

    Example: ``sequence_parallel_policy_loss(logprobs, old, advantages, cu_seqlens=cu, variant=GSPO()).loss.backward()``
    """
    member = member_of(group)
    given = Streams(
        logprobs, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, actor_ids, entropy
    )
    rule = {"aggregation": aggregation, "num_actors": num_actors, "max_length": max_length}
    options: dict[str, Any] = {"clip": clip, "variant": variant, "kl": kl, "correction": correction}

    def validate() -> tuple[dict[str, Any], tuple[int, bool, str]]:
        check_tensors(given)
        objective = make_objective(given, **options, **rule)  # type: ignore[arg-type]
        if isinstance(objective.variant, Custom):
            raise ValueError(f"variant={variant!r}: expected one of turnwise's own, as tokens are split over ranks")
        if objective.variant.selects and selected is None:
            raise ValueError(f"selected=None: expected this rank's part of select_tokens, as variant={variant!r}")
        check_layout("logprobs", logprobs, cu_seqlens)
        if cu_seqlens is not None:
            check_cu_seqlens_values(cu_seqlens, None)
        # Boundaries that fit the local tokens, so that all other checks see a batch of this rank alone.
        own = given if cu_seqlens is None else given._replace(cu_seqlens=cu_seqlens.clamp(max=logprobs.shape[0]))
        if cu_seqlens is None or int(cu_seqlens[-1]) >= logprobs.shape[0]:
            check_call(own, objective, make_normalizer(normalizer, objective, logprobs, num_actors), check=True)
        make_selected(own, objective.variant, selected)
        rows = row_count(logprobs, cu_seqlens)
        by_row = tuple(advantages.shape) in ((rows,), (rows, 1))
        facts: dict[str, Any] = {
            "function": "sequence_parallel_policy_loss",
            "rows": rows,
            "streams": [name for name, value in given._asdict().items() if value is not None],
            "requires_grad of logprobs": logprobs.requires_grad and torch.is_grad_enabled(),
            "dtype of logprobs": logprobs.dtype,
            "cu_seqlens": checksum(cu_seqlens),
            "actor_ids": checksum(actor_ids),
            "normalizer": checksum(normalizer) if isinstance(normalizer, Tensor) else repr(normalizer),
            **{name: repr(value) for name, value in (rule | options).items()},
        }
        return facts, (logprobs.numel() if cu_seqlens is not None else logprobs.shape[1], by_row, checksum(advantages))

    found = exchange(member, validate)
    s = given
    if cu_seqlens is not None:
        total, start = sum(size for size, *_ in found), start_of(member, (size for size, *_ in found))
        if int(cu_seqlens[-1]) != total:
            raise ValueError(f"cu_seqlens[-1]={int(cu_seqlens[-1])}: expected {total}, the tokens of all ranks")
        s = s._replace(cu_seqlens=(cu_seqlens - start).clamp(0, logprobs.shape[0]))
    rows = GroupRows(logprobs, s.cu_seqlens, member, per_token=not all(by_row for _, by_row, _ in found))
    for rank, (_, _, values) in enumerate(found):
        if not rows.per_token and values != found[0][2]:
            raise ValueError(f"advantages: {values} on rank {rank} of the group, expected {found[0][2]}, as on rank 0")
    objective = make_objective(s, **options, **rule)  # type: ignore[arg-type]
    normalizer = make_normalizer(normalizer, objective, logprobs, num_actors)
    loss, table = reference(s, objective, selected, normalizer, rows)
    return PolicyLoss(share(loss, member), *named_metrics(s, table))
