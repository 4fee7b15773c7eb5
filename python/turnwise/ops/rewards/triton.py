"""Triton kernels for reward sums, discounted returns and generalised advantages. Each program handles one row.

Blocks start at multiples of their size, so loads are aligned wherever a row begins. A block that lies entirely inside
a row is read without a mask, because a masked load moves less than 16 bytes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.ops.common.dispatch import interpreted
from turnwise.ops.common.layout import row_count
from turnwise.ops.common.triton import FUSED, CompileCase

SUM_BLOCK = 64 if interpreted else 2048
SCAN_BLOCK = 32 if interpreted else 1024


@triton.jit
def row_bounds(starts_ptr, width, row, PACKED: tl.constexpr):
    """The begin and end of a row in its stream; of packed streams ``width`` is the number of tokens."""
    if PACKED:  # clamped, so wrong boundaries can only give wrong sums, never a read out of bounds
        begin = tl.load(starts_ptr + row).to(tl.int64)
        stop = tl.load(starts_ptr + row + 1).to(tl.int64)
        return tl.minimum(tl.maximum(begin, 0), width), tl.minimum(tl.maximum(stop, 0), width)
    start = row.to(tl.int64) * width
    return start, start + width


@triton.jit
def load_block(ptr, base, start, end, BLOCK: tl.constexpr):
    """The tokens of a block that lie in ``[start, end)``, and 0 for the others."""
    offsets = base + tl.arange(0, BLOCK)
    if (base >= start) & (base + BLOCK <= end):
        block = tl.load(ptr + offsets)
    else:
        block = tl.load(ptr + offsets, mask=(offsets >= start) & (offsets < end), other=0)
    return block


@triton.jit
def load_trained(mask_ptr, base, start, end, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of a block that train."""
    offsets = base + tl.arange(0, BLOCK)
    trained = (offsets >= start) & (offsets < end)
    if HAS_MASK:
        trained = trained & (load_block(mask_ptr, base, start, end, BLOCK) != 0)
    return trained


@triton.jit(do_not_specialize=["width"])
def sum_kernel(
    rewards_ptr, mask_ptr, starts_ptr, lengths_ptr, sums_ptr,
    width,
    PACKED: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, end = row_bounds(starts_ptr, width, row, PACKED)
    if HAS_LENGTHS:
        length = tl.load(lengths_ptr + row).to(tl.int64)
        end = start + tl.minimum(tl.maximum(length, 0), end - start)
    total = tl.zeros([BLOCK], tl.float64)
    for base in range(start // BLOCK * BLOCK, end, BLOCK):
        base = tl.multiple_of(base, 16)
        rewards = load_block(rewards_ptr, base, start, end, BLOCK).to(tl.float32)
        trained = load_trained(mask_ptr, base, start, end, HAS_MASK, BLOCK)
        total += tl.where(trained, rewards, 0.0).to(tl.float64)
    tl.store(sums_ptr + row, tl.sum(total, axis=0).to(tl.float32))


@triton.jit
def compose(behind_factor, behind, factor, constant):
    """``R = constant + factor * R'`` composed with that of the later tokens, which a reversed scan passes first."""
    return factor * behind_factor, constant + factor.to(tl.float64) * behind


@triton.jit(do_not_specialize=["width", "gamma"])
def returns_kernel(
    rewards_ptr, mask_ptr, starts_ptr, returns_ptr,
    width, gamma,
    PACKED: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, end = row_bounds(starts_ptr, width, row, PACKED)
    first = start // BLOCK * BLOCK
    blocks = (end - first + BLOCK - 1) // BLOCK
    carry = tl.sum(tl.zeros([BLOCK], tl.float64), axis=0)
    for k in range(0, blocks):
        base = tl.multiple_of(first + (blocks - 1 - k) * BLOCK, 16)
        rewards = load_block(rewards_ptr, base, start, end, BLOCK).to(tl.float32)
        trained = load_trained(mask_ptr, base, start, end, HAS_MASK, BLOCK)
        # A masked token passes on what follows it: factor 1, constant 0.
        factor = tl.where(trained, gamma, 1.0).to(tl.float32)
        constant = tl.where(trained, rewards, 0.0).to(tl.float64)
        factor, constant = tl.associative_scan((factor, constant), 0, compose, reverse=True)
        result = constant + factor.to(tl.float64) * carry
        offsets = base + tl.arange(0, BLOCK)
        inside = (offsets >= start) & (offsets < end)
        tl.store(returns_ptr + offsets, tl.where(trained, result, 0.0).to(tl.float32), mask=inside)
        # The row's first block may begin before the row; nothing reads its carry.
        carry = tl.sum(tl.where(offsets == base, result, 0.0), axis=0)


@triton.jit
def compose_gae(
    behind_by_returns, behind_by_value, behind, behind_value, behind_has, by_returns, by_value, constant, value, has
):
    """``R = constant + by_returns * R' + by_value * V'`` and ``V = value if has else V'``, composed with those of the
    later tokens, which a reversed scan passes first."""
    has_value = behind_has != 0
    constant += by_returns.to(tl.float64) * behind
    constant += tl.where(has_value, by_value * behind_value, 0.0).to(tl.float64)
    by_value = by_returns * behind_by_value + tl.where(has_value, 0.0, by_value)
    value = tl.where(has != 0, value, behind_value)
    return by_returns * behind_by_returns, by_value, constant, value, has | behind_has


@triton.jit(do_not_specialize=["width", "by_returns", "by_value"])
def gae_kernel(
    rewards_ptr, mask_ptr, starts_ptr, values_ptr, advantages_ptr, returns_ptr,
    width, by_returns, by_value,
    PACKED: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, end = row_bounds(starts_ptr, width, row, PACKED)
    first = start // BLOCK * BLOCK
    blocks = (end - first + BLOCK - 1) // BLOCK
    # Return and value of the trained token that follows the block, carried from one block to the one before it.
    carry = tl.sum(tl.zeros([BLOCK], tl.float64), axis=0)
    carried = tl.sum(tl.zeros([BLOCK], tl.float32), axis=0)
    for k in range(0, blocks):
        base = tl.multiple_of(first + (blocks - 1 - k) * BLOCK, 16)
        rewards = load_block(rewards_ptr, base, start, end, BLOCK).to(tl.float32)
        values = load_block(values_ptr, base, start, end, BLOCK).to(tl.float32)
        trained = load_trained(mask_ptr, base, start, end, HAS_MASK, BLOCK)
        # A masked token passes on what follows it: factor 1, no weight, no constant.
        values = tl.where(trained, values, 0.0)
        factor = tl.where(trained, by_returns, 1.0).to(tl.float32)
        weight = tl.where(trained, by_value, 0.0).to(tl.float32)
        constant = tl.where(trained, rewards, 0.0).to(tl.float64)
        factor, weight, constant, value, _ = tl.associative_scan(
            (factor, weight, constant, values, trained.to(tl.int32)), 0, compose_gae, reverse=True
        )
        result = constant + factor.to(tl.float64) * carry + weight.to(tl.float64) * carried.to(tl.float64)
        offsets = base + tl.arange(0, BLOCK)
        inside = (offsets >= start) & (offsets < end)
        advantages = tl.where(trained, result - values.to(tl.float64), 0.0)
        tl.store(returns_ptr + offsets, tl.where(trained, result, 0.0).to(tl.float32), mask=inside)
        tl.store(advantages_ptr + offsets, advantages.to(tl.float32), mask=inside)
        here = offsets == base  # the row's first block may begin before the row; nothing reads its carry
        carry = tl.sum(tl.where(here, result, 0.0), axis=0)
        any_trained = tl.max(trained.to(tl.int32), axis=0)
        carried = tl.where(any_trained != 0, tl.sum(tl.where(here, value, 0.0), axis=0), carried)


def launch_by_row(
    kernel: Any,
    block: int,
    rewards: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    tensors: Sequence[Tensor],
    numbers: Sequence[float] = (),
    **flags: bool,
) -> None:
    """Launch one program per row, or nothing if there are no rows.

    A kernel takes rewards, mask and boundaries (any pointer for one that is not given), then ``tensors``, the width of
    a row and ``numbers``. All tensors are contiguous; the mask is bytes or float32.
    """
    rows = row_count(rewards, cu_seqlens)
    if rows == 0:
        return
    on = mask.view(torch.uint8) if mask is not None and mask.dtype is torch.bool else mask
    with torch.cuda.device_of(rewards):  # the width of packed streams is their number of tokens
        kernel[(rows,)](
            rewards, rewards if on is None else on, rewards if cu_seqlens is None else cu_seqlens, *tensors,
            rewards.shape[-1], *numbers,
            PACKED=cu_seqlens is not None, HAS_MASK=mask is not None, BLOCK=block, **flags, **FUSED,
        )  # fmt: skip


def token_reward_sum(
    rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, lengths: Tensor | None, sums: Tensor
) -> None:
    """Launch the sum kernel on inputs in the form that ``launch_by_row`` takes."""
    tensors = (sums if lengths is None else lengths, sums)
    launch_by_row(sum_kernel, SUM_BLOCK, rewards, mask, cu_seqlens, tensors, HAS_LENGTHS=lengths is not None)


def token_returns(
    rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, gamma: float, returns: Tensor
) -> None:
    """Launch the returns kernel on inputs in the form that ``launch_by_row`` takes."""
    launch_by_row(returns_kernel, SCAN_BLOCK, rewards, mask, cu_seqlens, (returns,), (gamma,))


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
) -> None:
    """Launch the kernel on inputs in the form that ``launch_by_row`` takes."""
    tensors = (values, advantages, returns)
    numbers = (gamma * lam, gamma * (1 - lam))
    launch_by_row(gae_kernel, SCAN_BLOCK, rewards, mask, cu_seqlens, tensors, numbers)


# ---------------------------------------------------------------------------------------------------------------------
# Cases to compile ahead of time
# ---------------------------------------------------------------------------------------------------------------------
def row_case(kernel: Any, dtype: str, mask: str, **constants: Any) -> CompileCase:
    """Describe a kernel as ``launch_by_row`` launches it, with streams of ``dtype`` and a mask of type ``mask``."""
    types = {"rewards_ptr": f"*{dtype}", "values_ptr": f"*{dtype}", "mask_ptr": f"*{mask}", "width": "i32"}
    types |= {"starts_ptr": "*i64", "lengths_ptr": "*i64", **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, "*fp32" if name.endswith("_ptr") else "fp32") for name in kernel.arg_names}
    aligned = tuple(name for name in signature if name.endswith("_ptr"))
    return CompileCase(kernel, signature, constants, aligned, ("ld.global.v4",), FUSED)


def _cases() -> Iterator[CompileCase]:
    for dtype in ("fp32", "bf16", "fp16"):
        for mask, packed in (("u8", False), ("fp32", True)):
            flags = {"PACKED": packed, "HAS_MASK": True}
            yield row_case(sum_kernel, dtype, mask, **flags, HAS_LENGTHS=False, BLOCK=2048)
            yield row_case(returns_kernel, dtype, mask, **flags, BLOCK=1024)
        yield row_case(sum_kernel, dtype, "u8", PACKED=False, HAS_MASK=False, HAS_LENGTHS=True, BLOCK=2048)
    for dtype, mask, packed in (("fp32", "u8", False), ("bf16", "fp32", True), ("fp16", "u8", True)):
        yield row_case(gae_kernel, dtype, mask, PACKED=packed, HAS_MASK=True, BLOCK=1024)


COMPILE_CASES = list(_cases())
