"""Triton kernels of the policy loss, except the last one; ``triton.py`` launches them.

A tile is ``BLOCK`` tokens of one row, or of a flat stream in which rows follow one another. In the first case ``row``
is one number, in the second one per token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from turnwise.ops.loss.aggregation import AgentMean, SeqMeanTokenMean, TokenMean
from turnwise.ops.loss.triton_math import (
    CISPO,
    FAR,
    GMPO,
    GRADIENT,
    GSPO,
    INF,
    K1,
    OTHER,
    SAME,
    SEQUENCE,
    TOKEN,
    clamp,
    exact_exp,
    exp,
    gmpo_bounded,
    importance_weighted,
    kl_term,
    token_loss,
)

TOKEN_MEAN, LENGTH_MEAN = tl.constexpr(TokenMean.index), tl.constexpr(SeqMeanTokenMean.index)
AGENT_MEAN = tl.constexpr(AgentMean.index)
# Source of the divisor of a loss: a number known on the host, the caller's tensor, or the counts of the first launch.
KNOWN, GIVEN, COUNTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# How tokens find their row: a tile lies in one row; rows of one width in a flat stream; rows by cu_seqlens.
ONE_ROW, BY_WIDTH, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# The terms of each row that the first launch writes, and the sums that a tile writes.
INVERSE_LENGTH, RATIO, ADVANTAGE, CUT, IMPORTANCE, MEAN_KL = (tl.constexpr(i) for i in range(6))
TERMS = 6
TOKENS, LOW, HIGH, CLIPPED_DUAL, LOG_RATIO, GROWTH, LOSS, LARGEST = (tl.constexpr(i) for i in range(8))
KL_VALUE, MISMATCH, WEIGHT, SQUARE, REJECTED, ENTROPY = (tl.constexpr(i) for i in range(8, 14))
COLUMNS = 14

NO_ACTOR = tl.constexpr(2**31 - 1)
PROBES = tl.constexpr(256)


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------
@triton.jit
def _load(stream, row, start, row_stride, stride, left, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of a stream as float32; zeros where there is no stream."""
    if stream is None:
        value = tl.zeros([BLOCK], tl.float32)
    else:
        lanes = tl.arange(0, BLOCK)
        at = stream + (row * row_stride + start * stride) + lanes.to(tl.int64) * stride
        if FULL:
            value = tl.load(at, eviction_policy="evict_first").to(tl.float32)
        else:
            value = tl.load(at, mask=lanes < left, other=0, eviction_policy="evict_first").to(tl.float32)
    return value


@triton.jit
def _trained(
    mask, row, start, row_stride, stride, left, FULL: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr = False
):
    """The tokens of a tile that train. Unless ``ALONE``, 4 neighbours to a thread, as float32 streams have it: 16 bytes
    of a mask would spread those streams over 64 bytes a thread, and send the gradient through shared memory."""
    lanes = tl.arange(0, BLOCK)
    if mask is None:
        value = lanes < left
    else:
        at = mask + (row * row_stride + start * stride) + lanes.to(tl.int64) * stride
        if not (ALONE or isinstance(stride, tl.tensor)):  # the hint is true only for stride 1, a constant here
            at = tl.max_contiguous(at, 4)
        value = tl.load(at) if FULL else tl.load(at, mask=lanes < left, other=0)
        if mask.dtype.element_ty.is_floating():
            value = value.to(tl.float32)
        value = value != 0
    return value


@triton.jit
def _per_row(values, row, BLOCK: tl.constexpr):
    """A row's value at each of its tokens; ``row`` is one row, or one per token."""
    return tl.broadcast_to(tl.load(values + row), [BLOCK])


@triton.jit
def _find_row(cu_seqlens, rows, token):
    """The last row that starts at ``token`` or before: by 256 probes at a time."""
    row = 0
    span = rows
    while span > 1:
        step = (span + PROBES - 1) // PROBES
        probes = row + step * (1 + tl.arange(0, PROBES))
        starts = tl.load(cu_seqlens + probes, mask=probes < row + span, other=NO_ACTOR).to(tl.int64)
        ahead = step * tl.sum(((starts <= token) & (probes < row + span)).to(tl.int32))
        row += ahead
        span = tl.minimum(step, span - ahead)
    return row


@triton.jit
def _row_of_tokens(cu_seqlens, rows, width, start, left, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """The row of each token of a flat tile."""
    lanes = tl.arange(0, BLOCK)
    if MODE == BY_WIDTH:
        first = start // width
        ahead = (start - first * width).to(tl.int32) + lanes
        row = tl.minimum(first.to(tl.int32) + ahead // width, rows - 1)
    else:
        first = _find_row(cu_seqlens, rows, start)
        last = _find_row(cu_seqlens, rows, start + tl.minimum(left, BLOCK) - 1)
        row = first + tl.zeros([BLOCK], tl.int32)
        step = 1
        while step <= last - first:
            step *= 2
        while step > 0:
            probes = row + step
            inside = probes <= last
            starts = tl.load(cu_seqlens + probes, mask=inside, other=0).to(tl.int64) - start
            row = tl.where(inside & (starts <= lanes), probes, row)
            step = step // 2
    return row


# ---------------------------------------------------------------------------------------------------------------------
# First launch: counts and the terms of rows
# ---------------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["tokens"])
def count_kernel(mask, counts, tokens, BLOCK: tl.constexpr):
    """Adds a tile's trained tokens to ``counts[0]``; the mask is one flat stream."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = tokens - start
    zero = start * 0
    if left >= BLOCK:
        count = tl.sum(_trained(mask, zero, start, 0, 1, left, True, BLOCK, True).to(tl.int32))
    else:
        count = tl.sum(_trained(mask, zero, start, 0, 1, left, False, BLOCK, True).to(tl.int32))
    tl.atomic_add(counts, count.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "num_actors"])
def rows_kernel(
    logprobs, old_logprobs, advantages, row_advantages, mask, ref, rollout, cu_seqlens, actor_ids, counts, terms,
    logprobs_row, logprobs_col, old_row, old_col, advantages_row, advantages_col, mask_row, mask_col, ref_row, ref_col,
    rollout_row, rollout_col,
    low, high, cap, below, above, rows, width, num_actors,
    VARIANT: tl.constexpr, KL: tl.constexpr, KL_WEIGHTED: tl.constexpr, LEVEL: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its terms, and its trained tokens added to ``counts``.

    These are the tokens of the batch, the rows with tokens, the actors with tokens, and the tokens of each actor."""
    row = tl.program_id(0).to(tl.int64)
    begin, size = row * 0, row * 0 + width
    line = row
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + row).to(tl.int64)
        size = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
        line = row * 0
    # Sum over the row's trained tokens, block by block, whatever the variant and the correction need.
    nothing = tl.full([], 0, tl.float64)
    length, log_ratio, advantage, mismatch, kl = begin * 0, nothing, nothing, nothing, nothing
    token_advantage = tl.zeros([BLOCK], tl.float32)
    if row_advantages is not None:
        token_advantage = _per_row(row_advantages, row, BLOCK).to(tl.float32)
    done = begin * 0
    while done < size:
        at, left = begin + done, size - done
        trained = _trained(mask, line, at, mask_row, mask_col, left, False, BLOCK)
        length += tl.sum(trained.to(tl.int32))
        if (VARIANT == GSPO) | (VARIANT == GMPO) | (LEVEL == SEQUENCE):
            old = _load(old_logprobs, line, at, old_row, old_col, left, False, BLOCK)
        if (VARIANT == GSPO) | (VARIANT == GMPO):
            logprob = _load(logprobs, line, at, logprobs_row, logprobs_col, left, False, BLOCK)
            d = tl.where(trained, logprob - old, 0.0)
            if VARIANT == GMPO:
                if advantages is not None:
                    token_advantage = _load(advantages, line, at, advantages_row, advantages_col, left, False, BLOCK)
                advantage += tl.sum(tl.where(trained, token_advantage, 0.0)).to(tl.float64)
                d = tl.where(trained, gmpo_bounded(clamp(d, -FAR, FAR), token_advantage, low, high), 0.0)
            log_ratio += tl.sum(d).to(tl.float64)
        if (VARIANT == GSPO) & (KL_WEIGHTED != 0):
            reference = _load(ref, line, at, ref_row, ref_col, left, False, BLOCK)
            estimate, _ = kl_term(tl.where(trained, reference - logprob, 0.0), KL)
            kl += tl.sum(estimate).to(tl.float64)
        if LEVEL == SEQUENCE:
            sampled = _load(rollout, line, at, rollout_row, rollout_col, left, False, BLOCK)
            mismatch += tl.sum(tl.where(trained, old - sampled, 0.0)).to(tl.float64)
        done += BLOCK
    # Turn the sums into the row's terms.
    share = tl.where(length > 0, 1 / tl.maximum(length, 1).to(tl.float64), 0.0)
    tl.store(terms + INVERSE_LENGTH * rows + row, share.to(tl.float32))
    if (VARIANT == GSPO) | (VARIANT == GMPO):
        mean = (log_ratio * share).to(tl.float32)
        tl.store(terms + RATIO * rows + row, exact_exp(clamp(mean, -FAR, FAR)))
        tl.store(terms + ADVANTAGE * rows + row, (advantage * share).to(tl.float32))
        tl.store(terms + CUT * rows + row, (tl.abs(mean) > FAR).to(tl.float32))
        tl.store(terms + MEAN_KL * rows + row, tl.where(tl.abs(mean) > FAR, 0.0, (kl * share).to(tl.float32)))
    if LEVEL == SEQUENCE:
        weight = exact_exp(clamp(mismatch.to(tl.float32), -FAR, FAR))
        applied = tl.minimum(cap, weight, propagate_nan=SAME)
        tl.store(terms + IMPORTANCE * rows + row, tl.where((weight < below) | (weight > above), 0.0, applied))
    if COUNT:
        tl.atomic_add(counts, length, sem="relaxed")
        tl.atomic_add(counts + 1, (length > 0).to(tl.int64), sem="relaxed")
        if actor_ids is not None:
            actor = tl.load(actor_ids + row).to(tl.int64)
            counted = (actor >= 0) & (actor < num_actors) & (length > 0)
            before = tl.atomic_add(counts + 3 + actor, length, mask=counted, sem="relaxed")
            tl.atomic_add(counts + 2, 1, mask=counted & (before == 0), sem="relaxed")


# ---------------------------------------------------------------------------------------------------------------------
# Second launch: the pass over the tokens
# ---------------------------------------------------------------------------------------------------------------------
@triton.jit
def _inverse(value):
    value = value.to(tl.float32)
    positive = value > 0
    return tl.where(positive, tl.div_rn(1.0, tl.where(positive, value, 1.0)), tl.where(value == 0, 0.0, float("nan")))


@triton.jit
def _weights(
    normalizer, active, counts, terms, row, actor, inverse, num_actors,
    AGGREGATION: tl.constexpr, DIVISOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight of each token in the loss."""
    if AGGREGATION == AGENT_MEAN:
        of_actor = counts + 3 if DIVISOR == COUNTED else normalizer
        share = _inverse(tl.load(active))
        number = tl.load(of_actor + actor, mask=actor < num_actors, other=0)
        weight = tl.broadcast_to(share * _inverse(number), [BLOCK])
    else:
        share = inverse
        if DIVISOR == GIVEN:
            share = _inverse(tl.load(normalizer))
        elif DIVISOR == COUNTED:
            share = _inverse(tl.load(counts + (0 if AGGREGATION == TOKEN_MEAN else 1)))
        weight = tl.zeros([BLOCK], tl.float32) + share
        if AGGREGATION == LENGTH_MEAN:
            weight = weight * _per_row(terms, row, BLOCK)
    return weight


@triton.jit
def _store_sum(partials, column, slots, slot, keep, values, ALL: tl.constexpr):
    """A tile's sum of one column, over the tokens that ``keep`` names; masked tokens have 0 already."""
    values = values.to(tl.float32)
    if not ALL:
        values = tl.where(keep, values, 0.0)
    tl.store(partials + column * slots + slot, tl.sum(values))


@triton.jit
def _store_counts(partials, first, second, slots, slot, counts):
    """The number of tokens of either kind, counted together as halves of an integer."""
    both = tl.sum(counts)
    tl.store(partials + first * slots + slot, (both & (OTHER - 1)).to(tl.float32))
    tl.store(partials + second * slots + slot, (both // OTHER).to(tl.float32))


@triton.jit
def _store_sums(
    partials, slots, slot, keep, low, upper, d, log_ratio, ratio, loss, kl, mismatch, importance, rejected, entropy,
    HAS_REF: tl.constexpr, HAS_ROLLOUT: tl.constexpr, HAS_ENTROPY: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """A slot of sums: over a whole tile, or over one actor's tokens in it."""
    if not ALL:
        low = keep & low
        upper = tl.where(keep, upper, 0)
    _store_counts(partials, TOKENS, LOW, slots, slot, tl.where(keep, 1, 0) + tl.where(low, OTHER, 0))
    _store_counts(partials, HIGH, CLIPPED_DUAL, slots, slot, upper)
    _store_sum(partials, LOG_RATIO, slots, slot, keep, log_ratio, ALL)
    _store_sum(partials, GROWTH, slots, slot, keep, ratio - 1 - log_ratio, ALL)
    _store_sum(partials, LOSS, slots, slot, keep, loss, ALL)
    tl.store(partials + LARGEST * slots + slot, tl.max(tl.where(keep, d, -INF)))
    if HAS_REF:
        _store_sum(partials, KL_VALUE, slots, slot, keep, kl, ALL)
    if HAS_ROLLOUT:
        _store_sum(partials, MISMATCH, slots, slot, keep, mismatch, ALL)
        _store_sum(partials, WEIGHT, slots, slot, keep, importance, ALL)
        _store_sum(partials, SQUARE, slots, slot, keep, importance * importance, ALL)
        _store_sum(partials, REJECTED, slots, slot, keep, rejected, ALL)
    if HAS_ENTROPY:
        _store_sum(partials, ENTROPY, slots, slot, keep, entropy, ALL)


@triton.jit(do_not_specialize=["tokens", "rows", "pieces", "num_actors"])
def loss_kernel(
    logprobs, old_logprobs, advantages, row_advantages, mask, cu_seqlens, ref, rollout, normalizer, active, actor_ids,
    entropy, selected, counts, terms, grad, partials, slot_actors,
    logprobs_row, logprobs_col, old_row, old_col, advantages_row, advantages_col, mask_row, mask_col, ref_row, ref_col,
    rollout_row, rollout_col, entropy_row, entropy_col,
    low, high, dual, kl_coef, cap, below, above, inverse, tokens, rows, width, pieces, slots, num_actors,
    VARIANT: tl.constexpr, KL: tl.constexpr, KL_WEIGHTED: tl.constexpr, LEVEL: tl.constexpr, AGGREGATION: tl.constexpr,
    DIVISOR: tl.constexpr, MODE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of tokens: its gradient, and its sums in a slot of ``partials`` (a slot for each actor in it)."""
    # Place of the tile: `line` and `start` index the streams, `flat` the contiguous gradient.
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if MODE == ONE_ROW:
        row = (program // pieces).to(tl.int64)
        line = row
        start = (program % pieces).to(tl.int64) * BLOCK
        left = width - start
        flat = row * width + start
    else:
        start = program.to(tl.int64) * BLOCK
        line = start * 0
        left = tokens - start
        flat = start
    # Whole tiles are read without masks, so that any width gets 16-byte loads.
    if WHOLE or left >= BLOCK:
        trained = _trained(mask, line, start, mask_row, mask_col, left, True, BLOCK)
        logprob = _load(logprobs, line, start, logprobs_row, logprobs_col, left, True, BLOCK)
        old = _load(old_logprobs, line, start, old_row, old_col, left, True, BLOCK)
        reference = _load(ref, line, start, ref_row, ref_col, left, True, BLOCK)
        sampled = _load(rollout, line, start, rollout_row, rollout_col, left, True, BLOCK)
        surprise = _load(entropy, line, start, entropy_row, entropy_col, left, True, BLOCK)
        advantage = _load(advantages, line, start, advantages_row, advantages_col, left, True, BLOCK)
        chosen = _load(selected, line * 0, flat, 0, 1, left, True, BLOCK)
    else:
        trained = _trained(mask, line, start, mask_row, mask_col, left, False, BLOCK)
        logprob = _load(logprobs, line, start, logprobs_row, logprobs_col, left, False, BLOCK)
        old = _load(old_logprobs, line, start, old_row, old_col, left, False, BLOCK)
        reference = _load(ref, line, start, ref_row, ref_col, left, False, BLOCK)
        sampled = _load(rollout, line, start, rollout_row, rollout_col, left, False, BLOCK)
        surprise = _load(entropy, line, start, entropy_row, entropy_col, left, False, BLOCK)
        advantage = _load(advantages, line, start, advantages_row, advantages_col, left, False, BLOCK)
        chosen = _load(selected, line * 0, flat, 0, 1, left, False, BLOCK)

    # Row values: advantage, actor (`num_actors`: out of range) and weight, which is NaN for a wrong actor.
    if MODE != ONE_ROW:
        row = _row_of_tokens(cu_seqlens, rows, width, start, left, MODE, BLOCK)
    if row_advantages is not None:
        advantage = _per_row(row_advantages, row, BLOCK).to(tl.float32)
    actor = 0
    if actor_ids is not None:
        actor = tl.load(actor_ids + row).to(tl.int64)  # narrowed once it is in range
        actor = tl.where((actor >= 0) & (actor < num_actors), actor, num_actors).to(tl.int32)
    weight = _weights(normalizer, active, counts, terms, row, actor, inverse, num_actors, AGGREGATION, DIVISOR, BLOCK)
    if actor_ids is not None:
        weight = tl.where(actor < num_actors, weight, float("nan"))

    # The variant's loss. Zeros here make loss and gradient of masked tokens 0, except for the cases handled at the end.
    d = tl.where(trained, logprob - old, 0.0)
    scaled = advantage
    row_ratio, row_cut = d, trained
    if (VARIANT == GSPO) | (VARIANT == GMPO):
        row_ratio = _per_row(terms + RATIO * rows, row, BLOCK)
        row_cut = _per_row(terms + CUT * rows, row, BLOCK) != 0
        if VARIANT == GMPO:
            scaled = _per_row(terms + ADVANTAGE * rows, row, BLOCK)
    scaled = tl.where(trained, scaled * weight, 0.0)
    if (VARIANT == CISPO) | (VARIANT == GRADIENT):
        logprob = tl.where(trained, logprob, 0.0)
    log_ratio = clamp(d, -FAR, FAR)
    ratio = exp(log_ratio)
    loss, slope, is_low, upper = token_loss(
        logprob, log_ratio, ratio, tl.abs(d) > FAR, advantage, scaled, weight, trained & (chosen != 0), row_ratio,
        row_cut, low, high, dual, VARIANT,
    )  # fmt: skip
    # Importance correction: its weight multiplies loss and gradient.
    mismatch, importance, rejected, kl = d, d, trained, d
    if rollout is not None:
        mismatch = tl.where(trained, old - sampled, 0.0)
        importance = exp(clamp(mismatch, -FAR, FAR))
        rejected = trained & (importance != importance)  # none
        if LEVEL == TOKEN:
            rejected = (importance < below) | (importance > above)
            applied = tl.where(rejected, 0.0, tl.minimum(cap, importance, propagate_nan=SAME))
        elif LEVEL == SEQUENCE:
            applied = _per_row(terms + IMPORTANCE * rows, row, BLOCK)
            rejected = applied == 0  # the cap and the weight itself are above 0
        if LEVEL != 0:
            loss *= applied
            slope *= applied
            rejected = rejected & trained
            importance = applied
        importance = tl.where(trained, importance, 0.0)
    # KL term: added after the correction, which does not multiply it.
    if ref is not None:
        kl, kl_slope = kl_term(tl.where(trained, reference - logprob, 0.0), KL)
        term = kl  # the metric stays the plain estimate
        if KL_WEIGHTED:
            if VARIANT == GSPO:
                mean_kl = _per_row(terms + MEAN_KL * rows, row, BLOCK)
                term, kl_slope = importance_weighted(kl, kl_slope, row_ratio, mean_kl)
            else:
                carried = tl.where(tl.abs(d) > FAR, 0.0, kl)
                term, kl_slope = importance_weighted(kl, kl_slope, ratio, carried)
        scale = kl_coef * weight
        loss += scale * term
        slope += scale * kl_slope
    # Row values and the constant slope of k1 are not 0 for masked tokens.
    if (VARIANT == GSPO) | (VARIANT == GMPO) | (LEVEL == SEQUENCE) | (KL == K1):
        loss, slope = tl.where(trained, loss, 0.0), tl.where(trained, slope, 0.0)
    if VARIANT == GSPO:
        is_low, upper = is_low & trained, tl.where(trained, upper, 0)
    if WHOLE or left >= BLOCK:
        tl.store(grad + flat + lanes, slope.to(grad.dtype.element_ty), cache_modifier=".cs")
    else:
        tl.store(grad + flat + lanes, slope.to(grad.dtype.element_ty), mask=lanes < left)

    # Write the tile's sums.
    surprise = tl.where(trained, surprise, 0.0)
    slot = program.to(tl.int64)
    if MODE == ONE_ROW or actor_ids is None:
        _store_sums(
            partials, slots, slot, trained, is_low, upper, d, log_ratio, ratio, loss, kl, mismatch,
            importance, rejected, surprise, ref is not None, rollout is not None, entropy is not None, True,
        )  # fmt: skip
        if actor_ids is not None:
            tl.store(slot_actors + slot, actor)
    else:
        # One actor at a time, in the order of their ids: no more slots than rows.
        slot += tl.min(row)
        turn = tl.min(tl.where(trained, actor, NO_ACTOR))
        while turn < NO_ACTOR:
            _store_sums(
                partials, slots, slot, trained & (actor == turn), is_low, upper, d, log_ratio, ratio,
                loss, kl, mismatch, importance, rejected, surprise, ref is not None, rollout is not None,
                entropy is not None, False,
            )  # fmt: skip
            tl.store(slot_actors + slot, turn)
            turn = tl.min(tl.where(trained & (actor > turn), actor, NO_ACTOR))
            slot += 1
