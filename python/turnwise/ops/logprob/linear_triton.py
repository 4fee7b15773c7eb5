"""Triton kernels of the LM head: products on the tensor cores, with the softmax in the same kernel.

Forward: a program handles some tokens and one split of the vocabulary, and keeps only the softmax state of each tile of
logits. The splits are combined in a fixed order. Backward: a program recomputes a tile of logits and writes only their
gradient.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.ops.common.dispatch import interpreted
from turnwise.ops.common.triton import FUSED, CompileCase
from turnwise.ops.logprob.choice import device_of, tf32_allowed
from turnwise.ops.logprob.tiles import Softmax, Upstream
from turnwise.ops.logprob.triton import add_logits, flags, logit_gradient, scaled_logits


class Shape(NamedTuple):
    """Tokens, columns and depth of one step of a product, and how float32 is multiplied."""

    rows: int
    columns: int
    depth: int
    precision: str = "ieee"


OPTIONS = {"num_warps": 8, "num_stages": 3, **FUSED}
NARROW = Shape(128, 128, 64)  # three stages in shared memory keep a wgmma busy
# Three TF32 products keep 22 bits of each factor. Their parts take registers: on mma.sync for a narrower tile alone.
WGMMA, MMA = Shape(128, 128, 32, "tf32x3"), Shape(128, 64, 32, "tf32x3")


def _shape(hidden: Tensor) -> Shape:
    if interpreted:
        return Shape(16, 32, 16)
    if hidden.dtype is not torch.float32:
        return NARROW
    shape = WGMMA if device_of(hidden).capability[0] in (9, 10) else MMA
    return shape._replace(precision="tf32") if tf32_allowed() else shape


@triton.jit
def product(
    hidden_ptr, weight_ptr, bias_ptr, source, inside, columns, vocabulary, width, hidden_stride, weight_stride,
    HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``hidden[source] @ weight[columns].T + bias[columns]``, float32. ``ALIGNED``: ``DEPTH`` divides the width."""
    rows = tl.where(inside, source, 0)  # a token beyond the end reads the first row; its result is dropped
    names = tl.minimum(columns, vocabulary - 1).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, width, DEPTH):
        depth = begin + tl.arange(0, DEPTH)
        left = hidden_ptr + rows[:, None] * hidden_stride + depth[None, :]
        right = weight_ptr + names[None, :] * weight_stride + depth[:, None]
        if ALIGNED:
            a, b = tl.load(left), tl.load(right)
        else:
            a = tl.load(left, mask=depth[None, :] < width, other=0.0)
            b = tl.load(right, mask=depth[:, None] < width, other=0.0)
        if WIDEN:  # tl.dot of the interpreter is wrong for bf16
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns < vocabulary, other=0.0)[None, :]
    return total


@triton.jit(do_not_specialize=["tokens", "vocabulary", "tiles", "scale", "cap", "ignore"])
def forward_kernel(
    hidden_ptr, weight_ptr, bias_ptr, targets_ptr, positions_ptr, state_ptr,
    hidden_stride, weight_stride, target_stride,
    tokens, vocabulary, width, tiles, scale, cap, ignore,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_IGNORE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    ENTROPY: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    split = tl.program_id(1)
    source = tl.load(positions_ptr + token, mask=inside, other=0).to(tl.int64) if HAS_POSITIONS else token
    target = tl.load(targets_ptr + token * target_stride, mask=inside, other=-1).to(tl.int64)
    # Softmax state of each token over this split: maximum, sum, weighted sum for the entropy, target's logit.
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    picked = tl.full([ROWS], float("nan"), tl.float32)
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(vocabulary, COLUMNS))):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        x = product(
            hidden_ptr, weight_ptr, bias_ptr, source, inside, columns, vocabulary, width, hidden_stride, weight_stride,
            HAS_BIAS, ALIGNED, PRECISION, WIDEN, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        x = tl.where((columns < vocabulary)[None, :], scaled_logits(x, scale, cap, HAS_CAP), float("-inf"))
        hit = (columns[None, :] == target[:, None]) & (columns < vocabulary)[None, :]
        here = tl.max(hit.to(tl.int32), axis=1) != 0
        picked = tl.where(here, tl.sum(tl.where(hit, x, 0.0), axis=1), picked)
        top, total, weighted = add_logits(x, top, total, weighted, ENTROPY)
    if HAS_IGNORE:  # one token of probability 1, the target, in the first split alone
        ignored = target == ignore
        here = ignored & (split == 0)
        top = tl.where(ignored, tl.where(here, 0.0, float("-inf")), top)
        total = tl.where(ignored, tl.where(here, 1.0, 0.0), total)
        weighted = tl.where(ignored, 0.0, weighted)
        picked = tl.where(ignored, 0.0, picked)
    base = state_ptr + split.to(tl.int64) * 4 * tokens + token
    tl.store(base, top, mask=inside)
    tl.store(base + tokens, total, mask=inside)
    tl.store(base + 2 * tokens, weighted, mask=inside)
    tl.store(base + 3 * tokens, picked, mask=inside)


@triton.jit(do_not_specialize=["tokens", "vocabulary", "scale", "cap", "ignore"])
def backward_kernel(
    hidden_ptr, weight_ptr, bias_ptr, targets_ptr, lse_ptr, grad_logprob_ptr, entropy_ptr, grad_entropy_ptr, out_ptr,
    hidden_stride, weight_stride, target_stride, out_stride,
    tokens, vocabulary, width, scale, cap, ignore,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_IGNORE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits of all given tokens and ``vocabulary`` columns."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = product(
        hidden_ptr, weight_ptr, bias_ptr, token, inside, columns, vocabulary, width, hidden_stride, weight_stride,
        HAS_BIAS, ALIGNED, PRECISION, WIDEN, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    target = tl.load(targets_ptr + token * target_stride, mask=inside, other=-1).to(tl.int64)
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + token, mask=inside, other=0.0)
        grad_entropy = tl.load(grad_entropy_ptr + token, mask=inside, other=0.0)
    else:
        entropy = tl.zeros([ROWS], tl.float32)
        grad_entropy = entropy
    d = logit_gradient(
        scaled_logits(x, scale, cap, HAS_CAP),
        columns[None, :] == target[:, None],
        tl.load(lse_ptr + token, mask=inside, other=0.0),
        tl.load(grad_logprob_ptr + token, mask=inside, other=0.0),
        entropy,
        grad_entropy,
        scale,
        cap,
        HAS_ENTROPY,
        HAS_CAP,
    )
    if HAS_IGNORE:
        d = tl.where((target == ignore)[:, None], 0.0, d)
    to = out_ptr + token[:, None] * out_stride + columns[None, :]
    tl.store(to, d.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < vocabulary)[None, :])


def _flags(hidden: Tensor, bias: Tensor | None, softmax: Softmax) -> dict[str, Any]:
    shape = _shape(hidden)
    return {
        "HAS_BIAS": bias is not None,
        **flags(*softmax.columns[1:]),
        "ALIGNED": hidden.shape[1] % shape.depth == 0,
        "PRECISION": shape.precision,
        "WIDEN": interpreted,
        "ROWS": shape.rows,
        "COLUMNS": shape.columns,
        "DEPTH": shape.depth,
        **OPTIONS,
    }


def _rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _splits(blocks: int, tiles: int, device: torch.device) -> int:
    """The number of splits of the vocabulary. With few tokens it gives two waves of programs with a few tiles each."""
    if device.type != "cuda":
        return min(3, tiles)
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(triton.cdiv(wanted, blocks), triton.cdiv(tiles, 4)))


def scan(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    softmax: Softmax,
    entropy: bool,
) -> Tensor:
    """Compute the softmax states ``[splits, 4, tokens]`` float32, for ``finish``. ``bias`` is float32."""
    tokens, vocabulary = targets.shape[0], weight.shape[0]
    hidden, weight = _rows(hidden), _rows(weight)
    shape = _shape(hidden)
    blocks, tiles = triton.cdiv(tokens, shape.rows), triton.cdiv(vocabulary, shape.columns)
    each = triton.cdiv(tiles, _splits(max(blocks, 1), tiles, hidden.device))
    splits = triton.cdiv(tiles, each)
    state = torch.empty((splits, 4, tokens), dtype=torch.float32, device=hidden.device)
    if tokens:
        with torch.cuda.device_of(hidden):
            forward_kernel[(blocks, splits)](
                hidden, weight, hidden if bias is None else bias, targets,
                targets if positions is None else positions.contiguous(), state, hidden.stride(0), weight.stride(0),
                targets.stride(0), tokens, vocabulary, hidden.shape[1], *(each, *softmax.columns),
                HAS_POSITIONS=positions is not None, ENTROPY=entropy, **_flags(hidden, bias, softmax),
            )  # fmt: skip
    return state


def logit_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softmax: Softmax,
    upstream: Upstream,
) -> Tensor:
    """Compute the gradient ``[n, v]`` of the logits of ``hidden [n, H]`` and rows ``weight [v, H]``, in their dtype."""
    hidden, weight = _rows(hidden), _rows(weight)
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    shape = _shape(hidden)
    out = torch.empty((tokens, vocabulary), dtype=weight.dtype, device=weight.device)
    lse, grad_logprob, entropy, grad_entropy = (None if u is None else u.contiguous() for u in upstream)
    with torch.cuda.device_of(hidden):
        backward_kernel[(triton.cdiv(tokens, shape.rows), triton.cdiv(vocabulary, shape.columns))](
            hidden, weight, hidden if bias is None else bias, targets, lse, grad_logprob,
            lse if entropy is None else entropy, lse if grad_entropy is None else grad_entropy, out, hidden.stride(0),
            weight.stride(0), targets.stride(0), out.stride(0), tokens, vocabulary, hidden.shape[1],
            *softmax.columns,
            HAS_ENTROPY=entropy is not None, **_flags(hidden, bias, softmax),
        )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Cases to compile ahead of time
# ---------------------------------------------------------------------------------------------------------------------
def _case(kernel: Any, dtype: str, shape: Shape, **flags: Any) -> CompileCase:
    types = {"scale": "fp32", "cap": "fp32", "ignore": "i64"}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature |= {name: "*fp32" for name in signature if name.endswith("_ptr")}
    signature |= {"hidden_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "targets_ptr": "*i64"}
    others = {"positions_ptr": "*i64", "out_ptr": f"*{dtype}"}
    signature |= {name: type_ for name, type_ in others.items() if name in signature}
    sizes = {"ROWS": shape.rows, "COLUMNS": shape.columns, "DEPTH": shape.depth}
    constants = {**flags, "PRECISION": shape.precision, "WIDEN": False, "ALIGNED": True, **sizes}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = tuple(
        n for n in signature if n.endswith("_ptr") or n in ("hidden_stride", "weight_stride", "out_stride", "width")
    )
    return CompileCase(kernel, signature, constants, aligned, ("wgmma", "cp.async"), OPTIONS)


def _cases() -> Iterator[CompileCase]:
    shapes = (("bf16", NARROW, False), ("fp16", NARROW, False), ("fp32", WGMMA, False), ("fp32", MMA, False))
    for dtype, shape, capped in (*shapes, ("bf16", NARROW, True)):
        flags = {"HAS_CAP": capped, "HAS_IGNORE": capped}
        yield _case(forward_kernel, dtype, shape, HAS_BIAS=True, HAS_POSITIONS=False, ENTROPY=True, **flags)
        yield _case(backward_kernel, dtype, shape, HAS_BIAS=False, HAS_ENTROPY=True, **flags)


COMPILE_CASES = list(_cases())
