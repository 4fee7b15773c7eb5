"""Triton kernels for grouped advantages.

The first finds the extremes of each group. The second makes exact integer sums of offsets, in steps of ``2**-31`` of
the group's span. The third computes the advantages. Nothing waits for the GPU, and the order of the atomics does not
change a bit of the result. If ``num_groups`` is small, each block first combines its rows by group. Large groups then
cause no queue of atomics.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.ops.advantage.reference import GroupColumns, tie_of
from turnwise.ops.common.dispatch import interpreted
from turnwise.ops.common.triton import FUSED, TYPES, CompileCase

BLOCK = 64 if interpreted else 128
JOINED_BLOCK = 64 if interpreted else 1024  # rows of a block that joins few groups
FEW = 8  # most groups that a block joins; each costs it some reductions
LARGEST, SMALLEST = tl.constexpr(2**63 - 1), tl.constexpr(-(2**63))
STEPS = tl.constexpr(2147483648.0)
_STEPS = float(2**31)


class GroupTable(NamedTuple):
    """Statistics per group, int64.

    ``low`` and ``high`` are the keys of the extremes. ``sums`` holds the number of members, the sum of offsets, the sum
    of squares (split at ``2**31``), the bits of the largest length, the sum of lengths, and the sum of length times
    offset (split at ``2**31``).
    """

    low: Tensor
    high: Tensor
    sums: Tensor  # [8, groups]: count, offset, square high and low, longest, length, weighted high and low

    @staticmethod
    def clear(groups: int, device: torch.device) -> GroupTable:
        low = torch.full((groups,), LARGEST.value, dtype=torch.int64, device=device)
        high = torch.full((groups,), SMALLEST.value, dtype=torch.int64, device=device)
        return GroupTable(low, high, torch.zeros((8, groups), dtype=torch.int64, device=device))


@triton.jit
def key_of(value):
    """Doubles as integers in the same order; NaN lies beyond the infinities."""
    bits = value.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def value_of_key(key):
    return (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)


@triton.jit
def steps_of(part, whole):
    """A part of a whole in steps; 0 where either is not finite, which the extremes show."""
    ratio = tl.where(whole > 0, part / tl.where(whole > 0, whole, 1.0), 0.0)
    return tl.where((ratio >= 0) & (ratio <= 1), ratio * STEPS + 0.5, 0.0).to(tl.int64)


@triton.jit
def members(values_ptr, ids_ptr, valid_ptr, rows, groups, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr):
    """Values of a block of rows in float64, their groups, and which rows enter the statistics."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    group = tl.load(ids_ptr + row, mask=inside, other=-1)
    enters = inside & (group >= 0) & (group < groups)
    if HAS_VALID:
        enters = enters & (tl.load(valid_ptr + row, mask=inside, other=0) != 0)
    value = tl.load(values_ptr + row, mask=enters, other=0.0)
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    return row, value.to(tl.float64), tl.where(enters, group, 0), enters


@triton.jit
def add(ptr, group, enters, values, groups, JOIN: tl.constexpr):
    """Adds each row's value to that of its group; with ``JOIN`` one atomic for each group of the block."""
    if JOIN:
        for one in range(groups):
            tl.atomic_add(ptr + one, tl.sum(tl.where(enters & (group == one), values, 0)))
    else:
        tl.atomic_add(ptr + group, values, mask=enters)


@triton.jit
def raise_to(ptr, group, enters, values, groups, JOIN: tl.constexpr):
    """Raises the largest value of each row's group to the row's; see ``add``."""
    if JOIN:
        for one in range(groups):
            tl.atomic_max(ptr + one, tl.max(tl.where(enters & (group == one), values, SMALLEST)))
    else:
        tl.atomic_max(ptr + group, values, mask=enters)


@triton.jit
def lower_to(ptr, group, enters, values, groups, JOIN: tl.constexpr):
    """Lowers the smallest value of each row's group to the row's; see ``add``."""
    if JOIN:
        for one in range(groups):
            tl.atomic_min(ptr + one, tl.min(tl.where(enters & (group == one), values, LARGEST)))
    else:
        tl.atomic_min(ptr + group, values, mask=enters)


@triton.jit(do_not_specialize=["rows", "groups"])
def extremes_kernel(
    values_ptr, ids_ptr, valid_ptr, lengths_ptr, low_ptr, high_ptr, sums_ptr,
    rows, groups,
    HAS_VALID: tl.constexpr, WEIGHTED: tl.constexpr, JOIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, value, group, enters = members(values_ptr, ids_ptr, valid_ptr, rows, groups, HAS_VALID, BLOCK)
    key = key_of(value)
    lower_to(low_ptr, group, enters, key, groups, JOIN)
    raise_to(high_ptr, group, enters, key, groups, JOIN)
    add(sums_ptr, group, enters, tl.full([BLOCK], 1, tl.int64), groups, JOIN)
    if WEIGHTED:
        length = tl.load(lengths_ptr + row, mask=enters, other=0.0)
        length = tl.where(length >= 0, length, float("nan"))
        longest_ptr = sums_ptr + groups.to(tl.int64) * 4
        raise_to(longest_ptr, group, enters, length.to(tl.int64, bitcast=True), groups, JOIN)


@triton.jit(do_not_specialize=["rows", "groups"])
def offsets_kernel(
    values_ptr, ids_ptr, valid_ptr, lengths_ptr, low_ptr, high_ptr, sums_ptr,
    rows, groups,
    HAS_VALID: tl.constexpr, WEIGHTED: tl.constexpr, JOIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, value, group, enters = members(values_ptr, ids_ptr, valid_ptr, rows, groups, HAS_VALID, BLOCK)
    low = value_of_key(tl.load(low_ptr + group, mask=enters, other=0))
    high = value_of_key(tl.load(high_ptr + group, mask=enters, other=0))
    # Halves, because the difference itself may exceed the largest double.
    offset = steps_of(value * 0.5 - low * 0.5, high * 0.5 - low * 0.5)
    square = offset * offset  # at most 2**62
    column = groups.to(tl.int64)
    add(sums_ptr + column, group, enters, offset, groups, JOIN)
    add(sums_ptr + 2 * column, group, enters, square >> 31, groups, JOIN)
    add(sums_ptr + 3 * column, group, enters, square & 0x7FFFFFFF, groups, JOIN)
    if WEIGHTED:
        longest = tl.load(sums_ptr + 4 * column + group, mask=enters, other=0).to(tl.float64, bitcast=True)
        length = steps_of(tl.load(lengths_ptr + row, mask=enters, other=0.0), longest)
        weighted = length * offset
        add(sums_ptr + 5 * column, group, enters, length, groups, JOIN)
        add(sums_ptr + 6 * column, group, enters, weighted >> 31, groups, JOIN)
        add(sums_ptr + 7 * column, group, enters, weighted & 0x7FFFFFFF, groups, JOIN)


@triton.jit(do_not_specialize=["rows", "groups"])
def advantage_kernel(
    values_ptr, ids_ptr, valid_ptr, low_ptr, high_ptr, sums_ptr, sizes_ptr, advantages_ptr,
    rows, groups,
    HAS_VALID: tl.constexpr, CENTER: tl.constexpr, SCALE: tl.constexpr, SINGLETON: tl.constexpr, DDOF: tl.constexpr,
    EPS: tl.constexpr, MIN_STD: tl.constexpr, TIE: tl.constexpr, POOLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, value, group, enters = members(values_ptr, ids_ptr, valid_ptr, rows, groups, HAS_VALID, BLOCK)
    column = groups.to(tl.int64)
    low = value_of_key(tl.load(low_ptr + group, mask=enters, other=0))
    high = value_of_key(tl.load(high_ptr + group, mask=enters, other=0))
    count = tl.load(sums_ptr + group, mask=enters, other=1)
    n = count.to(tl.float64)
    total = tl.load(sums_ptr + column + group, mask=enters, other=0).to(tl.float64)
    squares = tl.load(sums_ptr + 2 * column + group, mask=enters, other=0).to(tl.float64) * STEPS
    squares += tl.load(sums_ptr + 3 * column + group, mask=enters, other=0).to(tl.float64)
    # Half the span, and the deviation in the same halves: the result below doubles both.
    span = high * 0.5 - low * 0.5
    mean = total / n
    squares = tl.maximum(squares - total * mean, 0.0)
    std = tl.sqrt(squares / tl.maximum(n - DDOF, 1.0)) / STEPS * span
    std = tl.where((span > 0) & (squares > 0), std, 0.0)
    factor = tl.full([BLOCK], 1.0, tl.float64)
    if CENTER == 1:
        factor = n / tl.maximum(n - 1.0, 1.0)
    if CENTER == 2:
        centred = value * 0.5
    else:
        middle = mean
        if CENTER == 3:
            longest = tl.load(sums_ptr + 4 * column + group, mask=enters, other=0).to(tl.float64, bitcast=True)
            length = tl.load(sums_ptr + 5 * column + group, mask=enters, other=0).to(tl.float64)
            weighted = tl.load(sums_ptr + 6 * column + group, mask=enters, other=0).to(tl.float64) * STEPS
            weighted += tl.load(sums_ptr + 7 * column + group, mask=enters, other=0).to(tl.float64)
            middle = tl.where(length > 0, weighted / tl.where(length > 0, length, 1.0), mean)
            middle += longest - longest  # NaN if a length is NaN or infinite
        centred = value * 0.5 - low * 0.5 - middle / STEPS * span
    # The advantage, that of a tied group and that of a group of one. NaN marks rows and groups that are wrong.
    nan = tl.full([BLOCK], float("nan"), tl.float64)
    alone = nan
    tied = 2 * std < MIN_STD
    if POOLED:  # noqa: SIM108  Triton compiles the branch alone
        size = tl.load(sizes_ptr + group, mask=enters, other=0.0)
    else:
        size = tl.maximum(tl.abs(low), tl.abs(high))
    if (CENTER != 2) | (SCALE == 0):
        tied = tied | (span <= 0.5 * TIE * size)
    if SCALE == 0:
        result = centred * factor / (std + 0.5 * EPS)
        tied = tied | (std == 0)
        if SINGLETON == 1:
            alone = value / (1 + EPS)
    else:
        result = 2 * centred * factor
        if SINGLETON == 1:
            alone = value
    if SINGLETON == 0:
        alone = tl.zeros([BLOCK], tl.float64)
    result = tl.where(tied, 0.0, result)
    if (CENTER != 2) | (SCALE == 0):
        result = tl.where(count == 1, alone, result)
    result = tl.where(span - span == 0, result, nan)
    result = tl.where(enters, result, nan)  # NaN for an id that is out of range
    inside = row < rows
    if HAS_VALID:
        result = tl.where(tl.load(valid_ptr + row, mask=inside, other=0) != 0, result, 0.0)
    if advantages_ptr.dtype.element_ty != tl.float64:
        tl.store(advantages_ptr + row, result.to(tl.float32).to(advantages_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(advantages_ptr + row, result, mask=inside)


def _fill(values: Tensor, ids: Tensor, valid: Tensor | None, lengths: Tensor | None, groups: int) -> GroupTable:
    """Compute the statistics of all groups."""
    rows = values.shape[0]
    table = GroupTable.clear(groups, values.device)
    join = groups <= FEW and rows > groups * BLOCK  # groups are large
    block = JOINED_BLOCK if join else BLOCK
    grid = (triton.cdiv(rows, block),)
    columns = (values, ids, ids if valid is None else valid, values if lengths is None else lengths)
    flags = {"HAS_VALID": valid is not None, "WEIGHTED": lengths is not None, "JOIN": join, "BLOCK": block, **FUSED}
    with torch.cuda.device_of(values):
        extremes_kernel[grid](*columns, *table, rows, groups, **flags)
        offsets_kernel[grid](*columns, *table, rows, groups, **flags)
    return table


def _values_of(keys: Tensor) -> Tensor:
    return (keys ^ ((keys >> 63) & LARGEST.value)).view(torch.float64)


def _pool(
    values: Tensor, ids: Tensor, trajectories: Tensor, lengths: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Pool rows into one entry per (group, trajectory): value, group, length and whether it exists.

    Also returns the entry of each row. There are as many entries as rows; the unused ones don't exist.
    """
    if valid is not None:
        ids = torch.where(valid != 0, ids, -1)
    # Number the entries: sort by (group, trajectory), and start a new one at each change.
    order = trajectories.argsort(stable=True)
    order = order[ids[order].argsort(stable=True)]
    group, trajectory = ids[order], trajectories[order]
    new = torch.ones_like(group)
    new[1:] = ((group[1:] != group[:-1]) | (trajectory[1:] != trajectory[:-1])).long()
    entry = torch.empty_like(group)
    entry[order] = new.cumsum(0) - 1
    table = _fill(values, entry, valid, lengths, values.shape[0])
    low = _values_of(table.low)
    # Means and summed lengths of the entries, from steps back to values.
    count, offset = table.sums[0], table.sums[1].double()
    span = _values_of(table.high) * 0.5 - low * 0.5
    pooled = low + 2 * (offset / count.clamp(min=1) / _STEPS * span)
    groups = torch.empty_like(group).index_copy_(0, entry, ids)
    total = None if lengths is None else table.sums[5].double() / _STEPS * table.sums[4].view(torch.float64)
    return pooled, groups, total, count > 0, entry


def _largest(values: Tensor, ids: Tensor, valid: Tensor | None, groups: int) -> Tensor:
    """Return the largest magnitude of each group's rows, ``[groups]`` float64."""
    enters = (ids >= 0) & (ids < groups)
    enters = enters if valid is None else enters & (valid != 0)
    sizes = torch.zeros(groups, dtype=torch.float64, device=values.device)
    return sizes.scatter_reduce(0, torch.where(enters, ids, 0), torch.where(enters, values.abs().double(), 0.0), "amax")


def run(
    columns: GroupColumns, advantages: Tensor, modes: tuple[bool, int, int, int], numbers: tuple[int, float, float]
) -> None:
    """Write ``advantages``. Columns are contiguous: ids int64, lengths float64, valid bool.

    A negative ``num_groups`` means that it is not given; ids must then be below the number of rows.
    """
    values, ids, num_groups, trajectory_ids, lengths, valid = columns
    by_trajectory, center, scale, singleton = modes
    rows = values.shape[0]
    if rows == 0:
        return
    # Statistics of rows, or of trajectories whose advantage their rows then share.
    groups = rows if num_groups is None or num_groups < 0 else max(num_groups, 1)
    weights = lengths if center == 3 else None
    valid = None if valid is None else valid.view(torch.uint8)
    sizes, tie = None, tie_of(values.dtype)
    if by_trajectory:
        assert trajectory_ids is not None
        pooled, group, total, exists, entry = _pool(values, ids, trajectory_ids, weights, valid)
        table = _fill(pooled, group, exists.view(torch.uint8), total, groups)
        # The means' own error counts as rounding, and the rows' magnitude says how large that is.
        sizes, tie = _largest(values, ids, valid, groups), max(tie, 4 / _STEPS)
        values = pooled[entry]
    else:
        table = _fill(values, ids, valid, weights, groups)
    with torch.cuda.device_of(values):
        advantage_kernel[(triton.cdiv(rows, BLOCK),)](
            values, ids, ids if valid is None else valid, *table, table.low if sizes is None else sizes, advantages,
            rows, groups,
            HAS_VALID=valid is not None, CENTER=center, SCALE=scale, SINGLETON=singleton, DDOF=numbers[0],
            EPS=numbers[1], MIN_STD=numbers[2], TIE=tie, POOLED=sizes is not None, BLOCK=BLOCK, **FUSED,
        )  # fmt: skip


def _cases() -> list[CompileCase]:
    cases = []
    for dtype in TYPES.values():
        columns = {"values_ptr": f"*{dtype}", "ids_ptr": "*i64", "valid_ptr": "*u8"}
        table = {"low_ptr": "*i64", "high_ptr": "*i64", "sums_ptr": "*i64"}
        sizes = {"rows": "i32", "groups": "i32", "HAS_VALID": "constexpr", "BLOCK": "constexpr"}
        flags = dict.fromkeys(("WEIGHTED", "JOIN"), "constexpr")
        signature = {**columns, "lengths_ptr": "*fp64", **table, **sizes, **flags}
        for kernel, join in itertools.product((extremes_kernel, offsets_kernel), (False, True)):
            values: dict[str, Any] = {"HAS_VALID": True, "WEIGHTED": True, "JOIN": join}
            values["BLOCK"] = JOINED_BLOCK if join else BLOCK
            cases.append(CompileCase(kernel, signature, values, options=FUSED))
        names = ("CENTER", "SCALE", "SINGLETON", "DDOF", "EPS", "MIN_STD", "TIE", "POOLED")
        outputs = {"sizes_ptr": "*fp64", "advantages_ptr": f"*{dtype}"}
        signature = {**columns, **table, **outputs, **sizes, **dict.fromkeys(names, "constexpr")}
        for options in ((0, 0, 0, 1, 1e-6, 0.0, 2.0**-21, False), (3, 1, 1, 0, 0.0, 0.1, 2.0**-29, True)):
            values = {"HAS_VALID": True, "BLOCK": 128, **dict(zip(names, options, strict=True))}
            cases.append(CompileCase(advantage_kernel, signature, values, options=FUSED))
    return cases


COMPILE_CASES = _cases()
