"""Check the arguments of grouped advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.advantage.reference import GroupColumns, GroupOptions
from turnwise.ops.common.layout import FLOATS, check_each, check_like, is_transformed, trained_tokens, whole_number
from turnwise.utils.grouping import check_options


def check_rule(o: GroupOptions, trajectory_ids: object, lengths: object) -> None:
    """Check the options, and that the columns that they need are given."""
    check_options(o.pool, o.center, o.scale, o.ddof, o.eps, o.singleton, o.min_std)
    if o.pool == "trajectory" and trajectory_ids is None:
        raise ValueError("trajectory_ids=None: expected an id per row, as pool='trajectory'")
    if o.center == "length_weighted" and lengths is None:
        raise ValueError("lengths=None: expected a length per row, as center='length_weighted'")


def is_integral(column: Tensor) -> bool:
    dtype = column.dtype
    return dtype is torch.int64 or not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def check_column(name: str, column: Tensor | None, rewards: Tensor, integral: bool) -> None:
    if column is None:
        return
    if not isinstance(column, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(column).__name__}")
    check_like("rewards", rewards, **{name: column})
    if integral and not is_integral(column):
        raise TypeError(f"{name} has dtype {column.dtype}: expected integers")


def check_types(rewards: Tensor, lengths: Tensor | None, valid: Tensor | None) -> None:
    if rewards.is_complex() or (rewards.is_floating_point() and rewards.dtype not in FLOATS):
        raise TypeError(f"rewards has dtype {rewards.dtype}: expected float32, bfloat16, float16, float64 or integers")
    for name, column in (("lengths", lengths), ("valid", valid)):
        if column is not None and column.is_complex():
            raise TypeError(f"{name} has dtype {column.dtype}: expected numbers")


def check_values(c: GroupColumns, num_groups: int) -> None:
    """Check the values of every column. Reading them makes a GPU wait."""
    rewards, group_ids, _, _, lengths, valid = c
    if is_transformed(rewards, group_ids, lengths, valid):
        return
    rows = trained_tokens(valid, rewards)
    check_each("rewards", rewards, ~torch.isfinite(rewards) & rows, "a finite number")
    outside = (group_ids < 0) | (group_ids >= num_groups)
    check_each("group_ids", group_ids, outside & rows, f"an id in [0, {num_groups})")
    if lengths is not None:
        check_each("lengths", lengths, ~((lengths >= 0) & lengths.isfinite()) & rows, "a number >= 0")


def check_singletons(group_ids: Tensor, trajectory_ids: Tensor | None, valid: Tensor | None) -> None:
    if is_transformed(group_ids, trajectory_ids, valid):
        return
    rows = trained_tokens(valid, group_ids)
    groups = group_ids[rows]
    if trajectory_ids is not None:
        groups = torch.unique(torch.stack([groups, trajectory_ids[rows]]), dim=1)[0]
    ids, members = torch.unique(groups, return_counts=True)
    alone = ids[members == 1]
    if alone.numel():
        raise ValueError(f"group_ids: group {int(alone[0])} has a single member, and singleton='error'")


def check_count(num_groups: Any) -> int:
    count = whole_number(num_groups)
    if count is None or count < 0:
        raise ValueError(f"num_groups={num_groups!r}: expected a count >= 0")
    return count


def count_groups(group_ids: Tensor) -> int:
    """Count the groups by the largest id, if the caller gave no number. Reading it makes a GPU wait."""
    try:
        largest = int(group_ids.max()) if group_ids.numel() else -1
    except RuntimeError as error:
        if not is_transformed(group_ids):
            raise
        raise ValueError("num_groups=None: expected a count, as torch.func.vmap hides the values of ids") from error
    if largest == 2**63 - 1:
        raise ValueError(f"group_ids[{int(group_ids.argmax())}]={largest}: expected an id below 2**63 - 1")
    return largest + 1


def check_shapes(c: GroupColumns) -> None:
    """Raise for the first column whose shape, type or device is wrong."""
    if c.rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(c.rewards.shape)}: expected one dimension")
    check_column("group_ids", c.group_ids, c.rewards, integral=True)
    check_column("trajectory_ids", c.trajectory_ids, c.rewards, integral=True)
    check_column("lengths", c.lengths, c.rewards, integral=False)
    check_column("valid", c.valid, c.rewards, integral=False)


def check_all(c: GroupColumns, o: GroupOptions) -> int:
    """Check shapes and values, and return the number of groups. Makes a GPU wait."""
    check_shapes(c)
    groups = count_groups(c.group_ids) if c.num_groups is None else c.num_groups
    check_values(c, groups)
    if o.singleton == "error" and (o.center, o.scale) != ("none", "none"):
        check_singletons(c.group_ids, c.trajectory_ids if o.pool == "trajectory" else None, c.valid)
    return groups
