"""LM head and policy loss where each rank of a group holds some rows of the head."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from turnwise.ops.logprob.linear_native import Head
from turnwise.ops.loss.linear_policy_loss import checked_normalizer, needs_rows, one_pass_loss
from turnwise.ops.loss.options import KL, Clip, ImportanceCorrection, Variant
from turnwise.ops.loss.policy_loss import PolicyLoss, policy_loss
from turnwise.ops.parallel.group import checksum
from turnwise.ops.parallel.vocab_logprob import LinearLogprob, shard_head


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
    check: bool = False,
    backend: str | None = None,
) -> PolicyLoss:
    """Compute :func:`linear_policy_loss` of an LM head whose rows are split over the ranks of ``group``.

    ``weight_shard [V_r, H]``, ``bias_shard [V_r]``, ``group`` and ``check`` are as in
    :func:`vocab_parallel_linear_logprob`. All other arguments are those of :func:`linear_policy_loss`, and the same on
    every rank. Every rank calls, and gets the loss and metrics of one process with the whole head. Gradients are those
    of that one loss: ``weight_shard`` and ``bias_shard`` get their own part, and ``hidden`` gets the whole.

    Losses that :func:`linear_policy_loss` computes in one pass take one pass here too: each chunk of tokens has its two
    all-reduces, and the forward also sums the gradient of ``hidden`` over the group, in float32. The others compute the
    logits twice. The ranks first tell each other their widths, which makes a GPU wait once.

    Raises ``ValueError`` or ``TypeError`` naming the argument, on every rank, ``RuntimeError`` without a process group,
    and ``BackendUnavailable`` if the named backend can't serve.

    Example: ``vocab_parallel_linear_policy_loss(states, weight_shard, targets, old, advantages, cu_seqlens=cu)``
    """
    objective: dict[str, Any] = {"clip": clip, "variant": variant, "kl": kl, "correction": correction}
    batch: dict[str, Any] = {
        "mask": mask, "cu_seqlens": cu_seqlens, "ref_logprobs": ref_logprobs, "rollout_logprobs": rollout_logprobs,
        "aggregation": aggregation, "normalizer": normalizer, "actor_ids": actor_ids, "num_actors": num_actors,
        "max_length": max_length,
    }  # fmt: skip

    def also(compare: bool) -> dict[str, Any]:
        if not isinstance(entropy, bool):
            raise TypeError(f"entropy: expected True or False, as it is made here, got {type(entropy).__name__}")
        batch["normalizer"] = checked_normalizer(targets, old_logprobs, advantages, batch, objective, selected, check)
        if not (check or targets.is_cpu):
            return {}
        streams = {"old_logprobs": old_logprobs, "advantages": advantages, "selected": selected, **batch}
        tensors = {name: checksum(x) if isinstance(x, Tensor) else repr(x) for name, x in streams.items()}
        return tensors | {name: repr(option) for name, option in objective.items()}

    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "ignore_index": ignore_index}
    options |= {"group": group, "vocab_start": None, "check": check, "backend": backend, "also": also}
    sharded = shard_head(hidden, weight_shard, targets, bias_shard, positions, entropy, **options)
    states, weight, bias, shifted, _, shard = sharded
    if ignore_index is not None:
        kept = targets != ignore_index
        batch["mask"] = kept if mask is None else (mask != 0) & kept
    leaves = states, weight, bias
    wanted = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
    if wanted and not needs_rows(variant, correction) and shard.backend == "native":
        head = functools.partial(Head, states, weight, shifted, bias, positions, shard.softmax, shard=shard)
        with torch.autocast(states.device.type, enabled=False):
            return one_pass_loss(head, leaves, old_logprobs, advantages, objective, batch, entropy)
    logprob, entropies = LinearLogprob.apply(*sharded)
    batch |= {"selected": selected, "entropy": entropies.detach() if entropy else None}
    return policy_loss(logprob, old_logprobs, advantages, **objective, **batch)
