"""Grouped advantages in plain PyTorch. The tests compare the kernels with it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def tie_of(dtype: torch.dtype) -> float:
    """Return the relative difference up to which rewards of ``dtype`` count as equal: four of its roundings.

    Narrower types than float32 have coarser steps, so only equal values tie.
    """
    return 2.0**-50 if dtype is torch.float64 else 2.0**-21


class GroupColumns(NamedTuple):
    """The tensors of :func:`group_advantage`, ``[B]`` each, in the order of the compiled module."""

    rewards: Tensor
    group_ids: Tensor
    num_groups: int | None
    trajectory_ids: Tensor | None
    lengths: Tensor | None
    valid: Tensor | None


class GroupOptions(NamedTuple):
    """The options of :func:`group_advantage`."""

    pool: str
    center: str
    scale: str
    singleton: str
    ddof: int
    eps: float
    min_std: float


def _segment_sum(values: Tensor, ids: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, ids, values)


def _pool_trajectories(
    rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pool rows into entries, one per (group, trajectory): mean reward, group, length. Also gives each row's entry."""
    pairs, entry = torch.unique(torch.stack([group_ids, trajectory_ids]), dim=1, return_inverse=True)
    count = pairs.shape[1]
    rows = _segment_sum(torch.ones_like(rewards), entry, count)
    # Offsets from the entry's smallest reward keep equal rewards exactly equal.
    base = torch.full((count,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    base = base.scatter_reduce(0, entry, rewards, "amin")
    means = base + _segment_sum(rewards - base[entry], entry, count) / rows
    return means, pairs[0], _segment_sum(lengths, entry, count), entry


def _normalize(
    values: Tensor, groups: Tensor, num_groups: int, weights: Tensor, tolerance: Tensor, options: GroupOptions
) -> Tensor:
    """Compute ``(value - centre) / scale`` of each entry within its group; ties differ by at most ``tolerance [G]``."""
    # Values that are too large to square are scaled down by a power of two.
    largest = values.new_zeros(num_groups).scatter_reduce(0, groups, values.abs(), "amax")[groups]
    scale = torch.ones_like(values).masked_fill(largest > 2.0**500, 2.0**-600)
    raw, values = values, values * scale

    # Statistics of offsets from the smallest member stay accurate for rewards far from 0.
    count = _segment_sum(torch.ones_like(values), groups, num_groups)
    base = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=values.device)
    base = base.scatter_reduce(0, groups, values, "amin")
    offset = values - base[groups]
    mean = _segment_sum(offset, groups, num_groups) / count
    deviation = offset - mean[groups]
    n = count[groups]
    match options.center:
        case "mean":
            centred = deviation
        case "leave_one_out":
            centred = deviation * (n / (n - 1))
        case "length_weighted":
            total = _segment_sum(weights, groups, num_groups)
            weighted = _segment_sum(weights * offset, groups, num_groups) / total
            centred = offset - torch.where(total == 0, mean, weighted)[groups]
        case _:
            centred = values

    # Divide by the scale. Tied groups get 0, and groups of one member what `singleton` asks for.
    variance = _segment_sum(deviation.square(), groups, num_groups) / (count - options.ddof)
    std = torch.where(n > 1, variance.sqrt()[groups], 0.0)
    divisor = std + options.eps * scale if options.scale == "std" else scale
    tied = std < options.min_std * scale
    span = torch.zeros_like(base).scatter_reduce(0, groups, offset, "amax")[groups]
    if options.center != "none" or options.scale != "none":
        tied = tied | (span <= tolerance[groups] * scale)
    if options.scale == "std":
        tied = tied | (std == 0)
    advantages = torch.where(tied, 0.0, centred / divisor)
    if options.center != "none" or options.scale != "none":
        alone = raw / (1 + options.eps) if options.scale == "std" else raw
        alone = {"zero": torch.zeros_like(alone), "error": alone * torch.nan}.get(options.singleton, alone)
        advantages = torch.where(n == 1, alone, advantages)
    return torch.where(span.isfinite(), advantages, torch.nan)


def reference(columns: GroupColumns, options: GroupOptions) -> Tensor:
    """Compute the advantages ``[B]`` in plain PyTorch: float64 inside, any device. ``num_groups`` is given."""
    rewards, group_ids, num_groups, trajectory_ids, lengths, valid = columns
    assert num_groups is not None
    if not rewards.is_floating_point():
        rewards = rewards.float()
    values, groups = rewards.double(), group_ids
    weights = torch.ones_like(values) if lengths is None else lengths.double()
    # Rows that count in no group get one of their own, as torch.func can't drop rows.
    outside = (groups < 0) | (groups >= num_groups)
    weights = torch.where(weights < 0, torch.nan, weights)
    valid = torch.ones_like(outside) if valid is None else valid != 0
    counts = valid & ~outside
    values, weights = torch.where(counts, values, 0.0), torch.where(counts, weights, 0.0)
    groups, num_groups = torch.where(counts, groups, num_groups), num_groups + 1
    if num_groups > 2 * rewards.numel() + 1024:  # sparse ids could need any amount of memory
        distinct, groups = torch.unique(groups, return_inverse=True)
        num_groups = distinct.numel()
    sizes = torch.zeros(num_groups, dtype=values.dtype, device=values.device)
    sizes = sizes.scatter_reduce(0, groups, values.abs(), "amax")
    entry = torch.arange(values.numel(), device=values.device)
    if options.pool == "trajectory":
        assert trajectory_ids is not None
        values, groups, weights, entry = _pool_trajectories(values, groups, trajectory_ids, weights)

    advantages = _normalize(values, groups, num_groups, weights, tie_of(rewards.dtype) * sizes, options)
    result = torch.where(outside, torch.nan, advantages[entry])  # as the kernels give
    return torch.where(valid, result, 0.0).to(rewards.dtype)
