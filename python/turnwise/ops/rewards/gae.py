"""Estimate generalised advantages over token streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core, select_backend, stream_of
from turnwise.ops.common.layout import check_like, check_memory, check_optional, check_tokens, transform_reason
from turnwise.ops.rewards.reference import gae as reference
from turnwise.ops.rewards.token_rewards import (
    as_floats,
    check_reward_values,
    check_share,
    cpu_inputs,
    float64_reason,
    gpu_inputs,
    is_plain,
    wide_type,
    workspace_of,
)


# ---------------------------------------------------------------------------------------------------------------------
# Input
# ---------------------------------------------------------------------------------------------------------------------
def _check(rewards: Tensor, values: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    check_tokens("rewards", rewards, mask, cu_seqlens)
    check_like("rewards", rewards, values=values)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------
def _compute(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if backend == "torch":
        _check(rewards, values, mask, cu_seqlens)
        if rewards.is_cpu:
            check_reward_values("rewards", rewards, mask, cu_seqlens)
        advantages, returns = reference(rewards, values, mask, cu_seqlens, gamma, lam)
        return advantages.to(wide_type(rewards, values)), returns.to(wide_type(rewards, values))
    # Triton and the compiled module write into these; each backend wants its own form of the inputs.
    advantages = rewards.new_empty(rewards.shape, dtype=torch.float32)
    returns = torch.empty_like(advantages)
    if backend == "triton":
        from turnwise.ops.rewards import triton as token_rewards_triton

        _check(rewards, values, mask, cu_seqlens)
        check_memory(rewards=rewards, values=values, mask=mask, cu_seqlens=cu_seqlens)
        rewards, mask, cu_seqlens = gpu_inputs(rewards, mask, cu_seqlens)
        token_rewards_triton.gae(rewards, values.contiguous(), mask, cu_seqlens, gamma, lam, advantages, returns)
        return advantages, returns
    device, core = native_core(rewards)
    if device == "cuda":
        space = workspace_of(rewards, core.cuda_token_scan_workspace(rewards.numel()))
        if values.dtype is not rewards.dtype:
            rewards, values = rewards.float(), values.float()
        rewards, mask, cu_seqlens = gpu_inputs(rewards, mask, cu_seqlens)
        streams = (rewards, values.contiguous(), mask, cu_seqlens)
        core.cuda_gae(*streams, gamma, lam, advantages, returns, space, stream_of(rewards))
    else:
        mask, cu_seqlens = cpu_inputs(mask, cu_seqlens)
        streams = (rewards, values, mask, cu_seqlens)
        if not core.gae(*streams, gamma, lam, advantages, returns, torch.get_num_threads()):
            check_reward_values("rewards", rewards, mask, cu_seqlens)
    return advantages, returns


def _checked(
    rewards: Tensor, values: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    try:
        return _compute(rewards, values, mask, cu_seqlens, *options)
    except (ValueError, TypeError, IndexError):
        # The kernel reports only that something is wrong. The slow checks find the value.
        _check(rewards, values, mask, cu_seqlens)
        if rewards.is_cpu:
            check_reward_values("rewards", rewards, mask, cu_seqlens)
        raise


_SCHEMA = torch.library.infer_schema(_compute, mutates_args=())
_op = torch.library.custom_op("turnwise::gae", _checked, mutates_args=(), schema=_SCHEMA)


@_op.register_fake
def _fake(rewards: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    advantages = rewards.new_empty(rewards.shape, dtype=wide_type(rewards, values))
    return advantages, torch.empty_like(advantages)


# ---------------------------------------------------------------------------------------------------------------------
# Public function
# ---------------------------------------------------------------------------------------------------------------------
def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    check: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``(advantages, returns)`` by generalised advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16).

    ``A[t] = delta[t] + gamma * lam * A[t + 1]`` with ``delta[t] = r[t] + gamma * V[t + 1] - V[t]``, and
    ``returns = A + V``. Padded input: ``rewards`` and ``values [B, T]``, with ``mask [B, T]``. Packed input: ``[N]``
    with ``cu_seqlens [B+1]`` (int32 or int64, from 0 to N), and ``mask [N]`` if some tokens don't train. Streams are
    float32, bfloat16, float16, float64 (reference only) or integers, with any strides. ``gamma`` and ``lam`` are in
    ``[0, 1]``.

    A token trains where ``mask`` (bool, integer or 0/1 float) is not 0. The recursion skips the other tokens (a tool's
    answer inside a response, padding) and gives them 0; they may hold any value, NaN included. The value after a row's
    last trained token is 0. Advantages are not whitened.

    Both results have the shape of ``rewards`` and are float32 (float64 if ``rewards`` or ``values`` is). No gradient
    flows. Raises ``ValueError`` or ``TypeError`` naming the argument, also for rewards that are not finite; a NaN in
    ``values`` reaches the results. On a GPU, values are checked only with ``check=True``, which waits for the device.
    Raises ``BackendUnavailable`` if the named backend can't serve.

    Example: ``gae(torch.tensor([[0., 1.]]), torch.tensor([[.5, .25]]), lam=1.0)`` gives ``[[.5, .75]]`` and
    ``[[1., 1.]]``.
    """
    rewards, values = as_floats("rewards", rewards), as_floats("values", values)
    check_optional(mask=mask, cu_seqlens=cu_seqlens)
    check_share("gamma", gamma)
    check_share("lam", lam)
    reason = transform_reason(backend, rewards, values, mask, cu_seqlens)
    reason = reason or float64_reason(rewards=rewards, values=values)
    chosen = select_backend("gae", backend, rewards, native=reason, triton=reason)
    if check and not torch.compiler.is_compiling():
        _check(rewards, values, mask, cu_seqlens)
        check_reward_values("rewards", rewards, mask, cu_seqlens)
    # A compiler can't follow the reference from token to token either.
    call: Any = _checked if is_plain(rewards) and is_plain(values) else torch.ops.turnwise.gae
    return call(rewards, values, mask, cu_seqlens, float(gamma), float(lam), chosen)
