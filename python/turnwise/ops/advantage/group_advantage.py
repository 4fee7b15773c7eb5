"""Compute advantages of rewards within groups: ``A = (r - centre) / scale``, with statistics in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.advantage.checks import (
    check_all,
    check_count,
    check_rule,
    check_shapes,
    check_types,
    count_groups,
    is_integral,
)
from turnwise.ops.advantage.reference import GroupColumns, GroupOptions, reference
from turnwise.ops.common import dispatch as backends
from turnwise.ops.common.dispatch import native_core, select_backend, stream_of
from turnwise.ops.common.layout import check_memory, check_optional, sees_values, transform_reason
from turnwise.utils.grouping import CENTERS, MODES, POOLS, SCALES, SINGLETONS


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------
def _as(column: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the column itself if dtype and layout fit, else a contiguous copy of that dtype."""
    return column if column.dtype is dtype and column.is_contiguous() else column.to(dtype).contiguous()


def kernel_columns(c: GroupColumns) -> GroupColumns:
    """Convert the columns to the types that the kernels read."""
    return GroupColumns(
        _as(c.rewards, c.rewards.dtype if c.rewards.is_floating_point() else torch.float32),
        _as(c.group_ids, torch.int64),
        -1 if c.num_groups is None else c.num_groups,
        None if c.trajectory_ids is None else _as(c.trajectory_ids, torch.int64),
        None if c.lengths is None else _as(c.lengths, torch.float64),
        None if c.valid is None else _as(c.valid, torch.bool),
    )


def _run(c: GroupColumns, modes: Modes, numbers: Numbers, backend: str) -> Tensor:
    """Run a kernel on columns that have the types of the kernels."""
    advantages = torch.empty_like(c.rewards)
    if backend == "triton":
        from turnwise.ops.advantage import triton as group_advantage_triton

        group_advantage_triton.run(c, advantages, modes, numbers)
        return advantages
    device, core = native_core(c.rewards)
    columns = c.rewards, c.group_ids, advantages, *c[2:]
    if device == "cpu":
        core.group_advantage(*columns, core.GroupAdvantageRule(*modes, *numbers), torch.get_num_threads())
        return advantages
    size = core.cuda_group_advantage_workspace(c.rewards.shape[0], c.num_groups, modes[0], modes[1] == 3)
    space = torch.empty(size, dtype=torch.uint8, device=c.rewards.device)
    core.cuda_group_advantage(*columns, core.GroupAdvantageRule(*modes, *numbers), space, stream_of(c.rewards))
    return advantages


Modes = tuple[bool, int, int, int]  # pooled by trajectory, center, scale, singleton
Numbers = tuple[int, float, float]  # ddof, eps, min_std
Rule = tuple[str, str, str, str, int, float, float]  # the fields of GroupOptions
_checked_rules: dict[Rule, Any] = {}
"""Checked rules, in the form that the compiled module takes."""


def _run_unchecked(rewards: Tensor, group_ids: Tensor, num_groups: int | None, rule: Rule) -> Tensor | None:
    """Pass rewards and ids to the compiled module without checks first, which take longer than a small batch.

    Returns ``None`` if the module can't take them as they are, or finds something wrong.
    """
    if num_groups is None:
        num_groups = -1
    elif not isinstance(num_groups, int) or num_groups < 0:
        return None
    try:
        checked = _checked_rules.get(rule) or _cache(GroupOptions(*rule))
        advantages = torch.empty_like(rewards)
        backends.extension.group_advantage(
            rewards, group_ids, advantages, num_groups, None, None, None, checked, torch.get_num_threads()
        )
    except (ValueError, TypeError):
        return None
    return advantages


def _cache(o: GroupOptions) -> Any:
    """Check a rule, and cache it if its numbers are plain Python numbers, which are few and never change."""
    check_rule(o, None, None)
    checked = backends.extension.GroupAdvantageRule(*kernel_rule(o))
    if type(o.ddof) is int and type(o.eps) is type(o.min_std) is float and len(_checked_rules) < 1000:
        _checked_rules[o] = checked
    return checked


def kernel_rule(o: GroupOptions) -> tuple[Any, ...]:
    """The options as the compiled module takes them: four modes and three numbers."""
    return *MODES[o.pool, o.center, o.scale, o.singleton], o.ddof, o.eps, o.min_std


def _kernel(c: GroupColumns, modes: Modes, numbers: Numbers, backend: str) -> Tensor:
    try:
        if not (is_integral(c.group_ids) and (c.trajectory_ids is None or is_integral(c.trajectory_ids))):
            raise TypeError("group_ids and trajectory_ids: expected integers")
        if backend == "triton":
            check_shapes(c)
            check_memory(**c._replace(num_groups=None)._asdict())
        if (
            c.lengths is not None
            and c.rewards.is_cpu
            and c.lengths.is_floating_point()
            and bool(c.lengths.isinf().any())
        ):
            raise ValueError("lengths: expected finite numbers")
        return _run(kernel_columns(c), modes, numbers, backend)
    except (ValueError, TypeError):
        # The kernel reports only that something is wrong. The slow checks find the value.
        check_shapes(c)
        pooled, center, scale, singleton = modes
        options = GroupOptions(POOLS[pooled], CENTERS[center], SCALES[scale], SINGLETONS[singleton], *numbers)
        if c.rewards.is_cpu:
            check_all(c, options)
        raise


_op = torch.library.custom_op(
    "turnwise::group_advantage",
    lambda *flat: _kernel(GroupColumns(*flat[:6]), flat[6:10], flat[10:13], flat[13]),
    mutates_args=(),
    schema="(Tensor rewards, Tensor group_ids, SymInt? num_groups, Tensor? trajectory_ids, Tensor? lengths, "
    "Tensor? valid, bool by_trajectory, SymInt center, SymInt scale, SymInt singleton, SymInt ddof, float eps, "
    "float min_std, str backend) -> Tensor",
)


@_op.register_fake
def _fake(rewards: Tensor, *_: object) -> Tensor:
    return rewards.new_empty(rewards.shape, dtype=rewards.dtype if rewards.is_floating_point() else torch.float32)


def _reference(c: GroupColumns, options: GroupOptions) -> Tensor:
    """Check the arguments, then run the plain PyTorch version."""
    check_shapes(c)
    trajectories = None if c.trajectory_ids is None else c.trajectory_ids.long()
    c = c._replace(group_ids=c.group_ids.long(), trajectory_ids=trajectories)  # torch needs int64 to index
    if sees_values(c.rewards):
        c = c._replace(num_groups=check_all(c, options))
    elif c.num_groups is None:
        c = c._replace(num_groups=count_groups(c.group_ids))
    return reference(c, options)


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
    """Compute advantages ``[B]`` of ``rewards [B]`` within groups, ``(r - centre) / scale``, in the rewards' dtype.

    - ``group_ids [B]``: integers in ``[0, num_groups)``, as :func:`factorize` returns them. Without ``num_groups`` the
      largest id sets the number of groups.
    - ``valid [B]``: rows where it is false are left out of the statistics and get 0.
    - ``pool``: ``"rows"`` counts every row. ``"trajectory"`` counts each trajectory (``trajectory_ids [B]`` integers)
      once within its group, with the mean of its rows, and gives all its rows that one advantage.
    - ``center``: ``"mean"``; ``"leave_one_out"``, the mean of the others (RLOO, https://arxiv.org/abs/2402.14740);
      ``"length_weighted"``, ``sum(lengths * r) / sum(lengths)`` (OPO, https://arxiv.org/abs/2505.23585), or the plain
      mean if all lengths are 0; ``"none"``.
    - ``scale``: ``"std"`` divides by the standard deviation (``ddof`` 1 or 0) plus ``eps``; ``"none"`` does not
      (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    - ``singleton``: the advantage in a group of one, unless ``center`` and ``scale`` are both ``"none"``: ``"zero"``,
      ``"raw"`` (the reward with mean 0 and standard deviation 1, so ``r / (1 + eps)``, or ``r`` without a scale) or
      ``"error"``.
    - ``min_std``: a group with a smaller deviation counts as tied and gets 0.
    - ``check=True``: checks values on a GPU too, which waits for it.

    Ties give exactly 0, unless ``center`` and ``scale`` are both ``"none"``. A group is tied if its values differ only
    by rounding: by at most ``4 eps`` times the largest magnitude of its rewards, where ``eps`` is 2**-52 for float64
    and 2**-23 for other types (2**-31 or more for means of trajectories on a GPU).

    Statistics are float64, of offsets from a member of the group, so rewards far from 0 lose no accuracy. On a GPU they
    are exact sums of offsets in steps of 2**-31 of the group's span, so every run gives equal bits. No gradient flows
    to ``rewards``.

    Raises ``ValueError`` on the CPU for rewards of valid rows that are not finite, ids out of range, negative lengths,
    and groups of one under ``singleton="error"``. On a GPU without ``check``, such a row or its group gets NaN, and ids
    must be below ``B`` if ``num_groups`` is not given.

    Example: ``group_advantage(torch.tensor([1., 0., 1., 1.]), torch.zeros(4, dtype=torch.int64))`` gives
    ``[.499999, -1.499997, .499999, .499999]``.
    """
    rule = pool, center, scale, singleton, ddof, eps, min_std
    bare = trajectory_ids is None and lengths is None and valid is None
    # The dispatcher and unneeded checks cost more than a small batch does, so plain tensors skip them.
    plain = type(rewards) is Tensor and isinstance(group_ids, Tensor) and not torch.compiler.is_compiling()
    if plain and bare and not check and backend is None and rewards.is_cpu and backends.native_by_default():
        advantages = _run_unchecked(rewards, group_ids, num_groups, rule)
        if advantages is not None:
            return advantages
    columns = GroupColumns(rewards, group_ids, num_groups, trajectory_ids, lengths, valid)
    return compute_group_advantage(columns, GroupOptions(*rule), check, backend)


def compute_group_advantage(c: GroupColumns, options: GroupOptions, check: bool, backend: str | None) -> Tensor:
    """Check the arguments of :func:`group_advantage`, choose the backend, and compute the advantages."""
    if not isinstance(c.rewards, Tensor) or not isinstance(c.group_ids, Tensor):
        kinds = type(c.rewards).__name__, type(c.group_ids).__name__
        raise TypeError(f"rewards and group_ids: expected tensors, got {kinds[0]} and {kinds[1]}")
    check_rule(options, c.trajectory_ids, c.lengths)
    check_optional(trajectory_ids=c.trajectory_ids, lengths=c.lengths, valid=c.valid)
    if c.num_groups is not None:
        c = c._replace(num_groups=check_count(c.num_groups))
    check_types(c.rewards, c.lengths, c.valid)
    c = c._replace(rewards=c.rewards.detach(), lengths=None if c.lengths is None else c.lengths.detach())
    reason = transform_reason(backend, *c)
    chosen = select_backend("group_advantage", backend, c.rewards, native=reason, triton=reason)
    if check and not torch.compiler.is_compiling():
        check_all(c, options)
    if chosen == "torch":
        return _reference(c, options)
    rule = kernel_rule(options)
    if type(c.rewards) is Tensor and not torch.compiler.is_compiling():
        return _kernel(c, rule[:4], rule[4:], chosen)
    return torch.ops.turnwise.group_advantage(*c, *rule, chosen)
