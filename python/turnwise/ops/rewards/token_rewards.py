"""Sum per-token rewards over each sequence, and compute each token's discounted rewards to go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core, select_backend, stream_of
from turnwise.ops.common.layout import (
    FLOATS,
    check_each,
    check_mask_type,
    check_memory,
    check_optional,
    check_token_values,
    check_tokens,
    is_number,
    is_transformed,
    row_count,
    sees_values,
    trained_tokens,
    transform_reason,
)
from turnwise.ops.rewards.reference import returns as returns_reference
from turnwise.ops.rewards.reference import reward_sum


# ---------------------------------------------------------------------------------------------------------------------
# Input
# ---------------------------------------------------------------------------------------------------------------------
def as_floats(name: str, stream: Any) -> Tensor:
    """Detach a stream of rewards or values from its graph, and convert integers to float32."""
    if not isinstance(stream, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(stream).__name__}")
    if stream.requires_grad or is_transformed(stream):
        stream = stream.detach()
    if stream.dtype in FLOATS:
        return stream
    if stream.is_complex() or stream.is_floating_point():
        raise TypeError(f"{name} has dtype {stream.dtype}: expected float32, bfloat16, float16, float64 or integers")
    return stream.float()


def check_share(name: str, value: float) -> None:
    if not (is_number(value) and 0 <= value <= 1):
        raise ValueError(f"{name}={value!r}: expected a number in [0, 1]")


def float64_reason(**streams: Tensor) -> str:
    """The reason why the kernels can't serve; empty if they can."""
    for name, stream in streams.items():
        if stream.dtype is torch.float64:
            return f"{name} is float64, and the kernels read float32, bfloat16 and float16"
    return ""


def check_reward_values(name: str, rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Check the values of all streams, including the rewards. Reading them makes a GPU wait."""
    check_token_values(rewards, mask, cu_seqlens)
    _check_finite(name, rewards, trained_tokens(mask, rewards))


def _check_finite(name: str, rewards: Tensor, trained: Tensor) -> None:
    if not is_transformed(rewards, trained):
        check_each(name, rewards, ~torch.isfinite(rewards) & trained, "a finite number")


def _check_lengths(rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, lengths: Tensor | None) -> None:
    if lengths is None:
        return
    if mask is not None or cu_seqlens is not None:
        raise ValueError("lengths: expected neither mask nor cu_seqlens beside it")
    if lengths.shape != rewards.shape[:1]:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}: expected ({rewards.shape[0]},), one per sequence")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths has dtype {lengths.dtype}: expected int32 or int64")
    if lengths.device != rewards.device:
        raise ValueError(f"lengths is on {lengths.device}: expected {rewards.device}, as token_rewards")


def _check_sum_values(rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, lengths: Tensor | None) -> None:
    """Check the values of all inputs of the sum, including ``lengths``."""
    if lengths is None:
        check_reward_values("token_rewards", rewards, mask, cu_seqlens)
        return
    if not is_transformed(lengths):
        outside = (lengths < 0) | (lengths > rewards.shape[1])
        check_each("lengths", lengths, outside, f"a number in [0, {rewards.shape[1]}]")
    counted = torch.arange(rewards.shape[1], device=rewards.device)[None] < lengths[:, None]
    _check_finite("token_rewards", rewards, counted)


def cpu_inputs(mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Convert the mask to a type that the C++ kernels read, and make ``cu_seqlens`` contiguous."""
    if mask is not None and mask.dtype is torch.float64:
        mask = mask.float()
    return mask, None if cu_seqlens is None else cu_seqlens.contiguous()


_BYTES = (torch.bool, torch.uint8, torch.int8)


def gpu_inputs(
    tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Make all inputs contiguous and the mask bytes or float32. Copies masks of other types and strided tensors."""
    if mask is not None:
        check_mask_type(mask)
        mask = (mask if mask.dtype in _BYTES or mask.dtype is torch.float32 else mask != 0).contiguous()
    return tokens.contiguous(), mask, None if cu_seqlens is None else cu_seqlens.contiguous()


def workspace_of(tokens: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=tokens.device)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------
def _sum(
    token_rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, lengths: Tensor | None, backend: str
) -> Tensor:
    sums = token_rewards.new_empty(max(row_count(token_rewards, cu_seqlens), 0), dtype=torch.float32)
    if backend == "triton":
        from turnwise.ops.rewards import triton as token_rewards_triton

        check_tokens("token_rewards", token_rewards, mask, cu_seqlens)
        _check_lengths(token_rewards, mask, cu_seqlens, lengths)
        check_memory(token_rewards=token_rewards, mask=mask, cu_seqlens=cu_seqlens, lengths=lengths)
        lengths = None if lengths is None else lengths.contiguous()
        token_rewards_triton.token_reward_sum(*gpu_inputs(token_rewards, mask, cu_seqlens), lengths, sums)
        return sums
    device, core = native_core(token_rewards)
    if device == "cuda":
        space = workspace_of(token_rewards, core.cuda_token_reward_sum_workspace(token_rewards.numel()))
        token_rewards, mask, cu_seqlens = gpu_inputs(token_rewards, mask, cu_seqlens)
        lengths = None if lengths is None else lengths.contiguous()
        core.cuda_token_reward_sum(token_rewards, mask, cu_seqlens, lengths, sums, space, stream_of(token_rewards))
    else:
        mask, cu_seqlens = cpu_inputs(mask, cu_seqlens)
        if not core.token_reward_sum(token_rewards, mask, cu_seqlens, lengths, sums, torch.get_num_threads()):
            _check_sum_values(token_rewards, mask, cu_seqlens, lengths)
    return sums


def _returns(
    token_rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, gamma: float, backend: str
) -> Tensor:
    if backend == "torch":
        check_tokens("token_rewards", token_rewards, mask, cu_seqlens)
        if token_rewards.is_cpu:
            check_reward_values("token_rewards", token_rewards, mask, cu_seqlens)
        return returns_reference(token_rewards, mask, cu_seqlens, gamma).to(wide_type(token_rewards))
    returns = token_rewards.new_empty(token_rewards.shape, dtype=torch.float32)
    # Each backend fills `returns`; they differ in the form of the inputs that they read.
    if backend == "triton":
        from turnwise.ops.rewards import triton as token_rewards_triton

        check_tokens("token_rewards", token_rewards, mask, cu_seqlens)
        check_memory(token_rewards=token_rewards, mask=mask, cu_seqlens=cu_seqlens)
        token_rewards_triton.token_returns(*gpu_inputs(token_rewards, mask, cu_seqlens), gamma, returns)
        return returns
    device, core = native_core(token_rewards)
    if device == "cuda":
        space = workspace_of(token_rewards, core.cuda_token_scan_workspace(token_rewards.numel()))
        token_rewards, mask, cu_seqlens = gpu_inputs(token_rewards, mask, cu_seqlens)
        core.cuda_token_returns(token_rewards, mask, cu_seqlens, gamma, returns, space, stream_of(token_rewards))
    else:
        mask, cu_seqlens = cpu_inputs(mask, cu_seqlens)
        if not core.token_returns(token_rewards, mask, cu_seqlens, gamma, returns, torch.get_num_threads()):
            check_reward_values("token_rewards", token_rewards, mask, cu_seqlens)
    return returns


def wide_type(*streams: Tensor) -> torch.dtype:
    """The dtype that the reference returns: float64 if any stream is, else float32."""
    return torch.float64 if any(stream.dtype is torch.float64 for stream in streams) else torch.float32


def _checked_sum(
    token_rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, lengths: Tensor | None, backend: str
) -> Tensor:
    try:
        return _sum(token_rewards, mask, cu_seqlens, lengths, backend)
    except (ValueError, TypeError, IndexError):
        # The kernel reports only that something is wrong. The slow checks find the value.
        check_tokens("token_rewards", token_rewards, mask, cu_seqlens)
        _check_lengths(token_rewards, mask, cu_seqlens, lengths)
        if token_rewards.is_cpu:
            _check_sum_values(token_rewards, mask, cu_seqlens, lengths)
        raise


def _checked_returns(
    token_rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, gamma: float, backend: str
) -> Tensor:
    try:
        return _returns(token_rewards, mask, cu_seqlens, gamma, backend)
    except (ValueError, TypeError, IndexError):
        check_tokens("token_rewards", token_rewards, mask, cu_seqlens)
        if token_rewards.is_cpu:
            check_reward_values("token_rewards", token_rewards, mask, cu_seqlens)
        raise


_sum_op = torch.library.custom_op("turnwise::token_reward_sum", _checked_sum, mutates_args=())
_returns_op = torch.library.custom_op("turnwise::token_returns", _checked_returns, mutates_args=())


@_sum_op.register_fake
def _fake_sum(token_rewards: Tensor, mask: object, cu_seqlens: Tensor | None, *_: object) -> Tensor:
    return token_rewards.new_empty(row_count(token_rewards, cu_seqlens), dtype=torch.float32)


@_returns_op.register_fake
def _fake_returns(token_rewards: Tensor, *_: object) -> Tensor:
    return token_rewards.new_empty(token_rewards.shape, dtype=wide_type(token_rewards))


def is_plain(tensor: Tensor) -> bool:
    """True if the call can skip torch's dispatcher, which costs more than a small batch does."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


# ---------------------------------------------------------------------------------------------------------------------
# Public functions
# ---------------------------------------------------------------------------------------------------------------------
def token_reward_sum(
    token_rewards: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    check: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Sum the rewards of each row's trained tokens: ``[B]`` float32 (float64 for float64 rewards). No gradient flows.

    Padded input: ``token_rewards [B, T]``. If some tokens don't count, pass ``mask [B, T]``, or ``lengths [B]`` (int32
    or int64, in ``[0, T]``), which keeps the first ``lengths[b]`` tokens of row ``b``. Packed input:
    ``token_rewards [N]`` with ``cu_seqlens [B+1]`` (int32 or int64, from 0 to N), and ``mask [N]`` if some tokens don't
    count. Rewards are float32, bfloat16, float16, float64 (reference only) or integers, with any strides. A token
    counts where ``mask`` (bool, integer or 0/1 float) is not 0; other tokens may hold any value, NaN included. Sums are
    accumulated in double. An empty row gets 0.

    Raises ``ValueError`` or ``TypeError`` naming the argument, also for rewards that are not finite. On a GPU, values
    are checked only with ``check=True``, which waits for the device. Raises ``BackendUnavailable`` if the named backend
    can't serve.

    Example: ``token_reward_sum(torch.tensor([[0., 2.], [1., 5.]]), lengths=torch.tensor([2, 1]))`` gives ``[2., 1.]``.
    """
    rewards = as_floats("token_rewards", token_rewards)
    check_optional(mask=mask, cu_seqlens=cu_seqlens, lengths=lengths)
    reason = transform_reason(backend, rewards, mask, cu_seqlens, lengths) or float64_reason(token_rewards=rewards)
    chosen = select_backend("token_reward_sum", backend, rewards, native=reason, triton=reason)
    if check and not torch.compiler.is_compiling():
        check_tokens("token_rewards", rewards, mask, cu_seqlens)
        _check_lengths(rewards, mask, cu_seqlens, lengths)
        _check_sum_values(rewards, mask, cu_seqlens, lengths)
    if chosen != "torch":
        call: Any = _checked_sum if is_plain(rewards) else torch.ops.turnwise.token_reward_sum
        return call(rewards, mask, cu_seqlens, lengths, chosen)
    check_tokens("token_rewards", rewards, mask, cu_seqlens)
    _check_lengths(rewards, mask, cu_seqlens, lengths)
    if sees_values(rewards):
        _check_sum_values(rewards, mask, cu_seqlens, lengths)
    sums = reward_sum(rewards, mask, cu_seqlens, lengths)
    return sums if rewards.dtype is torch.float64 else sums.float()


def token_returns(
    token_rewards: Tensor,
    gamma: float,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    check: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute the discounted rewards to go, ``G[t] = r[t] + gamma * G[next trained token of the row]``.

    Input forms and errors are those of :func:`token_reward_sum`, without ``lengths``. ``gamma`` is in ``[0, 1]``. The
    recursion skips tokens that don't train and gives them 0, so a tool's answer adds no discount. Returns float32
    (float64 for float64 rewards) in the shape of the rewards. No gradient flows.

    Example: ``token_returns(torch.tensor([[0., 0., 1.]]), 0.5)`` gives ``[[.25, .5, 1.]]``.
    """
    rewards = as_floats("token_rewards", token_rewards)
    check_optional(mask=mask, cu_seqlens=cu_seqlens)
    check_share("gamma", gamma)
    reason = transform_reason(backend, rewards, mask, cu_seqlens) or float64_reason(token_rewards=rewards)
    chosen = select_backend("token_returns", backend, rewards, native=reason, triton=reason)
    if check and not torch.compiler.is_compiling():
        check_tokens("token_rewards", rewards, mask, cu_seqlens)
        check_reward_values("token_rewards", rewards, mask, cu_seqlens)
    # A compiler can't follow the reference from token to token either.
    call: Any = _checked_returns if is_plain(rewards) else torch.ops.turnwise.token_returns
    return call(rewards, mask, cu_seqlens, float(gamma), chosen)
