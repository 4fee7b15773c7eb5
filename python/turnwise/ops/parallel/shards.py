"""The softmax of logits whose columns are split over a group: state of a shard, its combination, its gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.ops.logprob import tiles
from turnwise.ops.logprob.tiles import Softmax, Tile, Upstream
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
# One shard
# ---------------------------------------------------------------------------------------------------------------------
def scan(tile: Tile, entropy: bool, backend: str) -> Tensor:
    """Compute the states ``[1, 4, n]`` of a tile that holds all of the shard's columns."""
    if backend == "native":
        state = tiles.new_state(tile.logits.shape[0], tile.logits)
        tiles.scan(tile, state, entropy)
        return state[None]
    if backend == "triton":
        from turnwise.ops.logprob import triton as logprob_triton

        return logprob_triton.scan(tile, entropy)
    return _scan_reference(tile)


def grad(tile: Tile, upstream: Upstream, backend: str, inplace: bool = False) -> Tensor:
    """Compute the gradient of a tile's logits, in their dtype; ``inplace`` writes it over them (not for ``torch``)."""
    if backend == "torch":
        return _grad_reference(tile, upstream).to(tile.logits.dtype)
    out = tile.logits if inplace else torch.empty_like(tile.logits, memory_format=torch.contiguous_format)
    if backend == "native":
        tiles.grad(tile, upstream, out)
    else:
        from turnwise.ops.logprob import triton as logprob_triton

        logprob_triton.grad(tile, upstream, out)
    return out


def _scaled(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """The scaled logits ``x``, 0 where ignored; the tokens that are not; and the derivative of the cap."""
    kept = tile.targets != tile.ignore
    logits = tile.logits.to(torch.promote_types(tile.logits.dtype, torch.float32))
    if tile.bias is not None:
        logits = logits + tile.bias
    x = torch.where(kept[:, None], logits, 0.0)
    if not tile.cap:
        return x * tile.scale, kept, torch.ones_like(x[:1])
    t = torch.tanh(x / tile.cap)
    return tile.cap * tile.scale * t, kept, 1 - t * t


def _scan_reference(tile: Tile) -> Tensor:
    x, _, _ = _scaled(tile)
    x = x.double()
    top = x.amax(1)
    relative = x - torch.where(top == -torch.inf, 0.0, top)[:, None]
    products = torch.where(relative == -torch.inf, 0.0, relative.exp() * relative)
    owned = (tile.targets >= 0) & (tile.targets < x.shape[1])
    picked = x.gather(1, torch.where(owned, tile.targets, 0)[:, None])[:, 0]
    return torch.stack([top, relative.exp().sum(1), products.sum(1), torch.where(owned, picked, torch.nan)])[None]


def _grad_reference(tile: Tile, upstream: Upstream) -> Tensor:
    x, kept, slope = _scaled(tile)
    log = x - upstream.lse[:, None]
    p = log.exp()
    d = -upstream.grad_logprob[:, None] * p
    if upstream.entropy is not None and upstream.grad_entropy is not None:
        finite = torch.where(p == 0, 0.0, log)
        d = d - upstream.grad_entropy[:, None] * p * (finite + upstream.entropy[:, None])
    owned = (tile.targets >= 0) & (tile.targets < x.shape[1])
    index = torch.where(owned, tile.targets, 0)[:, None]
    d = d.scatter_add(1, index, torch.where(owned, upstream.grad_logprob, 0.0)[:, None].to(d.dtype))
    return torch.where(kept[:, None], d * slope * tile.scale, 0.0)


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
