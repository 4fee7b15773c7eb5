"""The softmax of logits whose columns are split over a group: the combination of the states of all shards."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.ops.logprob.tiles import Softmax
from turnwise.ops.parallel.group import GroupRank


class Shard(NamedTuple):
    """One rank's columns of the vocabulary, and how to compute with them.

    Targets are shifted by the first column, so that the shard's own ids are in ``[0, width)``.
    """

    member: GroupRank
    width: int
    widest: int  # of all ranks, so that they cut the tokens into the same chunks
    softmax: Softmax
    entropy: bool
    backend: str
    max_memory: int | None = None  # bytes of a chunk's logits

    def owned(self, targets: Tensor) -> Tensor:
        """The tokens whose target is a column of this shard."""
        return (targets >= 0) & (targets < self.width)

    def finish(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combine float32 results from the states ``[splits, 4, n]`` of all ranks."""
        return combine(states, targets, self, torch.float32)


_IGNORED = -(2**62)  # far below any shifted id


def shift(softmax: Softmax, targets: Tensor, start: int) -> tuple[Softmax, Tensor]:
    """Number the targets, and the one to ignore, from the shard's first column ``start``."""
    ignored, shifted = softmax.ignored(targets), targets.long() - start
    if ignored is None:
        return softmax, shifted
    return softmax._replace(ignore_index=_IGNORED), shifted.masked_fill(ignored, _IGNORED)


# ---------------------------------------------------------------------------------------------------------------------
# The group
# ---------------------------------------------------------------------------------------------------------------------
def combine(states: Tensor, targets: Tensor, shard: Shard, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the states ``[splits, 4, n]`` of all ranks: ``logprob``, ``lse`` and ``entropy`` (``[0]`` if not wanted).

    Two all-reduces: the maximum ``[n]``, then the sums ``[4, n]`` relative to it, in float64.
    """
    own_top, own_sum, own_weighted, own_picked = states.double().unbind(1)
    top = shard.member.reduce(own_top.amax(0), dist.ReduceOp.MAX)
    reference = torch.where(top == -torch.inf, 0.0, top)
    shifts = torch.where(own_top == -torch.inf, 0.0, own_top - reference)
    factors = shifts.exp()
    # At most one split holds the target, and the others hold NaN. An id that no rank holds gives NaN.
    picked = own_picked[0]
    for other in own_picked[1:]:
        picked = torch.where(other.isnan(), picked, other)
    owned = shard.owned(targets)
    total, weighted, logit, owners = shard.member.reduce(
        torch.stack(
            [
                (factors * own_sum).sum(0),
                (factors * (own_weighted + shifts * own_sum)).sum(0),
                torch.where(owned, picked, 0.0),
                owned.double(),
            ]
        )
    )
    log = total.log()
    lse = reference + log
    logprob = torch.where(owners > 0, logit, torch.nan) - lse
    entropy = log - weighted / total if shard.entropy else log[:0]
    ignored = shard.softmax.ignored(targets)
    if ignored is not None:
        logprob, lse = logprob.masked_fill(ignored, 0.0), lse.masked_fill(ignored, 0.0)
        entropy = entropy.masked_fill(ignored, 0.0) if shard.entropy else entropy
    return logprob.to(dtype), lse.to(dtype), entropy.to(dtype)
