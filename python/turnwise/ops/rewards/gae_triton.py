"""Triton kernel for generalised advantages. Each program handles one row, block by block from the row's end."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from turnwise.ops.rewards.triton import SCAN_BLOCK, launch_by_row, load_block, load_trained, row_bounds, row_case


@triton.jit
def compose(
    behind_by_returns, behind_by_value, behind, behind_value, behind_has, by_returns, by_value, constant, value, has
):
    """``R = constant + by_returns * R' + by_value * V'`` and ``V = value if has else V'``, after the same of the tokens
    behind, which a reversed scan hands over first."""
    known = behind_has != 0
    constant += by_returns.to(tl.float64) * behind
    constant += tl.where(known, by_value * behind_value, 0.0).to(tl.float64)
    by_value = by_returns * behind_by_value + tl.where(known, 0.0, by_value)
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
        # A masked token hands on what follows it: factor 1, no weight, no constant.
        values = tl.where(trained, values, 0.0)
        factor = tl.where(trained, by_returns, 1.0).to(tl.float32)
        weight = tl.where(trained, by_value, 0.0).to(tl.float32)
        constant = tl.where(trained, rewards, 0.0).to(tl.float64)
        factor, weight, constant, value, _ = tl.associative_scan(
            (factor, weight, constant, values, trained.to(tl.int32)), 0, compose, reverse=True
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


COMPILE_CASES = [
    row_case(gae_kernel, dtype, mask, PACKED=packed, HAS_MASK=True, BLOCK=1024)
    for dtype, mask, packed in (("fp32", "u8", False), ("bf16", "fp32", True), ("fp16", "u8", True))
]
