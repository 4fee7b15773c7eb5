"""Triton kernels of the policy loss that sum the tiles' slots (the last launch) and scale the gradient (backward)."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from turnwise.ops.loss.triton_kernels import (
    CLIPPED_DUAL,
    ENTROPY,
    GROWTH,
    HIGH,
    KL_VALUE,
    LARGEST,
    LOG_RATIO,
    LOSS,
    LOW,
    MISMATCH,
    REJECTED,
    SQUARE,
    TOKENS,
    WEIGHT,
)
from turnwise.ops.loss.triton_math import FAR, INF, clamp, exp


@triton.jit
def _column(partials, column, slots, at, valid, present: tl.constexpr, BLOCK: tl.constexpr):
    if present:
        value = tl.load(partials + column * slots + at, mask=valid, other=0.0).to(tl.float64)
    else:
        value = tl.zeros([BLOCK], tl.float64)
    return value


@triton.jit(do_not_specialize=["used", "begin"])
def finish_kernel(
    partials, slot_actors, order, starts, loss, metrics,
    slots, used, begin,
    HAS_REF: tl.constexpr, HAS_ROLLOUT: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``p`` sums the slots of actor ``begin + p``, or all slots for -1, and writes a row of metrics.

    With ``order``, the slots sorted by actor, it reads only the actor's: from ``starts[a]`` to ``starts[a + 1]``.
    """
    group = tl.program_id(0) + begin
    lanes = tl.arange(0, BLOCK)
    none = tl.zeros([BLOCK], tl.float64)
    tokens, low, high, clipped_dual, log_ratio, growth, total = none, none, none, none, none, none, none
    kl, mismatch, weight, square, rejected, entropy = none, none, none, none, none, none
    largest = tl.full([BLOCK], -INF, tl.float32)
    # Sum each column over the slots, in the order of the slots.
    first, end = begin * 0, used
    if order is not None:
        first, end = tl.load(starts + group).to(tl.int32), tl.load(starts + group + 1).to(tl.int32)
    while first < end:
        for part in tl.static_range(4):  # unrolled, so that many loads are in flight
            at = first + part * BLOCK + lanes
            valid = at < end
            if order is not None:
                at = tl.load(order + at, mask=valid, other=0)
            elif slot_actors is not None:
                actor = tl.load(slot_actors + at, mask=valid, other=-1)
                valid = valid & (actor >= 0) & ((actor == group) | (lanes * 0 + group < 0))
            tokens += _column(partials, TOKENS, slots, at, valid, True, BLOCK)
            low += _column(partials, LOW, slots, at, valid, True, BLOCK)
            high += _column(partials, HIGH, slots, at, valid, True, BLOCK)
            clipped_dual += _column(partials, CLIPPED_DUAL, slots, at, valid, True, BLOCK)
            log_ratio += _column(partials, LOG_RATIO, slots, at, valid, True, BLOCK)
            growth += _column(partials, GROWTH, slots, at, valid, True, BLOCK)
            total += _column(partials, LOSS, slots, at, valid, True, BLOCK)
            largest = tl.maximum(largest, tl.load(partials + LARGEST * slots + at, mask=valid, other=-INF))
            kl += _column(partials, KL_VALUE, slots, at, valid, HAS_REF, BLOCK)
            mismatch += _column(partials, MISMATCH, slots, at, valid, HAS_ROLLOUT, BLOCK)
            weight += _column(partials, WEIGHT, slots, at, valid, HAS_ROLLOUT, BLOCK)
            square += _column(partials, SQUARE, slots, at, valid, HAS_ROLLOUT, BLOCK)
            rejected += _column(partials, REJECTED, slots, at, valid, HAS_ROLLOUT, BLOCK)
            entropy += _column(partials, ENTROPY, slots, at, valid, HAS_ENTROPY, BLOCK)
        first += 4 * BLOCK
    # Write the row of metrics: means over tokens, in the order of `metric_names`.
    n = tl.sum(tokens)
    share = tl.where(n > 0, 1 / tl.maximum(n, 1), 0.0)
    mean_log, mean_growth = tl.sum(log_ratio) * share, tl.sum(growth) * share
    to = metrics + (group + 1) * (8 + HAS_REF + 3 * HAS_ROLLOUT + HAS_ENTROPY)
    tl.store(to, n.to(tl.float32))
    tl.store(to + 1, (tl.sum(low) * share).to(tl.float32))
    tl.store(to + 2, (tl.sum(high) * share).to(tl.float32))
    tl.store(to + 3, (tl.sum(clipped_dual) * share).to(tl.float32))
    tl.store(to + 4, (-mean_log).to(tl.float32))
    tl.store(to + 5, mean_growth.to(tl.float32))
    tl.store(to + 6, (n * share + mean_log + mean_growth).to(tl.float32))
    peak = tl.where(n > 0, exp(clamp(tl.max(largest), -FAR, FAR)), 0.0)  # `largest` holds log-ratios
    tl.store(to + 7, tl.where(mean_log == mean_log, peak, float("nan")))  # tl.maximum drops NaN
    if HAS_REF:
        tl.store(to + 8, (tl.sum(kl) * share).to(tl.float32))
    if HAS_ROLLOUT:
        after = to + 8 + HAS_REF
        once, twice = tl.sum(weight), tl.sum(square)
        tl.store(after, (-tl.sum(mismatch) * share).to(tl.float32))
        tl.store(after + 1, tl.where(twice > 0, once * once / tl.where(twice > 0, twice * n, 1), 0.0).to(tl.float32))
        tl.store(after + 2, (tl.sum(rejected) * share).to(tl.float32))
    if HAS_ENTROPY:
        tl.store(to + 8 + HAS_REF + 3 * HAS_ROLLOUT, (tl.sum(entropy) * share).to(tl.float32))
    if group < 0:
        tl.store(loss, tl.sum(total).to(tl.float32))


@triton.jit(do_not_specialize=["tokens"])
def scale_kernel(grad, factor, tokens, BLOCK: tl.constexpr):
    """``grad *= factor`` in place. Does nothing if the factor is 1, the usual case."""
    by = tl.load(factor).to(tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    at = grad + start + lanes
    if by != 1:
        if start + BLOCK <= tokens:
            tl.store(at, (tl.load(at).to(tl.float32) * by).to(grad.dtype.element_ty))
        else:
            value = tl.load(at, mask=start + lanes < tokens, other=0).to(tl.float32) * by
            tl.store(at, value.to(grad.dtype.element_ty), mask=start + lanes < tokens)
