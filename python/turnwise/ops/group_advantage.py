"""Advantages of rewards within groups: ``A = (r - centre) / scale``, with statistics in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import backends
from .backends import native_core, resolve, stream_of
from .group_advantage_reference import CENTERS, POOLS, SCALES, SINGLETONS, Options, reference
from .streams import check_optional


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
    """What only the values tell; it makes a GPU wait."""
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


def _check_singletons(group_ids: Tensor, trajectory_ids: Tensor | None, valid: Tensor | None) -> None:
    rows = torch.ones_like(group_ids, dtype=torch.bool) if valid is None else valid.bool()
    groups = group_ids[rows]
    if trajectory_ids is not None:
        groups = torch.unique(torch.stack([groups, trajectory_ids[rows]]), dim=1)[0]
    ids, members = torch.unique(groups, return_counts=True)
    alone = ids[members == 1]
    if alone.numel():
        raise ValueError(f"group_ids: group {int(alone[0])} has a single member, and singleton='error'")


def _count_groups(group_ids: Tensor) -> int:
    """The number of groups where the caller did not say; it makes a GPU wait."""
    largest = int(group_ids.max()) if group_ids.numel() else -1
    if largest == 2**63 - 1:
        raise ValueError(f"group_ids[{int(group_ids.argmax())}]={largest}: expected an id below 2**63 - 1")
    return largest + 1


def _check_shapes(
    rewards: Tensor,
    group_ids: Tensor,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
) -> None:
    """Raises for the first argument whose shape, type or device is wrong."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}: expected one dimension")
    _check_column("group_ids", group_ids, rewards, integral=True)
    _check_column("trajectory_ids", trajectory_ids, rewards, integral=True)
    _check_column("lengths", lengths, rewards, integral=False)
    _check_column("valid", valid, rewards, integral=False)


def _check_all(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int | None,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    options: Options,
) -> int:
    """Shapes and values; the number of groups. It makes a GPU wait."""
    _check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
    groups = _count_groups(group_ids) if num_groups is None else num_groups
    _check_values(rewards, group_ids, groups, lengths, valid)
    if options.singleton == "error" and (options.center, options.scale) != ("none", "none"):
        _check_singletons(group_ids, trajectory_ids if options.pool == "trajectory" else None, valid)
    return groups


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------
_MODES = {
    (pool, center, scale, singleton): (i == 1, j, k, m)
    for i, pool in enumerate(POOLS)
    for j, center in enumerate(CENTERS)
    for k, scale in enumerate(SCALES)
    for m, singleton in enumerate(SINGLETONS)
}


def _as(column: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory where dtype and layout fit, else a copy."""
    return column if column.dtype is dtype and column.is_contiguous() else column.to(dtype).contiguous()


def _run(
    values: Tensor,
    group_ids: Tensor,
    num_groups: int,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    modes: tuple[bool, int, int, int],
    numbers: tuple[int, float, float],
    backend: str,
) -> Tensor:
    """All columns in the types that kernels read."""
    advantages = torch.empty_like(values)
    columns = (values, group_ids, advantages, num_groups, trajectory_ids, lengths, valid)
    if backend == "triton":
        from . import group_advantage_triton

        group_advantage_triton.run(*columns, modes, numbers)
        return advantages
    device, core = native_core(values)
    if device == "cpu":
        core.group_advantage(*columns, *modes, *numbers, torch.get_num_threads())
        return advantages
    size = core.cuda_group_advantage_workspace(values.shape[0], num_groups, modes[0], modes[1] == 3)
    space = torch.empty(size, dtype=torch.uint8, device=values.device)
    core.cuda_group_advantage(*columns, *modes, *numbers, space, stream_of(values))
    return advantages


Rule = tuple[str, str, str, str, int, float, float]
_known_rules: dict[Rule, Any] = {}
"""Rules that were checked, as the core takes them."""


def _run_as_is(rewards: Tensor, group_ids: Tensor, num_groups: int | None, rule: Rule) -> Tensor | None:
    """Rewards and ids alone, where the core takes them as they are: a small batch is done before they are looked at.
    ``None`` where it doesn't, or finds something wrong."""
    if num_groups is None:
        num_groups = -1
    elif num_groups < 0:
        return None
    try:
        checked = _known_rules.get(rule) or _know(rule)
        advantages = torch.empty_like(rewards)
        backends.extension.group_advantage_by_rule(
            rewards, group_ids, advantages, num_groups, checked, torch.get_num_threads()
        )
    except (ValueError, TypeError):
        return None
    return advantages


def _know(rule: Rule) -> Any:
    """Checks a rule, and keeps it where its numbers are Python's own: they are few, and never change."""
    pool, center, scale, singleton, ddof, eps, min_std = rule
    _check_options(pool, center, scale, ddof, eps, singleton, min_std)
    _check_companions(pool, None, center, None)
    checked = backends.extension.GroupAdvantageRule(*_MODES[pool, center, scale, singleton], ddof, eps, min_std)
    if type(ddof) is int and type(eps) is type(min_std) is float and len(_known_rules) < 1000:
        _known_rules[rule] = checked
    return checked


def _kernel(
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
    backend: str,
) -> Tensor:
    try:
        if not (_is_integral(group_ids) and (trajectory_ids is None or _is_integral(trajectory_ids))):
            raise TypeError("group_ids and trajectory_ids: expected integers")
        if backend == "triton":
            _check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
        return _run(
            _as(rewards, rewards.dtype if rewards.is_floating_point() else torch.float32),
            _as(group_ids, torch.int64),
            num_groups,
            None if trajectory_ids is None else _as(trajectory_ids, torch.int64),
            None if lengths is None else _as(lengths, torch.float64),
            None if valid is None else _as(valid, torch.bool),
            (by_trajectory, center, scale, singleton),
            (ddof, eps, min_std),
            backend,
        )
    except (ValueError, TypeError):
        # The kernel says that something is wrong; the slow checks know which value it is.
        _check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
        pool = POOLS[by_trajectory]
        options = Options(pool, CENTERS[center], SCALES[scale], SINGLETONS[singleton], ddof, eps, min_std)
        if rewards.is_cpu:
            groups = None if num_groups < 0 else num_groups
            _check_all(rewards, group_ids, groups, trajectory_ids, lengths, valid, options)
        raise


_op = torch.library.custom_op("turnwise::group_advantage", _kernel, mutates_args=())


@_op.register_fake
def _fake(rewards: Tensor, *_: object) -> Tensor:
    return rewards.new_empty(rewards.shape, dtype=rewards.dtype if rewards.is_floating_point() else torch.float32)


def kernel_columns(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int,
    *,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    pool: str,
    center: str,
    scale: str,
    singleton: str,
    ddof: int,
    eps: float,
    min_std: float,
) -> tuple[tuple[Tensor | int | None, ...], tuple[float, ...]]:
    """Columns and rule as a kernel that fuses this op reads them."""
    _check_options(pool, center, scale, ddof, eps, singleton, min_std)
    _check_companions(pool, trajectory_ids, center, lengths)
    _check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
    columns = (
        rewards,
        _as(group_ids, torch.int64),
        num_groups,
        None if trajectory_ids is None else _as(trajectory_ids, torch.int64),
        None if lengths is None else _as(lengths, torch.float64),
        None if valid is None else _as(valid, torch.bool),
    )
    return columns, (*_MODES[pool, center, scale, singleton], ddof, eps, min_std)


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
    check: bool = False,
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

    Statistics are float64, of offsets from a member of the group, so rewards far from 0 cost no accuracy; on a GPU
    they are exact sums of offsets in steps of 2**-31 of the group's span, equal bits run to run. On the CPU, rewards
    that are not finite (of valid rows), ids out of range, negative lengths and single members under
    ``singleton="error"`` raise ``ValueError``. On a GPU that would make the host wait, so they do with ``check=True``
    alone: otherwise such a row, or its group, gets NaN, and ids must be below ``B`` where ``num_groups`` is not given.
    No gradient flows to ``rewards``.

    Example: ``group_advantage(torch.tensor([1., 0., 1., 1.]), torch.zeros(4, dtype=torch.int64))`` gives
    ``[.499999, -1.499997, .499999, .499999]``.
    """
    rule = pool, center, scale, singleton, ddof, eps, min_std
    bare = trajectory_ids is None and lengths is None and valid is None
    # The dispatcher and checks that nothing needs cost more than a small batch does: plain tensors pass them by.
    plain = type(rewards) is Tensor and isinstance(group_ids, Tensor) and not torch.compiler.is_compiling()
    if plain and bare and not check and backend is None and rewards.is_cpu and backends.native_by_default():
        advantages = _run_as_is(rewards, group_ids, num_groups, rule)
        if advantages is not None:
            return advantages
    if not isinstance(rewards, Tensor) or not isinstance(group_ids, Tensor):
        raise TypeError(
            f"rewards and group_ids: expected tensors, got {type(rewards).__name__} and {type(group_ids).__name__}"
        )
    _check_options(pool, center, scale, ddof, eps, singleton, min_std)
    _check_companions(pool, trajectory_ids, center, lengths)
    columns = (trajectory_ids, lengths, valid)
    if not bare:
        check_optional(trajectory_ids=trajectory_ids, lengths=lengths, valid=valid)
    if num_groups is not None and num_groups < 0:
        raise ValueError(f"num_groups={num_groups}: expected a count >= 0")
    chosen = resolve(backend, rewards)
    options = Options(pool, center, scale, singleton, ddof, eps, min_std)
    if check:
        _check_all(rewards, group_ids, num_groups, *columns, options)
    if chosen != "torch":
        groups = -1 if num_groups is None else num_groups
        call: Any = _kernel if plain else torch.ops.turnwise.group_advantage
        return call(
            rewards, group_ids, groups, *columns, *_MODES[pool, center, scale, singleton], ddof, eps, min_std, chosen
        )
    _check_shapes(rewards, group_ids, *columns)
    if rewards.is_cpu:
        num_groups = _check_all(rewards, group_ids, num_groups, *columns, options)
    elif num_groups is None:
        num_groups = _count_groups(group_ids)
    return reference(rewards.detach(), group_ids, num_groups, *columns, options)
