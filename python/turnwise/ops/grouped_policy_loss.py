"""From rewards per token to the loss in one call: reward sums, advantages within groups, policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import native_core, resolve, stream_of
from .group_advantage import group_advantage, kernel_columns
from .group_advantage_checks import check_count
from .options import KL, Clip, ImportanceCorrection, Variant
from .policy_loss import attach, fitted, outputs, pack, policy_loss
from .policy_loss_reference import Objective
from .policy_loss_setup import make_normalizer, make_objective, named_metrics
from .streams import Streams, check_tensors, row_count, transform_gap
from .token_rewards import as_floats, float64_obstacle, is_plain, token_reward_sum


class GroupedPolicyLoss(NamedTuple):
    """As :class:`PolicyLoss`, and the ``advantages [B]`` (float32, without gradient) that the loss was made with."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    actor_metrics: Mapping[str, Tensor]
    advantages: Tensor


def _fused(
    s: Streams,
    objective: Objective,
    normalizer: Tensor | None,
    token_rewards: Tensor,
    group_ids: Tensor,
    num_groups: int | None,
    rule: dict[str, Any],
) -> GroupedPolicyLoss:
    """One call of the compiled module: one pass over each stream on a CPU, two launches on a GPU."""
    loss, grad, metrics = outputs(s, objective.num_actors)
    sums = torch.empty_like(s.advantages)
    groups = -1 if num_groups is None else num_groups
    columns, modes = kernel_columns(sums, group_ids, groups, **rule)
    cu_seqlens = None if s.cu_seqlens is None else s.cu_seqlens.contiguous()
    streams = (*s._replace(cu_seqlens=cu_seqlens)[:7], normalizer, s.actor_ids, s.entropy, None)
    call = streams, *pack(objective), token_rewards, columns, modes, loss, grad, metrics
    place, core = native_core(s.logprobs)
    if place == "cpu":
        core.grouped_policy_loss(*call, torch.get_num_threads())
    else:
        weighted = rule["center"] == "length_weighted"
        size = core.cuda_grouped_policy_loss_workspace(
            sums.shape[0], s.logprobs.numel(), objective.num_actors, groups, weighted, s.logprobs.get_device()
        )
        workspace = torch.empty(size, dtype=torch.uint8, device=grad.device)
        core.cuda_grouped_policy_loss(*call, workspace, stream_of(grad))
    loss = attach(loss, grad, (*s, None, normalizer, *pack(objective)))
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
    """:func:`policy_loss` with the advantages that :func:`group_advantage` makes of :func:`token_reward_sum`.

    ``token_rewards`` has the shape of ``logprobs``, ``group_ids [B]`` says which rows are compared; all other arguments
    are those of the three ops, and so are their checks and errors. Equal to calling them one after the other, but in
    one call: on a CPU one pass over each stream, on a GPU two launches.

    Not all of the batch may be there: groups must be whole, so split an optimizer step between groups alone.

    Example: ``grouped_policy_loss(logprobs, old_logprobs, token_rewards, group_ids, mask=mask, clip=Clip(dual=3.0))``
    """
    rewards = as_floats("token_rewards", token_rewards)
    if num_groups is not None:
        num_groups = check_count(num_groups)
    rule: dict[str, Any] = {
        "trajectory_ids": trajectory_ids,
        "lengths": lengths,
        "pool": pool,
        "center": center,
        "scale": scale,
        "ddof": ddof,
        "eps": eps,
        "singleton": singleton,
        "min_std": min_std,
        "valid": valid,
    }
    given = Streams(
        logprobs, old_logprobs, rewards, mask, cu_seqlens, ref_logprobs, rollout_logprobs, actor_ids, entropy
    )
    objective = make_objective(given, clip, variant, kl, correction, aggregation, num_actors, max_length)
    check_tensors(given)
    if rewards.shape != logprobs.shape:
        raise ValueError(
            f"token_rewards has shape {tuple(rewards.shape)}: expected {tuple(logprobs.shape)}, as logprobs"
        )
    given, gap = fitted(given, objective.variant)
    others = group_ids, trajectory_ids, lengths, valid, normalizer
    reason = transform_gap(backend, *given, *others) or gap or float64_obstacle(token_rewards=rewards)
    chosen = resolve(backend, logprobs, native=reason, triton=reason)
    plain = is_plain(logprobs) or type(logprobs) is torch.nn.Parameter
    # The GPU's kernel has no table of trajectories.
    fused = chosen == "native" and (pool == "rows" or native_core(logprobs)[0] == "cpu")
    if fused and plain and isinstance(group_ids, Tensor) and not (objective.variant.selects or check):
        rows = max(row_count(logprobs, cu_seqlens), 0)
        s = given._replace(advantages=given.logprobs.new_empty(rows, dtype=torch.float32, requires_grad=False))
        try:
            made = make_normalizer(normalizer, objective, logprobs, num_actors)
            return _fused(s, objective, made, rewards, group_ids, num_groups, rule)
        except (ValueError, TypeError, IndexError) as error:
            wrong = error  # one op after the other finds out which argument it is
    else:
        wrong = None
    sums = token_reward_sum(rewards, mask=mask, cu_seqlens=cu_seqlens, check=check, backend=backend)
    advantages = group_advantage(sums, group_ids, num_groups=num_groups, **rule, check=check, backend=backend)
    result = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        clip=clip,
        variant=variant,
        kl=kl,
        ref_logprobs=ref_logprobs,
        correction=correction,
        rollout_logprobs=rollout_logprobs,
        entropy=entropy,
        aggregation=aggregation,
        normalizer=normalizer,
        actor_ids=actor_ids,
        num_actors=num_actors,
        max_length=max_length,
        check=check,
        backend=backend,
    )
    if wrong is not None:
        raise wrong
    return GroupedPolicyLoss(*result, advantages)
