"""The ranks of a process group: their positions, the arguments that must agree, and sums over them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.ops.common.layout import RowLayout


class GroupRank(NamedTuple):
    """This process in a group. ``group`` is ``None`` for the default group."""

    group: Any
    rank: int
    size: int

    def reduce(self, values: Tensor, op: Any = None) -> Tensor:
        """Reduce ``values`` over the group in place; the sum by default."""
        dist.all_reduce(values, dist.ReduceOp.SUM if op is None else op, group=self.group)
        return values


def member_of(group: Any) -> GroupRank:
    """Find this process in ``group``. Raises ``RuntimeError``, ``TypeError`` or ``ValueError`` if it isn't there."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("group: no process group exists; call torch.distributed.init_process_group first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a group that this process belongs to")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        hint = "; pass mesh.get_group()" if hasattr(group, "get_group") else ""
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}{hint}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: expected a group that this process belongs to")
    return GroupRank(group, rank, dist.get_world_size(group))


# ---------------------------------------------------------------------------------------------------------------------
# Comparison
# ---------------------------------------------------------------------------------------------------------------------
_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


def exchange(member: GroupRank, describe: Callable[[], tuple[dict[str, Any], Any]]) -> list[Any]:
    """Gather what ``describe`` returns on every rank: facts that must be equal, and one that may differ.

    Returns the latter, by rank. If ``describe`` raises on one rank, every rank raises, so that none waits forever.
    Raises ``ValueError`` for facts that differ. Makes a GPU wait.
    """
    error: Exception | None = None
    message: Any
    try:
        message = describe()
    except (TypeError, ValueError) as raised:
        error = raised
        message = type(raised).__name__, str(raised)
    messages: list[Any] = [None] * member.size
    dist.all_gather_object(messages, (error is None, message), group=member.group)
    if error is not None:
        raise error
    for rank, (fine, (kind, text)) in enumerate(messages):
        if not fine:
            raise _ERRORS.get(kind, ValueError)(f"rank {rank} of the group: {text}")
    first = messages[0][1][0]
    for rank, (_, (facts, _)) in enumerate(messages):
        for name, value in facts.items():
            if value != first.get(name):
                raise ValueError(
                    f"{name}: {value} on rank {rank} of the group, expected {first.get(name)}, as on rank 0"
                )
    return [fact for _, (_, fact) in messages]


def checksum(tensor: Tensor | None) -> str:
    """Shape, dtype and a checksum of the values: equal for equal tensors. Reading them makes a GPU wait."""
    if tensor is None:
        return "None"
    data = tensor.detach().cpu().contiguous().view(-1)
    crc = zlib.crc32(data.view(torch.uint8).numpy().tobytes()) if data.numel() else 0
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} with checksum {crc:08x}"


def start_of(member: GroupRank, sizes: Iterable[int]) -> int:
    """The sum of the sizes of the ranks before this one."""
    return sum(list(sizes)[: member.rank])


# ---------------------------------------------------------------------------------------------------------------------
# Sums with a gradient
# ---------------------------------------------------------------------------------------------------------------------
class _Sum(torch.autograd.Function):
    """Sum over the group. Every rank's values reach every rank's result, so the gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, member: GroupRank) -> Tensor:
        ctx.member = member
        return member.reduce(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.member), None


class _Share(torch.autograd.Function):
    """Pass on a value that every rank holds. Each rank contributes its share of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, size: int) -> Tensor:
        ctx.size = size
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


def share(value: Tensor, member: GroupRank) -> Tensor:
    """Mark a value made of :class:`GroupRows` sums as the same on every rank, so that it counts once in gradients."""
    return _Share.apply(value, member.size)


class GroupRows(RowLayout):
    """Rows whose tokens are spread over several ranks: sums and maxima of a row cover the whole group."""

    def __init__(self, tokens: Tensor, cu_seqlens: Tensor | None, member: GroupRank, per_token: bool) -> None:
        super().__init__(tokens, cu_seqlens)
        self.member = member
        self.per_token = per_token  # the advantages; the shape of this rank's alone can't always say

    def sum(self, values: Tensor) -> Tensor:
        return _Sum.apply(super().sum(values), self.member)

    def spread_advantages(self, advantages: Tensor) -> Tensor:
        return advantages if self.per_token else self.spread(advantages)

    def max(self, values: Tensor) -> Tensor:
        return self.member.reduce(super().max(values), dist.ReduceOp.MAX)
