"""Check the arguments of grouped advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.advantage.reference import Options
from turnwise.ops.common.layout import FLOATS, check_each, check_like, is_transformed, trained_tokens, whole_number


def check_companions(pool: str, trajectory_ids: object, center: str, lengths: object) -> None:
    if pool == "trajectory" and trajectory_ids is None:
        raise ValueError("trajectory_ids=None: expected an id per row, as pool='trajectory'")
    if center == "length_weighted" and lengths is None:
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


def check_values(
    rewards: Tensor, group_ids: Tensor, num_groups: int, lengths: Tensor | None, valid: Tensor | None
) -> None:
    """Check the values of every column. Reading them makes a GPU wait."""
    if is_transformed(rewards, group_ids, lengths, valid):
        return
    rows = trained_tokens(valid, rewards)
    for name, bad, column, expected in (
        ("rewards", ~torch.isfinite(rewards), rewards, "a finite number"),
        ("group_ids", (group_ids < 0) | (group_ids >= num_groups), group_ids, f"an id in [0, {num_groups})"),
        ("lengths", None if lengths is None else ~((lengths >= 0) & lengths.isfinite()), lengths, "a number >= 0"),
    ):
        if bad is not None and column is not None:
            check_each(name, column, bad & rows, expected)


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


def check_shapes(
    rewards: Tensor,
    group_ids: Tensor,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
) -> None:
    """Raise for the first argument whose shape, type or device is wrong."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}: expected one dimension")
    check_column("group_ids", group_ids, rewards, integral=True)
    check_column("trajectory_ids", trajectory_ids, rewards, integral=True)
    check_column("lengths", lengths, rewards, integral=False)
    check_column("valid", valid, rewards, integral=False)


def check_all(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int | None,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    options: Options,
) -> int:
    """Check shapes and values, and return the number of groups. Makes a GPU wait."""
    check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
    groups = count_groups(group_ids) if num_groups is None else num_groups
    check_values(rewards, group_ids, groups, lengths, valid)
    if options.singleton == "error" and (options.center, options.scale) != ("none", "none"):
        check_singletons(group_ids, trajectory_ids if options.pool == "trajectory" else None, valid)
    return groups
