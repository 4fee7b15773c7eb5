"""The processes that train one policy together: which micro-batches are whose, and numbers over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class SingleRank:
    """One process that trains a policy by itself."""

    rank, size = 0, 1
    device: torch.device | None = None
    """Device of the forward pass; by default that of the weights."""
    first_copy = True
    """Whether this rank's shards are of the first copy of the weights, which counts where shards are summed up."""

    def places(self, count: int) -> Sequence[int | None]:
        """Return the places of this rank's micro-batches among ``count``; ``None`` for a pass that must not count.

        All ranks get equally many, because a forward or backward pass of a sharded model is one of all ranks.
        """
        return range(count)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over all ranks, the same bits on each."""
        return tensor

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all ranks in the order of :meth:`places`."""
        return items


class Ranks(SingleRank):
    """The processes of ``group``; micro-batch ``i`` is the one of rank ``i % size``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, first_copy: bool = True) -> None:
        self.group, self.device, self.first_copy = group, device, first_copy
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def places(self, count: int) -> Sequence[int | None]:
        own: list[int | None] = list(range(self.rank, count, self.size))
        return own + [None] * (-(-count // self.size) - len(own))

    def total(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts).sum(0)

    def gather(self, items: list[T]) -> list[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, items, group=self.group)
        longest = max(len(each) for each in found)
        return [each[i] for i in range(longest) for each in found if i < len(each)]


SINGLE_RANK = SingleRank()
