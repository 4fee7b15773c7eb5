"""Compute advantages of rewards within groups: ``A = (r - centre) / scale``, with statistics in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.advantage.checks import (
    check_all,
    check_companions,
    check_count,
    check_shapes,
    check_types,
    count_groups,
    is_integral,
)
from turnwise.ops.advantage.reference import Options, reference
from turnwise.ops.common import dispatch as backends
from turnwise.ops.common.dispatch import native_core, select_backend, stream_of
from turnwise.ops.common.layout import check_memory, check_optional, sees_values, transform_reason
from turnwise.utils.grouping import CENTERS, MODES, POOLS, SCALES, SINGLETONS, check_options


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------
def _as(column: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the column itself if dtype and layout fit, else a contiguous copy of that dtype."""
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
    """Run a kernel. All columns already have the types that kernels read."""
    advantages = torch.empty_like(values)
    columns = (values, group_ids, advantages, num_groups, trajectory_ids, lengths, valid)
    if backend == "triton":
        from turnwise.ops.advantage import triton as group_advantage_triton

        group_advantage_triton.run(*columns, modes, numbers)
        return advantages
    device, core = native_core(values)
    if device == "cpu":
        core.group_advantage(*columns, core.GroupAdvantageRule(*modes, *numbers), torch.get_num_threads())
        return advantages
    size = core.cuda_group_advantage_workspace(values.shape[0], num_groups, modes[0], modes[1] == 3)
    space = torch.empty(size, dtype=torch.uint8, device=values.device)
    core.cuda_group_advantage(*columns, core.GroupAdvantageRule(*modes, *numbers), space, stream_of(values))
    return advantages


Rule = tuple[str, str, str, str, int, float, float]
_known_rules: dict[Rule, Any] = {}
"""Checked rules, in the form that the compiled module takes."""


def _run_as_is(rewards: Tensor, group_ids: Tensor, num_groups: int | None, rule: Rule) -> Tensor | None:
    """Pass rewards and ids to the compiled module without checks first, which take longer than a small batch.

    Returns ``None`` if the module can't take them as they are, or finds something wrong.
    """
    if num_groups is None:
        num_groups = -1
    elif not isinstance(num_groups, int) or num_groups < 0:
        return None
    try:
        checked = _known_rules.get(rule) or _know(rule)
        advantages = torch.empty_like(rewards)
        backends.extension.group_advantage(
            rewards, group_ids, advantages, num_groups, None, None, None, checked, torch.get_num_threads()
        )
    except (ValueError, TypeError):
        return None
    return advantages


def _know(rule: Rule) -> Any:
    """Check a rule, and cache it if its numbers are plain Python numbers, which are few and never change."""
    pool, center, scale, singleton, ddof, eps, min_std = rule
    check_options(pool, center, scale, ddof, eps, singleton, min_std)
    check_companions(pool, None, center, None)
    checked = backends.extension.GroupAdvantageRule(*MODES[pool, center, scale, singleton], ddof, eps, min_std)
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
        if not (is_integral(group_ids) and (trajectory_ids is None or is_integral(trajectory_ids))):
            raise TypeError("group_ids and trajectory_ids: expected integers")
        if backend == "triton":
            check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
            columns = {"trajectory_ids": trajectory_ids, "lengths": lengths, "valid": valid}
            check_memory(rewards=rewards, group_ids=group_ids, **columns)
        if lengths is not None and rewards.is_cpu and lengths.is_floating_point() and bool(lengths.isinf().any()):
            raise ValueError("lengths: expected finite numbers")
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
        # The kernel reports only that something is wrong. The slow checks find the value.
        check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
        pool = POOLS[by_trajectory]
        options = Options(pool, CENTERS[center], SCALES[scale], SINGLETONS[singleton], ddof, eps, min_std)
        if rewards.is_cpu:
            groups = None if num_groups < 0 else num_groups
            check_all(rewards, group_ids, groups, trajectory_ids, lengths, valid, options)
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
    """Check columns and rule, and convert them to the form that a kernel which fuses this op reads."""
    check_options(pool, center, scale, ddof, eps, singleton, min_std)
    check_companions(pool, trajectory_ids, center, lengths)
    check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
    columns = (
        rewards,
        _as(group_ids, torch.int64),
        num_groups,
        None if trajectory_ids is None else _as(trajectory_ids, torch.int64),
        None if lengths is None else _as(lengths, torch.float64),
        None if valid is None else _as(valid, torch.bool),
    )
    return columns, (*MODES[pool, center, scale, singleton], ddof, eps, min_std)


def _reference(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int | None,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    options: Options,
) -> Tensor:
    """Check the arguments, then run the plain PyTorch version."""
    check_shapes(rewards, group_ids, trajectory_ids, lengths, valid)
    group_ids = group_ids.long()  # torch needs int64 to index
    columns = (None if trajectory_ids is None else trajectory_ids.long(), lengths, valid)
    if sees_values(rewards):
        num_groups = check_all(rewards, group_ids, num_groups, *columns, options)
    elif num_groups is None:
        num_groups = count_groups(group_ids)
    return reference(rewards, group_ids, num_groups, *columns, options)


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
        advantages = _run_as_is(rewards, group_ids, num_groups, rule)
        if advantages is not None:
            return advantages
    if not isinstance(rewards, Tensor) or not isinstance(group_ids, Tensor):
        raise TypeError(
            f"rewards and group_ids: expected tensors, got {type(rewards).__name__} and {type(group_ids).__name__}"
        )
    check_options(pool, center, scale, ddof, eps, singleton, min_std)
    check_companions(pool, trajectory_ids, center, lengths)
    if not bare:
        check_optional(trajectory_ids=trajectory_ids, lengths=lengths, valid=valid)
    if num_groups is not None:
        num_groups = check_count(num_groups)
    check_types(rewards, lengths, valid)
    rewards, lengths = rewards.detach(), None if lengths is None else lengths.detach()
    columns = (trajectory_ids, lengths, valid)
    reason = transform_reason(backend, rewards, group_ids, *columns)
    chosen = select_backend(backend, rewards, native=reason, triton=reason)
    options = Options(pool, center, scale, singleton, ddof, eps, min_std)
    if check and not torch.compiler.is_compiling():
        check_all(rewards, group_ids, num_groups, *columns, options)
    if chosen != "torch":
        groups = -1 if num_groups is None else num_groups
        call: Any = _kernel if plain else torch.ops.turnwise.group_advantage
        return call(
            rewards, group_ids, groups, *columns, *MODES[pool, center, scale, singleton], ddof, eps, min_std, chosen
        )
    return _reference(rewards, group_ids, num_groups, *columns, options)
