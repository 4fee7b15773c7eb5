"""Compute the policy loss from per-token rewards in one call: reward sums, advantages within groups, policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.ops.advantage.checks import check_count, check_rule, check_shapes, check_types
from turnwise.ops.advantage.group_advantage import compute_group_advantage, kernel_columns, kernel_rule
from turnwise.ops.advantage.reference import GroupColumns, GroupOptions
from turnwise.ops.common.dispatch import native_core, select_backend, stream_of
from turnwise.ops.common.layout import Streams, check_optional, row_count, transform_reason
from turnwise.ops.loss.arguments import LossOptions, named_metrics, prepare
from turnwise.ops.loss.options import KL, Clip, ImportanceCorrection, Variant
from turnwise.ops.loss.policy_loss import (
    allocate_outputs,
    attach_grad,
    cast_for_kernel,
    compute_policy_loss,
    contiguous_boundaries,
    kernel_options,
)
from turnwise.ops.loss.reference import Objective
from turnwise.ops.rewards.token_rewards import as_floats, float64_reason, is_plain, token_reward_sum


class GroupedPolicyLoss(NamedTuple):
    """The fields of :class:`PolicyLoss`, and the ``advantages [B]`` (float32, no gradient) that the loss used."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    actor_metrics: Mapping[str, Tensor]
    advantages: Tensor


def _fused(s: Streams, objective: Objective, columns: GroupColumns, rule: GroupOptions) -> GroupedPolicyLoss:
    """Make one call of the compiled module: one pass over each stream on a CPU, two launches on a GPU.

    The rewards of ``columns`` are those of tokens.
    """
    # Outputs and inputs in the form of the compiled module, which writes the advantages too.
    rows = max(row_count(s.logprobs, s.cu_seqlens), 0)
    s = s._replace(advantages=s.logprobs.new_empty(rows, dtype=torch.float32, requires_grad=False))
    loss, grad, metrics = allocate_outputs(s, objective.num_actors)
    summed = columns._replace(rewards=torch.empty_like(s.advantages))
    check_rule(rule, columns.trajectory_ids, columns.lengths)
    check_shapes(summed)
    summed, options = kernel_columns(summed), kernel_options(objective)
    call = contiguous_boundaries(s), *options, columns.rewards, tuple(summed), kernel_rule(rule), loss, grad, metrics
    device, core = native_core(s.logprobs)
    if device == "cpu":
        core.grouped_policy_loss(*call, torch.get_num_threads())
    else:
        sizes = rows, s.logprobs.numel(), objective.num_actors, summed.num_groups
        weighted = rule.center == "length_weighted"
        size = core.cuda_grouped_policy_loss_workspace(*sizes, weighted, s.logprobs.get_device())
        workspace = torch.empty(size, dtype=torch.uint8, device=grad.device)
        core.cuda_grouped_policy_loss(*call, workspace, stream_of(grad))
    loss = attach_grad(loss, grad, s, options)
    return GroupedPolicyLoss(loss, *named_metrics(s, metrics), s.advantages)


def grouped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    token_rewards: Tensor,
    group_ids: Tensor,
    *,
    num_groups: int | None = None,
    trajectory_ids: Tensor | None = None,
    lengths: Tensor | None = None,
    pool: str = "rows",
    center: str = "mean",
    scale: str = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    min_std: float = 0.0,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    clip: Clip | None = None,
    variant: Variant | None = None,
    kl: KL | None = None,
    ref_logprobs: Tensor | None = None,
    correction: ImportanceCorrection | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
    check: bool = False,
    backend: str | None = None,
) -> GroupedPolicyLoss:
    """Compute :func:`policy_loss` with the advantages that :func:`group_advantage` gives :func:`token_reward_sum`.

    ``token_rewards`` has the shape of ``logprobs``. Rows with equal ``group_ids [B]`` are compared with each other. All
    other arguments, checks and errors are those of the three ops. The result equals three separate calls, but needs
    only one pass over each stream on a CPU and two launches on a GPU.

    Groups must be whole, so split an optimizer step between groups only.

    Example: ``grouped_policy_loss(logprobs, old_logprobs, token_rewards, group_ids, mask=mask, clip=Clip(0.2, 0.28))``
    """
    rewards = as_floats("token_rewards", token_rewards)
    num_groups = None if num_groups is None else check_count(num_groups)
    columns = GroupColumns(rewards, group_ids, num_groups, trajectory_ids, lengths, valid)
    rule = GroupOptions(pool, center, scale, singleton, ddof, eps, min_std)
    streams = Streams(  # the kernel writes the advantages
        logprobs, old_logprobs, rewards, mask, cu_seqlens, ref_logprobs, rollout_logprobs, None, actor_ids, entropy
    )
    options = LossOptions(clip, variant, kl, correction, aggregation, normalizer, num_actors, max_length)
    s, objective = prepare(streams, options)
    check_optional(trajectory_ids=trajectory_ids, lengths=lengths, valid=valid)
    check_types(rewards, lengths, valid)
    if rewards.shape != logprobs.shape:
        raise ValueError(
            f"token_rewards has shape {tuple(rewards.shape)}: expected {tuple(logprobs.shape)}, as logprobs"
        )
    s, reason = cast_for_kernel(s, objective.variant)
    others = group_ids, trajectory_ids, lengths, valid
    reason = transform_reason(backend, *s, *others) or reason or float64_reason(token_rewards=rewards)
    chosen = select_backend("grouped_policy_loss", backend, logprobs, native=reason, triton=reason)

    # The GPU's kernel has no table of trajectories.
    fused = chosen == "native" and (pool == "rows" or native_core(logprobs)[0] == "cpu")
    plain = isinstance(group_ids, Tensor) and (is_plain(logprobs) or type(logprobs) is torch.nn.Parameter)
    wrong: Exception | None = None
    if fused and plain and not (objective.variant.selects or check):
        try:
            return _fused(s, objective, columns, rule)
        except (ValueError, TypeError, IndexError) as error:
            wrong = error  # the separate ops below find the argument that is wrong

    sums = token_reward_sum(rewards, mask=mask, cu_seqlens=cu_seqlens, check=check, backend=backend)
    advantages = compute_group_advantage(columns._replace(rewards=sums), rule, check, backend)
    result = compute_policy_loss(streams._replace(advantages=advantages), options, check, backend)
    if wrong is not None:
        raise wrong
    return GroupedPolicyLoss(*result, advantages)
