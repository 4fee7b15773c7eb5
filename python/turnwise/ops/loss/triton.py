"""The policy loss in Triton: loss, gradient and metrics in one pass over the tokens.

A call with few actors makes at most three launches. The first counts the tokens of the batch (integer atomics) and
computes terms of each row; it runs only if a token's weight or loss needs them. The second is the pass itself, whose
programs each write one slot of sums. The third sums the slots in a fixed order. With many actors PyTorch sorts the
slots by actor first, and a program reads those of its actor only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from turnwise.ops.common.dispatch import interpreted
from turnwise.ops.common.layout import Streams, row_count
from turnwise.ops.common.triton import CompileCase
from turnwise.ops.loss import triton_finish as last
from turnwise.ops.loss import triton_kernels as k
from turnwise.ops.loss.aggregation import AgentMean, SeqMeanTokenMean, SeqMeanTokenSumNorm, TokenMean
from turnwise.ops.loss.options import GMPO, GSPO
from turnwise.ops.loss.reference import metric_names
from turnwise.ops.loss.triton_math import K3, SEQUENCE

# Tiles are small in the interpreter, so that small test cases have several.
_BLOCKS = (256, 128, 64) if interpreted else (2048, 1024, 512)
_COUNT_BLOCK = 64 if interpreted else 16384
_FINISH_BLOCK = 32 if interpreted else 512
_FINISH_WARPS, _COUNT_WARPS = 16, 8
_ACTOR_BLOCK, _ACTOR_WARPS = 32, 1  # of the slots of one of many actors
_MANY_ACTORS = 4 if interpreted else 32  # more than these are many


def _warps(block: int, few: bool = False) -> int:
    """Warps for 8 tokens a thread, or 16 if there are few streams. More would leave no room for other programs."""
    return max(1, block // (512 if few else 256))


def _tile(width: int) -> int:
    """The largest of three tiles that wastes little of a row. Only three, so that new lengths rarely recompile."""
    for block in _BLOCKS:
        if triton.cdiv(width, block) * block <= width * 1.125:
            return block
    return _BLOCKS[-1]


def _bytes(flags: Tensor | None) -> Tensor | None:
    return flags.view(torch.uint8) if flags is not None and flags.dtype is torch.bool else flags


def _strides(stream: Tensor | None) -> tuple[int, int]:
    """Strides of rows and of tokens within a row. A contiguous tensor may have any stride along an axis of size 1."""
    if stream is None:
        return 0, 1
    if stream.is_contiguous():
        return stream.shape[-1], 1
    return (0, stream.stride(0)) if stream.dim() == 1 else (stream.stride(0), stream.stride(1))


def _split_advantages(advantages: Tensor, logprobs: Tensor, rows: int, packed: bool) -> tuple[Tensor | None, ...]:
    """Return ``(per token, per row)``, one of them ``None``. Advantages count as per row if the shape allows it."""
    if advantages.shape == (rows,) and (packed or advantages.shape != logprobs.shape):
        return None, advantages.contiguous()
    if advantages.dim() == 2 and (advantages.shape[1] == 1 or advantages.stride(1) == 0):
        return None, advantages[:, 0].contiguous()
    return advantages, None


class Tiling(NamedTuple):
    """The division of the tokens into ``tiles`` of ``block`` tokens.

    ``width`` is the length of a row (0: packed). ``pieces`` is the number of tiles per row if each tile lies in one
    row, else 0. ``whole`` is true if every tile is full.
    """

    width: int
    mode: Any
    block: int
    pieces: int
    tiles: int
    whole: bool


def _tiling(logprobs: Tensor, packed: bool, flat: bool) -> Tiling:
    tokens, width = logprobs.numel(), 0 if packed else logprobs.shape[1]
    if packed or (flat and (width % 16 or width < _BLOCKS[-1])):
        block = _BLOCKS[0]
        mode = k.PACKED if packed else k.BY_WIDTH
        return Tiling(width, mode, block, 0, triton.cdiv(tokens, block), tokens % block == 0)
    block = _tile(width)
    pieces = triton.cdiv(width, block)
    return Tiling(width, k.ONE_ROW, block, pieces, logprobs.shape[0] * pieces, width % block == 0)


class KernelOptions(NamedTuple):
    """The options of a call as ``policy_loss.kernel_options`` numbers them."""

    low: float
    high: float
    dual: float
    kl_coef: float
    cap: float
    below: float
    above: float
    max_length: float
    variant: int
    kl: int  # 0: none
    level: int  # 0: no correction
    aggregation: int
    num_actors: int
    kl_weighted: int

    @property
    def by_row(self) -> bool:
        """True if a token's loss needs sums over its row."""
        row_ratio = self.variant in (GSPO.kind, GMPO.kind) or self.level == SEQUENCE.value
        return row_ratio or self.aggregation == SeqMeanTokenMean.index

    def divisor(self, normalizer: Tensor | None, mask: Tensor | None, tokens: int) -> tuple[Any, float]:
        """The place where the kernels find the normaliser, and its inverse if the host knows it (else 0)."""
        if normalizer is not None:
            return k.GIVEN, 0.0
        if self.aggregation == SeqMeanTokenSumNorm.index:
            return k.KNOWN, 1 / self.max_length
        if self.aggregation == TokenMean.index and mask is None:
            return k.KNOWN, 1 / tokens
        return k.COUNTED, 0.0


def compute(streams: Streams, numbers: Sequence[float], modes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute loss, gradient (contiguous) and the table of metrics from checked streams."""
    logprobs, o = streams.logprobs, KernelOptions(*numbers, *modes)  # type: ignore[arg-type]
    tokens, rows = logprobs.numel(), row_count(logprobs, streams.cu_seqlens)
    has = streams.ref_logprobs is not None, streams.rollout_logprobs is not None, streams.entropy is not None
    new = logprobs.new_empty if tokens * rows else logprobs.new_zeros
    loss = new((), dtype=torch.float32)
    grad = new(logprobs.shape)
    metrics = new((1 + o.num_actors, len(metric_names(*has))), dtype=torch.float32)
    if tokens * rows == 0:
        return loss, grad, metrics

    # Plan: contiguous columns, tiles, and what divides the loss
    packed = streams.cu_seqlens is not None
    token_advantages, row_advantages = _split_advantages(streams.advantages, logprobs, rows, packed)
    selected, normalizer, cu_seqlens, actor_ids = (
        None if column is None else column.contiguous()
        for column in (_bytes(streams.selected), streams.normalizer, streams.cu_seqlens, streams.actor_ids)
    )
    s = streams._replace(mask=_bytes(streams.mask), cu_seqlens=cu_seqlens, actor_ids=actor_ids)
    s = s._replace(advantages=token_advantages)  # type: ignore[arg-type]  # None: by row
    per_token = (logprobs, s.old_logprobs, s.advantages, s.mask, s.ref_logprobs, s.rollout_logprobs, s.entropy)
    flat = all(stream is None or stream.is_contiguous() for stream in per_token)
    tiling = _tiling(logprobs, packed, flat)
    divisor, inverse = o.divisor(normalizer, s.mask, tokens)
    many = o.num_actors > 0 and tiling.mode is not k.ONE_ROW  # a tile may hold rows of several actors
    few = not many and sum(stream is not None for stream in per_token) <= 4
    used = tiling.tiles + rows if many else tiling.tiles
    slots = triton.cdiv(used, 16) * 16

    with torch.cuda.device_of(logprobs):
        counts, terms = _launch_counts(s, row_advantages, o, tiling.width, divisor, flat)
        active = None  # the number of actors with tokens
        if o.aggregation == AgentMean.index:
            active = counts[2:] if counts is not None else (cast(Tensor, normalizer) > 0).sum()
        partials = logprobs.new_empty((k.COLUMNS, slots), dtype=torch.float32)
        slot_actors = logprobs.new_empty((slots,), dtype=torch.int32) if o.num_actors else None
        if slot_actors is not None and many:  # some slots may stay unused
            slot_actors.fill_(-1)
        k.loss_kernel[(tiling.tiles,)](
            logprobs, s.old_logprobs, s.advantages, row_advantages, s.mask, s.cu_seqlens, s.ref_logprobs,
            s.rollout_logprobs, normalizer, active, s.actor_ids, s.entropy, selected, counts, terms, grad, partials,
            slot_actors, *_strides(logprobs), *_strides(s.old_logprobs), *_strides(s.advantages), *_strides(s.mask),
            *_strides(s.ref_logprobs), *_strides(s.rollout_logprobs), *_strides(s.entropy), o.low, o.high, o.dual,
            o.kl_coef, o.cap, o.below, o.above, inverse, tokens, rows, tiling.width, tiling.pieces, slots, o.num_actors,
            VARIANT=o.variant, KL=o.kl or K3.value, KL_WEIGHTED=o.kl_weighted, LEVEL=o.level,
            AGGREGATION=o.aggregation, DIVISOR=divisor, MODE=tiling.mode, WHOLE=tiling.whole, BLOCK=tiling.block,
            num_warps=_warps(tiling.block, few), enable_fp_fusion=True,
        )  # fmt: skip
        _launch_finish(partials, slot_actors, loss, metrics, used, o.num_actors, has)
    return loss, grad, metrics


def _launch_finish(
    partials: Tensor,
    slot_actors: Tensor | None,
    loss: Tensor,
    metrics: Tensor,
    used: int,
    num_actors: int,
    has: tuple[bool, bool, bool],
) -> None:
    """Sum the slots, and write loss and metrics: of everything and, if they are few, of the actors in one launch."""
    flags = dict(zip(("HAS_REF", "HAS_ROLLOUT", "HAS_ENTROPY"), has, strict=True)) | {"enable_fp_fusion": True}
    few = num_actors <= _MANY_ACTORS
    slots = partials.shape[1]
    last.finish_kernel[(1 + num_actors if few else 1,)](
        partials, slot_actors, None, None, loss, metrics, slots, used, -1, BLOCK=_FINISH_BLOCK,
        num_warps=_FINISH_WARPS, **flags,
    )  # fmt: skip
    if few:
        return
    assert slot_actors is not None
    actors, order = slot_actors[:used].sort(stable=True)
    starts = torch.searchsorted(actors, torch.arange(num_actors + 1, dtype=torch.int32, device=actors.device))
    last.finish_kernel[(num_actors,)](
        partials, slot_actors, order, starts, loss, metrics, slots, used, 0, BLOCK=_ACTOR_BLOCK,
        num_warps=_ACTOR_WARPS, **flags,
    )  # fmt: skip


def _launch_counts(
    s: Streams, row_advantages: Tensor | None, o: KernelOptions, width: int, divisor: Any, flat: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Launch the counts that the host doesn't know, and the terms of rows if a token needs them.

    Returns ``counts [3 + num_actors]`` (tokens, rows with tokens, actors with tokens, tokens by actor) and ``terms
    [TERMS, rows]``; ``None`` for one that is not needed.
    """
    counted = divisor is k.COUNTED
    counts = s.logprobs.new_zeros(3 + o.num_actors, dtype=torch.int64) if counted else None
    if o.by_row or (counted and (o.aggregation != TokenMean.index or not flat)):
        # A program per row computes its terms, and adds to the counts as well.
        rows = row_count(s.logprobs, s.cu_seqlens)
        terms = s.logprobs.new_empty((k.TERMS, rows), dtype=torch.float32)
        block = _BLOCKS[1] if s.cu_seqlens is not None or width > _BLOCKS[2] else _BLOCKS[2]
        k.rows_kernel[(rows,)](
            s.logprobs, s.old_logprobs, s.advantages, row_advantages, s.mask, s.ref_logprobs, s.rollout_logprobs,
            s.cu_seqlens, s.actor_ids, counts, terms, *_strides(s.logprobs), *_strides(s.old_logprobs),
            *_strides(s.advantages), *_strides(s.mask), *_strides(s.ref_logprobs), *_strides(s.rollout_logprobs),
            o.low, o.high, o.cap, o.below, o.above, rows, width, o.num_actors, VARIANT=o.variant, KL=o.kl,
            KL_WEIGHTED=o.kl_weighted, LEVEL=o.level, COUNT=counted, BLOCK=block, num_warps=_warps(block),
            enable_fp_fusion=True,
        )  # fmt: skip
        return counts, terms
    if counted:
        tokens = s.logprobs.numel()
        k.count_kernel[(triton.cdiv(tokens, _COUNT_BLOCK),)](
            s.mask, counts, tokens, BLOCK=_COUNT_BLOCK, num_warps=_COUNT_WARPS, enable_fp_fusion=True
        )
    return counts, None


def scale(grad: Tensor, factor: Tensor) -> None:
    """Multiply ``grad`` (contiguous) by ``factor`` (0-dim) in place, without waiting for the device."""
    tokens, block = grad.numel(), 2048
    if tokens:
        with torch.cuda.device_of(grad):
            last.scale_kernel[(triton.cdiv(tokens, block),)](
                grad, factor, tokens, BLOCK=block, num_warps=4, enable_fp_fusion=True
            )


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of time
# ---------------------------------------------------------------------------------------------------------------------
_STREAMS = ("logprobs", "old_logprobs", "advantages", "ref", "rollout", "entropy", "grad")
_POINTERS = {
    "row_advantages": "*fp32",
    "mask": "*u8",
    "selected": "*u8",
    "cu_seqlens": "*i32",
    "actor_ids": "*i64",
    "normalizer": "*fp32",
    "active": "*i64",
    "counts": "*i64",
    "terms": "*fp32",
    "partials": "*fp32",
    "slot_actors": "*i32",
    "order": "*i64",
    "starts": "*i64",
    "loss": "*fp32",
    "metrics": "*fp32",
    "factor": "*fp32",
}
_FLOATS = ("low", "high", "dual", "kl_coef", "cap", "below", "above", "inverse")


def _case(
    kernel: Any, absent: str, constants: dict[str, Any], warps: int, *instructions: str, dtype: str = "fp32"
) -> CompileCase:
    """Describe a kernel as a call launches it: contiguous rows of a multiple of 16 tokens, without the inputs that
    ``absent`` names."""
    signature, values = {}, dict(constants)
    for name in kernel.arg_names:
        column = name.endswith("_col")
        if column or name in absent.split() or name in constants:
            signature[name] = "constexpr"
            values.setdefault(name, 1 if column else None)
        elif name in _FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = f"*{dtype}" if name in _STREAMS else _POINTERS.get(name, "i32")
    of_rows = {name for name in signature if name.endswith("_row")} | {"width", "slots"}
    aligned = tuple(name for name, kind in signature.items() if kind[0] == "*" or (kind == "i32" and name in of_rows))
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return CompileCase(kernel, signature, values, aligned, instructions, options)


def _loss_case(absent: str, dtype: str = "fp32", **constants: Any) -> CompileCase:
    usual = {"VARIANT": 0, "KL": K3.value, "KL_WEIGHTED": 0, "LEVEL": 0, "AGGREGATION": 0, "DIVISOR": k.COUNTED.value}
    constants = {**usual, "MODE": k.ONE_ROW.value, "WHOLE": True, "BLOCK": _BLOCKS[0], **constants}
    warps = _warps(constants["BLOCK"], "rollout entropy" in absent)
    absent += "" if constants["AGGREGATION"] == AgentMean.index else " active"
    wide = "ld.global.L1::evict_first.L2::cache_hint.v4.b32", "st.global.cs.v4.b32"
    case = _case(k.loss_kernel, absent, constants, warps, *wide, dtype=dtype)
    # Gradients must not pass through shared memory. With `selected`, whose bytes spread the other streams, they do.
    return replace(case, without=("st.shared.v4",) if "selected" in absent else ())


def _far_apart(case: CompileCase) -> CompileCase:
    """Give a case a mask whose tokens lie a multiple of 16 apart, as if transposed. The kernel reads it by bytes."""
    signature = {**case.signature, "mask_col": "i32"}
    constexprs = {name: value for name, value in case.constexprs.items() if name != "mask_col"}
    aligned = (*case.aligned, "mask_col")
    return replace(case, signature=signature, constexprs=constexprs, aligned=aligned, instructions=("ld.global.b8",))


def _other_cases() -> Iterator[CompileCase]:
    yield _case(k.count_kernel, "", {"BLOCK": _COUNT_BLOCK}, _COUNT_WARPS, "ld.global.v4.b32", "relaxed.add.u64")
    for variant, absent in ((GSPO.kind, "advantages cu_seqlens"), (GMPO.kind, "row_advantages cu_seqlens"), (0, "")):
        constants = {"VARIANT": variant, "KL": K3.value, "KL_WEIGHTED": 1, "LEVEL": 2, "COUNT": True}
        constants["BLOCK"] = _BLOCKS[1]
        yield _case(k.rows_kernel, absent, constants, _warps(_BLOCKS[1]), "ld.global", "relaxed.add.u64")
    for whole, absent in ((True, "order starts"), (False, "slot_actors order starts"), (True, "")):
        constants = {"HAS_REF": whole, "HAS_ROLLOUT": whole, "HAS_ENTROPY": whole}
        by_actor = absent == ""
        constants["BLOCK"] = _ACTOR_BLOCK if by_actor else _FINISH_BLOCK
        yield _case(last.finish_kernel, absent, constants, _ACTOR_WARPS if by_actor else _FINISH_WARPS)
    yield _case(last.scale_kernel, "", {"BLOCK": 2048}, 4, "ld.global.v4.b32", "st.global.v4.b32")


_LEAN = "advantages cu_seqlens normalizer actor_ids selected terms slot_actors rollout entropy"
_FULL = "row_advantages cu_seqlens normalizer selected"
COMPILE_CASES = [
    _loss_case(_LEAN),
    _loss_case(_LEAN, "bf16"),
    _far_apart(_loss_case(_LEAN)),
    _loss_case(_LEAN, KL_WEIGHTED=1),
    _loss_case("advantages cu_seqlens counts", VARIANT=GSPO.kind, KL_WEIGHTED=1, DIVISOR=k.GIVEN.value),
    _loss_case(_LEAN.replace("cu_seqlens", ""), MODE=k.PACKED.value, WHOLE=False),
    _loss_case(_LEAN, MODE=k.BY_WIDTH.value, WHOLE=False),
    _loss_case("row_" + _LEAN, WHOLE=False),
    _loss_case(_FULL, LEVEL=1, AGGREGATION=4),
    _loss_case(_FULL, "fp16", LEVEL=2, AGGREGATION=2),
    _loss_case("row_advantages normalizer", LEVEL=1, AGGREGATION=4, MODE=k.PACKED.value, WHOLE=False),
    *(_loss_case("advantages cu_seqlens counts", VARIANT=v, KL=1 + v % 6, DIVISOR=k.GIVEN.value) for v in range(1, 8)),
    *_other_cases(),
]
