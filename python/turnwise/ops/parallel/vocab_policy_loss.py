"""LM head and policy loss where each rank of a group holds some rows of the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.layout import Streams
from turnwise.ops.head.linear_policy_loss import check_entropy, prepare_packed
from turnwise.ops.head.one_pass import HeadLoss, one_pass_loss, plan_loss, with_logprobs
from turnwise.ops.loss.arguments import LossOptions
from turnwise.ops.loss.options import KL, Clip, ImportanceCorrection, Variant
from turnwise.ops.loss.policy_loss import prepared_policy_loss
from turnwise.ops.parallel.group import checksum
from turnwise.ops.parallel.vocab_logprob import LinearLogprob, head_of, shard_head


def vocab_parallel_linear_policy_loss(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    cu_seqlens: Tensor,
    group: Any = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    bias_shard: Tensor | None = None,
    positions: Tensor | None = None,
    clip: Clip | None = None,
    variant: Variant | None = None,
    kl: KL | None = None,
    ref_logprobs: Tensor | None = None,
    correction: ImportanceCorrection | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: bool = False,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
    selected: Tensor | None = None,
    max_memory: int | None = None,
    check: bool = False,
    backend: str | None = None,
) -> HeadLoss:
    """Compute :func:`linear_policy_loss` of an LM head whose rows are split over the ranks of ``group``.

    ``weight_shard [V_r, H]``, ``bias_shard [V_r]``, ``group`` and ``check`` are as in
    :func:`vocab_parallel_linear_logprob`. All other arguments are those of :func:`linear_policy_loss`, and the same on
    every rank. Every rank calls, and gets the loss and metrics of one process with the whole head. Gradients are those
    of that one loss: ``weight_shard`` and ``bias_shard`` get their own part, and ``hidden`` gets the whole.

    Losses that :func:`linear_policy_loss` computes in one pass take one pass here too: each chunk of tokens has its two
    all-reduces, and the forward also sums the gradient of ``hidden`` over the group, in float32. The others compute the
    logits twice. The ranks first exchange their widths, which makes a GPU wait once.

    Raises ``ValueError`` or ``TypeError`` naming the argument, on every rank, ``RuntimeError`` without a process group,
    and ``BackendUnavailable`` if the named backend can't serve.

    Example: ``vocab_parallel_linear_policy_loss(states, weight_shard, targets, old, advantages, cu_seqlens=cu)``
    """
    streams = Streams(  # targets instead of log-probabilities, which the head makes
        targets, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, None, actor_ids, None,
        selected,
    )  # fmt: skip
    options = LossOptions(clip, variant, kl, correction, aggregation, normalizer, num_actors, max_length)

    def check_loss(compare: bool) -> dict[str, Any]:
        check_entropy(entropy)
        prepare_packed(streams, options, targets, check)
        if not (check or targets.is_cpu):
            return {}
        given = streams._asdict() | options._asdict()
        del given["logprobs"]
        return {name: checksum(value) if isinstance(value, Tensor) else repr(value) for name, value in given.items()}

    head: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "ignore_index": ignore_index}
    head |= {"group": group, "vocab_start": None, "max_memory": max_memory, "check": check, "backend": backend}
    head["also"] = check_loss
    sharded = shard_head(hidden, weight_shard, targets, bias_shard, positions, entropy, **head)
    states, weight, bias, shifted, _, shard = sharded
    s, objective = prepare_packed(streams, options, targets, check)
    if ignore_index is not None:
        kept = targets != ignore_index
        s = s._replace(mask=kept if mask is None else (mask != 0) & kept)
    leaves = states, weight, bias
    wanted = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
    if wanted and states.dtype is not torch.float64:
        with torch.autocast(states.device.type, enabled=False):
            with torch.no_grad():
                whole = head_of(states, weight, shifted, bias, positions, shard)
                plan = plan_loss(whole, s, objective)
            if plan is not None:
                return one_pass_loss(plan, leaves, s, entropy)
    logprob, entropies = LinearLogprob.apply(*sharded)
    s = s._replace(logprobs=logprob, entropy=entropies.detach() if entropy else None)
    return with_logprobs(prepared_policy_loss(s, objective), logprob, s.mask)
