"""Advantages of rewards within groups: ``A = (r - centre) / scale``, with statistics in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import extension, resolve

POOLS = ("rows", "trajectory")
CENTERS = ("mean", "leave_one_out", "none", "length_weighted")
SCALES = ("std", "none")
SINGLETONS = ("zero", "raw", "error")


class Options(NamedTuple):
    """How rewards become advantages, as :func:`group_advantage` describes it."""

    pool: str
    center: str
    scale: str
    singleton: str
    ddof: int
    eps: float
    min_std: float


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------
def _segment_sum(values: Tensor, ids: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, ids, values)


def _pool_trajectories(
    rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One entry per (group, trajectory): its mean reward, group and length; and the entry of every row."""
    pairs, entry = torch.unique(torch.stack([group_ids, trajectory_ids]), dim=1, return_inverse=True)
    count = pairs.shape[1]
    rows = _segment_sum(torch.ones_like(rewards), entry, count)
    # Offsets from the entry's smallest reward keep equal rewards exactly equal.
    base = torch.full((count,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    base = base.scatter_reduce_(0, entry, rewards, "amin")
    means = base + _segment_sum(rewards - base[entry], entry, count) / rows
    return means, pairs[0], _segment_sum(lengths, entry, count), entry


def reference(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    options: Options,
) -> Tensor:
    """Plain PyTorch in float64, any device."""
    if not rewards.is_floating_point():
        rewards = rewards.float()
    rows = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    values, groups = rewards[rows].double(), group_ids[rows]
    weights = torch.ones_like(values) if lengths is None else lengths[rows].double()
    entry = torch.arange(values.numel(), device=values.device)
    if options.pool == "trajectory":
        assert trajectory_ids is not None
        values, groups, weights, entry = _pool_trajectories(values, groups, trajectory_ids[rows], weights)

    count = _segment_sum(torch.ones_like(values), groups, num_groups)
    base = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=values.device)
    base = base.scatter_reduce_(0, groups, values, "amin")
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
            centred = offset - torch.where(total > 0, weighted, mean)[groups]
        case _:
            centred = values
    std = (_segment_sum(deviation.square(), groups, num_groups) / (count - options.ddof)).sqrt()[groups]
    divisor = std + options.eps if options.scale == "std" else torch.ones_like(std)
    tied = std < options.min_std
    if options.scale == "std":
        tied |= std == 0
    advantages = torch.where(tied, 0.0, centred / divisor)
    if options.center != "none" or options.scale != "none":
        alone = values / (1 + options.eps) if options.scale == "std" else values
        advantages = torch.where(n == 1, torch.zeros_like(alone) if options.singleton == "zero" else alone, advantages)
    result = torch.zeros(rewards.shape, dtype=torch.float64, device=rewards.device)
    result[rows] = advantages[entry]
    return result.to(rewards.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Input
# ---------------------------------------------------------------------------------------------------------------------
def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def _check_options(pool: str, center: str, scale: str, ddof: int, eps: float, singleton: str, min_std: float) -> None:
    _check_choice("pool", pool, POOLS)
    _check_choice("center", center, CENTERS)
    _check_choice("scale", scale, SCALES)
    _check_choice("singleton", singleton, SINGLETONS)
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof!r}: expected 0 or 1")
    if not eps >= 0:
        raise ValueError(f"eps={eps!r}: expected a number >= 0")
    if not min_std >= 0:
        raise ValueError(f"min_std={min_std!r}: expected a number >= 0")


def _check_companions(pool: str, trajectory_ids: object, center: str, lengths: object) -> None:
    if pool == "trajectory" and trajectory_ids is None:
        raise ValueError("trajectory_ids=None: expected an id per row, as pool='trajectory'")
    if center == "length_weighted" and lengths is None:
        raise ValueError("lengths=None: expected a length per row, as center='length_weighted'")


def _is_integral(column: Tensor) -> bool:
    dtype = column.dtype
    return dtype is torch.int64 or not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _check_column(name: str, column: Tensor | None, rewards: Tensor, integral: bool) -> None:
    if column is None:
        return
    if column.shape != rewards.shape:
        raise ValueError(f"{name} has shape {tuple(column.shape)}: expected {tuple(rewards.shape)}, as rewards")
    if column.device != rewards.device:
        raise ValueError(f"{name} is on {column.device}: expected {rewards.device}, as rewards")
    if integral and not _is_integral(column):
        raise TypeError(f"{name} has dtype {column.dtype}: expected integers")


def _check_values(
    rewards: Tensor, group_ids: Tensor, num_groups: int, lengths: Tensor | None, valid: Tensor | None
) -> None:
    """What only the values tell; CPU tensors alone, since it would make a GPU wait."""
    rows = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    for name, bad, column, expected in (
        ("rewards", ~torch.isfinite(rewards), rewards, "a finite number"),
        ("group_ids", (group_ids < 0) | (group_ids >= num_groups), group_ids, f"an id in [0, {num_groups})"),
        ("lengths", None if lengths is None else ~(lengths >= 0), lengths, "a number >= 0"),
    ):
        if bad is None or column is None:
            continue
        where = (bad & rows).nonzero()
        if where.numel():
            row = int(where[0])
            raise ValueError(f"{name}[{row}]={column[row].item()!r}: expected {expected}")


def _check_singletons(group_ids: Tensor, num_groups: int, trajectory_ids: Tensor | None, valid: Tensor | None) -> None:
    rows = torch.ones_like(group_ids, dtype=torch.bool) if valid is None else valid.bool()
    groups = group_ids[rows]
    if trajectory_ids is not None:
        groups = torch.unique(torch.stack([groups, trajectory_ids[rows]]), dim=1)[0]
    alone = (torch.bincount(groups, minlength=num_groups) == 1).nonzero()
    if alone.numel():
        raise ValueError(f"group_ids: group {int(alone[0])} has a single member, and singleton='error'")


def _check(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
) -> None:
    """Raises for the first argument that is wrong. Values are looked at on the CPU alone."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}: expected one dimension")
    _check_column("group_ids", group_ids, rewards, integral=True)
    _check_column("trajectory_ids", trajectory_ids, rewards, integral=True)
    _check_column("lengths", lengths, rewards, integral=False)
    _check_column("valid", valid, rewards, integral=False)
    if rewards.device.type == "cpu":
        _check_values(rewards, group_ids, num_groups, lengths, valid)


# ---------------------------------------------------------------------------------------------------------------------
# Native
# ---------------------------------------------------------------------------------------------------------------------
_MODES = {
    (pool, center, scale, singleton): (i == 1, j, k, m)
    for i, pool in enumerate(POOLS)
    for j, center in enumerate(CENTERS)
    for k, scale in enumerate(SCALES)
    for m, singleton in enumerate(SINGLETONS)
}


_NO_TRITON = "there are no Triton kernels for this op"


def _obstacle(rewards: Tensor) -> str:
    return "" if rewards.is_cpu else f"rewards is on {rewards.device}, and the C++ kernels run on the CPU"


def _as(column: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory where dtype and layout fit, else a copy."""
    return column if column.dtype is dtype and column.is_contiguous() else column.to(dtype).contiguous()


def _native(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    by_trajectory: bool,
    center: int,
    scale: int,
    singleton: int,
    ddof: int,
    eps: float,
    min_std: float,
) -> Tensor:
    columns = (trajectory_ids, lengths, valid)
    try:
        values = _as(rewards, rewards.dtype if rewards.is_floating_point() else torch.float32)
        if not (_is_integral(group_ids) and (trajectory_ids is None or _is_integral(trajectory_ids))):
            raise TypeError("group_ids and trajectory_ids: expected integers")
        advantages = torch.empty_like(values, requires_grad=False)
        extension.group_advantage(
            values,
            _as(group_ids, torch.int64),
            advantages,
            num_groups,
            None if trajectory_ids is None else _as(trajectory_ids, torch.int64),
            None if lengths is None else _as(lengths, torch.float64),
            None if valid is None else _as(valid, torch.bool),
            by_trajectory,
            center,
            scale,
            singleton,
            ddof,
            eps,
            min_std,
        )
    except (ValueError, TypeError):
        # The kernel says that something is wrong; the slow checks know which value it is.
        count = num_groups if num_groups >= 0 else int(group_ids.max()) + 1 if group_ids.numel() else 0
        _check(rewards, group_ids, count, *columns)
        if SINGLETONS[singleton] == "error":
            _check_singletons(group_ids, count, trajectory_ids if by_trajectory else None, valid)
        raise
    return advantages


if extension is not None:
    _op = torch.library.custom_op("turnwise::group_advantage", _native, mutates_args=(), device_types="cpu")

    @_op.register_fake
    def _fake(rewards: Tensor, *_: object) -> Tensor:
        return rewards.new_empty(rewards.shape, dtype=rewards.dtype if rewards.is_floating_point() else torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Public function
# ---------------------------------------------------------------------------------------------------------------------
def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    num_groups: int | None = None,
    trajectory_ids: Tensor | None = None,
    lengths: Tensor | None = None,
    pool: str = "rows",
    center: str = "mean",
    scale: str = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    min_std: float = 0.0,
    valid: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Advantages ``[B]`` of ``rewards [B]`` within groups, ``(r - centre) / scale``, in the dtype of ``rewards``.

    ``group_ids [B]`` are integers in ``[0, num_groups)``, as :func:`factorize` gives them; without ``num_groups`` the
    largest id decides. Rows where ``valid [B]`` is false enter no statistics and get 0.

    ``pool``: ``"rows"``, every row counts; ``"trajectory"``, each trajectory (``trajectory_ids [B]`` integers) counts
    once within its group, with the mean of its rows, and all its rows get that one advantage.
    ``center``: ``"mean"``; ``"leave_one_out"``, the mean of the others (RLOO, https://arxiv.org/abs/2402.14740);
    ``"none"``; ``"length_weighted"``, ``sum(lengths * r) / sum(lengths)`` (OPO, https://arxiv.org/abs/2505.23585), the
    plain mean where all lengths are 0.
    ``scale``: ``"std"`` divides by the standard deviation (``ddof`` 1 or 0) plus ``eps``; ``"none"`` does not
    (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    ``singleton``: the advantage in a group of one, where groups matter at all: ``"zero"``, ``"raw"`` (mean 0 and
    standard deviation 1, so ``r / (1 + eps)``) or ``"error"``.
    ``min_std``: a group with a smaller deviation counts as tied and gets 0. Ties give exactly 0.

    Statistics are float64, of offsets from a member of the group, so rewards far from 0 cost no accuracy. On the CPU,
    rewards that are not finite (of valid rows), ids out of range and negative lengths raise ``ValueError``. No gradient
    flows to ``rewards``.

    Example: ``group_advantage(torch.tensor([1., 0., 1., 1.]), torch.zeros(4, dtype=torch.int64))`` gives
    ``[.499999, -1.499997, .499999, .499999]``.
    """
    if not isinstance(rewards, Tensor) or not isinstance(group_ids, Tensor):
        raise TypeError(
            f"rewards and group_ids: expected tensors, got {type(rewards).__name__} and {type(group_ids).__name__}"
        )
    modes = _MODES.get((pool, center, scale, singleton))
    if modes is None or ddof not in (0, 1) or not eps >= 0 or not min_std >= 0:
        _check_options(pool, center, scale, ddof, eps, singleton, min_std)
    if (pool == "trajectory" and trajectory_ids is None) or (center == "length_weighted" and lengths is None):
        _check_companions(pool, trajectory_ids, center, lengths)
    assert modes is not None
    columns = (trajectory_ids, lengths, valid)
    for name, column in zip(("trajectory_ids", "lengths", "valid"), columns, strict=True):
        if column is not None and not isinstance(column, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(column).__name__}")
    if resolve(backend, rewards, native=_obstacle(rewards), triton=_NO_TRITON) == "native":
        groups = -1 if num_groups is None else num_groups
        # The dispatcher costs more than a small batch does, so plain tensors pass it by.
        plain = type(rewards) is Tensor and not torch.compiler.is_compiling()
        call: Any = _native if plain else torch.ops.turnwise.group_advantage
        return call(rewards, group_ids, groups, *columns, *modes, ddof, eps, min_std)
    if num_groups is None:
        num_groups = int(group_ids.max()) + 1 if group_ids.numel() else 0
    _check(rewards, group_ids, num_groups, *columns)
    if singleton == "error" and (center, scale) != ("none", "none"):
        _check_singletons(group_ids, num_groups, trajectory_ids if pool == "trajectory" else None, valid)
    options = Options(pool, center, scale, singleton, ddof, eps, min_std)
    return reference(rewards.detach(), group_ids, num_groups, *columns, options)
