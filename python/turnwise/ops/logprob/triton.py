"""Triton kernels over rows of logits: scan a row, finish its results, compute its gradient.

The scan runs one program per row. Sums are float32 within a row or a split of it, relative to its maximum. They are
combined in float64 in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.ops.common.dispatch import interpreted
from turnwise.ops.common.triton import FUSED, CompileCase
from turnwise.ops.logprob.tiles import IGNORE_NONE, Tile, Upstream

ROW_BLOCK = 128 if interpreted else 4096
FINISH_BLOCK = 32 if interpreted else 128
LEAST = tl.constexpr(-87.0)  # exp of anything below counts as 0, as in csrc/ops/logprob_math.h


@triton.jit
def bounded_exp(x):
    """exp(x) for logits relative to about the largest, and x bounded below."""
    log = tl.where(x < LEAST, LEAST, x)
    return tl.where(x < LEAST, 0.0, tl.exp(log)), log


@triton.jit
def add_logits(x, top, total, weighted, ENTROPY: tl.constexpr):
    """Adds logits ``x [rows, columns]`` to the running statistics of their rows, ``[rows]`` each."""
    largest = tl.maximum(top, tl.max(x, axis=1))
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    shift = tl.where(top == float("-inf"), 0.0, top - reference)
    factor = tl.exp(shift)
    value, log = bounded_exp(x - reference[:, None])
    if ENTROPY:
        weighted = factor * (weighted + shift * total) + tl.sum(value * log, axis=1)
    total = factor * total + tl.sum(value, axis=1)
    return largest, total, weighted


@triton.jit
def tanh(z):
    """tanh to 1e-7, as in csrc/ops/logprob_math.h: a polynomial near 0, where the quotient loses its leading digits."""
    e = tl.exp(-2.0 * tl.abs(z))
    quotient = (1.0 - e) / (1.0 + e)
    w = z * z
    p = ((-0.006104961 * w + 0.021003652) * w - 0.053852502) * w + 0.13332783
    p = p * w - 0.33333328
    return tl.where(tl.abs(z) < 0.625, z + z * (w * p), tl.where(z < 0, -quotient, quotient))


@triton.jit
def scaled_logits(x, scale, cap, HAS_CAP: tl.constexpr):
    """The capped and scaled logits."""
    if HAS_CAP:
        x = cap * tanh(x / cap)
    return x * scale


@triton.jit
def load_logits(
    row_ptr, bias_ptr, begin, width, scale, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of a row's logits; -inf beyond its end. Whole blocks load without a mask, 16 bytes at a time."""
    columns = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= width:
        x = tl.load(row_ptr + columns).to(tl.float32)
    else:
        x = tl.load(row_ptr + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=columns < width, other=0.0)
    x = scaled_logits(x, scale, cap, HAS_CAP)
    return tl.where(columns < width, x, float("-inf")) if HAS_CAP else x


@triton.jit(do_not_specialize=["width", "scale", "cap", "ignore", "rows"])
def scan_kernel(
    logits_ptr, bias_ptr, targets_ptr, state_ptr,
    row_stride, target_stride,
    width, scale, cap, ignore, rows,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_IGNORE: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row * target_stride).to(tl.int64)
    one = tl.arange(0, 1)
    if HAS_IGNORE:  # noqa: SIM102 -- a compile-time branch around one at run time
        if target == ignore:  # one token of probability 1, the target
            tl.store(state_ptr + row + one, tl.zeros([1], tl.float32))
            tl.store(state_ptr + rows + row + one, tl.full([1], 1.0, tl.float32))
            tl.store(state_ptr + 2 * rows + row + one, tl.zeros([1], tl.float32))
            tl.store(state_ptr + 3 * rows + row + one, tl.zeros([1], tl.float32))
            return
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1], tl.float32)
    for begin in range(0, width, BLOCK):
        x = load_logits(logits_ptr + row * row_stride, bias_ptr, begin, width, scale, cap, HAS_BIAS, HAS_CAP, BLOCK)
        top, total, weighted = add_logits(x[None, :], top, total, weighted, ENTROPY)
    # The target's logit is NaN if another rank, or another split, holds it; `finish` takes the one that is not NaN.
    here = (target >= 0) & (target < width)
    picked = tl.load(logits_ptr + row * row_stride + target, mask=here, other=float("nan")).to(tl.float32)
    if HAS_BIAS:
        picked += tl.load(bias_ptr + target, mask=here, other=0.0)
    tl.store(state_ptr + row + one, top)
    tl.store(state_ptr + rows + row + one, total)
    tl.store(state_ptr + 2 * rows + row + one, weighted)
    tl.store(state_ptr + 3 * rows + row, scaled_logits(picked, scale, cap, HAS_CAP))


@triton.jit(do_not_specialize=["splits", "rows"])
def finish_kernel(
    state_ptr, logprob_ptr, lse_ptr, entropy_ptr, splits, rows, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """States ``[splits, 4, rows]`` to the results, in the order of the splits."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    top = tl.full([BLOCK], float("-inf"), tl.float64)
    for split in range(0, splits):
        part = tl.load(state_ptr + split * 4 * rows + row, mask=inside, other=float("-inf")).to(tl.float64)
        top = tl.maximum(top, part)
    reference = tl.where(top == float("-inf"), 0.0, top)
    # Combine the splits, each shifted from its own maximum to that of the row.
    total = tl.zeros([BLOCK], tl.float64)
    weighted = tl.zeros([BLOCK], tl.float64)
    picked = tl.full([BLOCK], float("nan"), tl.float64)
    for split in range(0, splits):
        base = state_ptr + split * 4 * rows + row
        part = tl.load(base, mask=inside, other=float("-inf")).to(tl.float64)
        some = tl.load(base + rows, mask=inside, other=0.0).to(tl.float64)
        shift = tl.where(part == float("-inf"), 0.0, part - reference)
        factor = tl.exp(shift)
        total += factor * some
        if ENTROPY:
            products = tl.load(base + 2 * rows, mask=inside, other=0.0).to(tl.float64)
            weighted += factor * (products + shift * some)
        candidate = tl.load(base + 3 * rows, mask=inside, other=float("nan")).to(tl.float64)
        picked = tl.where(candidate == candidate, candidate, picked)
    log = tl.log(total)
    tl.store(logprob_ptr + row, (picked - (reference + log)).to(tl.float32), mask=inside)
    tl.store(lse_ptr + row, (reference + log).to(tl.float32), mask=inside)
    if ENTROPY:
        tl.store(entropy_ptr + row, (log - weighted / total).to(tl.float32), mask=inside)


@triton.jit
def logit_gradient(
    x, hit, lse, grad_logprob, entropy, grad_entropy, scale, cap, HAS_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr
):
    """The gradient of logits ``x [rows, columns]`` before their scaling; ``hit``: the target's column."""
    p, log = bounded_exp(x - lse[:, None])
    flat = -scale * grad_logprob
    if HAS_ENTROPY:
        flat -= scale * grad_entropy * entropy
        d = p * (flat[:, None] - (scale * grad_entropy)[:, None] * log)
        unused = (grad_logprob == 0) & (grad_entropy == 0)
    else:
        d = p * flat[:, None]
        unused = grad_logprob == 0
    d += tl.where(hit, (scale * grad_logprob)[:, None], 0.0)
    if HAS_CAP:  # times 1 - tanh^2
        t = x / (scale * cap)
        d *= 1.0 - t * t
    return tl.where(unused[:, None], 0.0, d)  # exactly 0 for a token that does not train, even if its logits are NaN


@triton.jit(do_not_specialize=["width", "scale", "cap", "ignore"])
def grad_kernel(
    logits_ptr, bias_ptr, targets_ptr, lse_ptr, grad_logprob_ptr, entropy_ptr, grad_entropy_ptr, out_ptr,
    row_stride, target_stride, out_stride,
    width, scale, cap, ignore,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_IGNORE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``WHOLE``: a program takes a whole row, as ``out`` is the first half of each row of wider logits. Then all logits
    of a block are read before its gradient is written. Else it takes one block."""
    row = tl.program_id(0).to(tl.int64)
    one = row + tl.arange(0, 1)
    first = tl.program_id(1) * BLOCK
    last = width if WHOLE else first + BLOCK
    target = tl.load(targets_ptr + row * target_stride).to(tl.int64)
    entropy = tl.load(entropy_ptr + one) if HAS_ENTROPY else tl.zeros([1], tl.float32)
    grad_entropy = tl.load(grad_entropy_ptr + one) if HAS_ENTROPY else tl.zeros([1], tl.float32)
    lse, grad_logprob = tl.load(lse_ptr + one), tl.load(grad_logprob_ptr + one)
    for begin in range(first, last, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = load_logits(logits_ptr + row * row_stride, bias_ptr, begin, width, scale, cap, HAS_BIAS, HAS_CAP, BLOCK)
        if WHOLE:
            tl.debug_barrier()
        d = logit_gradient(
            x[None, :], (columns == target)[None, :], lse, grad_logprob, entropy, grad_entropy, scale, cap,
            HAS_ENTROPY, HAS_CAP,
        )  # fmt: skip
        if HAS_IGNORE:
            d = tl.where(target == ignore, 0.0, d)
        d = tl.reshape(d, [BLOCK]).to(out_ptr.dtype.element_ty)
        if begin + BLOCK <= width:
            tl.store(out_ptr + row * out_stride + columns, d)
        else:
            tl.store(out_ptr + row * out_stride + columns, d, mask=columns < width)


def flags(cap: float, ignore: int) -> dict[str, bool]:
    return {"HAS_CAP": cap > 0, "HAS_IGNORE": ignore != IGNORE_NONE}


def log_softmax(tile: Tile, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy`` of a tile that holds whole rows."""
    return finish(scan(tile, entropy), entropy)


def scan(tile: Tile, entropy: bool) -> Tensor:
    """Compute the states ``[1, 4, n]`` float32 of a tile's rows."""
    rows, width = tile.logits.shape
    state = torch.empty((1, 4, rows), dtype=torch.float32, device=tile.logits.device)
    if rows:
        with torch.cuda.device_of(tile.logits):
            scan_kernel[(rows,)](
                tile.logits, tile.logits if tile.bias is None else tile.bias, tile.targets, state,
                tile.logits.stride(0), tile.targets.stride(0), width,
                *(tile.scale, tile.cap, tile.ignore, rows),
                HAS_BIAS=tile.bias is not None, **flags(tile.cap, tile.ignore), ENTROPY=entropy, BLOCK=ROW_BLOCK,
                num_warps=8, **FUSED,
            )  # fmt: skip
    return state


def finish(state: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy [n]`` (``[0]`` if not requested) from float32 ``[splits, 4, n]``."""
    splits, _, rows = state.shape
    logprob, lse, entropies = (state.new_empty(size) for size in (rows, rows, rows if entropy else 0))
    if rows:
        grid = (triton.cdiv(rows, FINISH_BLOCK),)
        with torch.cuda.device_of(state):
            finish_kernel[grid](
                state, logprob, lse, entropies, splits, rows, ENTROPY=entropy, BLOCK=FINISH_BLOCK, num_warps=4, **FUSED
            )
    return logprob, lse, entropies


def grad(tile: Tile, upstream: Upstream, out: Tensor) -> None:
    """Write the gradient of a tile's logits into ``out``, which may be the logits, or the first half of their rows."""
    rows, width = tile.logits.shape
    if not rows:
        return
    whole = out.dtype is not tile.logits.dtype and out.data_ptr() == tile.logits.data_ptr()
    lse, grad_logprob, entropy, grad_entropy = (None if u is None else u.contiguous() for u in upstream)
    with torch.cuda.device_of(tile.logits):
        grad_kernel[(rows, 1 if whole else triton.cdiv(width, ROW_BLOCK))](
            tile.logits, tile.logits if tile.bias is None else tile.bias, tile.targets, lse, grad_logprob,
            lse if entropy is None else entropy, lse if grad_entropy is None else grad_entropy, out,
            tile.logits.stride(0), tile.targets.stride(0), out.stride(0), width,
            *(tile.scale, tile.cap, tile.ignore),
            HAS_BIAS=tile.bias is not None, **flags(tile.cap, tile.ignore), HAS_ENTROPY=entropy is not None,
            WHOLE=whole, BLOCK=ROW_BLOCK, num_warps=8, **FUSED,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Cases to compile ahead of time
# ---------------------------------------------------------------------------------------------------------------------
def _case(kernel: Any, pointers: dict[str, str], **flags: Any) -> CompileCase:
    types = {"scale": "fp32", "cap": "fp32", "ignore": "i64"}
    signature = {**{name: types.get(name, "i32") for name in kernel.arg_names}, **pointers}
    signature.update(dict.fromkeys(flags, "constexpr"))
    aligned = tuple(name for name in signature if name.endswith("_ptr") or name in ("row_stride", "out_stride"))
    wide = ("ld.global.v4", "st.global.v4") if kernel is grad_kernel else ("ld.global.v4",)
    instructions = wide if kernel is not finish_kernel else ()
    return CompileCase(
        kernel, signature, flags, aligned, instructions, {"num_warps": 4 if kernel is finish_kernel else 8, **FUSED}
    )


def _cases() -> Iterator[CompileCase]:
    flags: dict[str, Any]
    for t, bias, entropy, cap in (
        ("fp32", False, False, False),
        ("bf16", False, True, False),
        ("fp16", True, False, False),
        ("bf16", False, True, True),
    ):
        pointers = {"logits_ptr": f"*{t}", "bias_ptr": "*fp32", "targets_ptr": "*i64", "state_ptr": "*fp32"}
        flags = {"HAS_BIAS": bias, "HAS_CAP": cap, "HAS_IGNORE": cap, "ENTROPY": entropy}
        yield _case(scan_kernel, pointers, **flags, BLOCK=4096)
    for t, entropy, cap, whole in (
        ("fp32", False, False, False),
        ("bf16", True, False, False),
        ("bf16", True, True, False),
        ("bf16", False, False, True),
    ):
        pointers = {"logits_ptr": "*fp32" if whole else f"*{t}", "out_ptr": f"*{t}", "targets_ptr": "*i64"}
        pointers |= {f"{name}_ptr": "*fp32" for name in ("bias", "lse", "grad_logprob", "entropy", "grad_entropy")}
        flags = {"HAS_BIAS": False, "HAS_CAP": cap, "HAS_IGNORE": cap, "HAS_ENTROPY": entropy, "WHOLE": whole}
        yield _case(grad_kernel, pointers, **flags, BLOCK=4096)
    pointers = {f"{name}_ptr": "*fp32" for name in ("state", "logprob", "lse", "entropy")}
    yield _case(finish_kernel, pointers, ENTROPY=True, BLOCK=128)


COMPILE_CASES = list(_cases())
