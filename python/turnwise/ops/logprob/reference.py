"""The steps of the log-probability ops in plain PyTorch: on any device, in float64 for float64 logits.

They have the names and the arguments of the steps in ``tiles`` (compiled) and ``triton``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.ops.logprob.tiles import Tile, Upstream


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


def _own_targets(tile: Tile, width: int) -> tuple[Tensor, Tensor]:
    """The tokens whose target is a column of the tile, and these columns ``[n, 1]``; 0 for the other tokens."""
    owned = (tile.targets >= 0) & (tile.targets < width)
    return owned, torch.where(owned, tile.targets, 0)[:, None]


def scan(tile: Tile, entropy: bool) -> Tensor:
    """Compute the states ``[1, 4, n]`` float64 of a tile's rows."""
    x, kept, _ = _scaled(tile)
    x = x.double()
    top = x.amax(1)
    relative = x - torch.where(top == -torch.inf, 0.0, top)[:, None]
    products = torch.where(relative == -torch.inf, 0.0, relative.exp() * relative)
    owned, index = _own_targets(tile, x.shape[1])
    picked = torch.where(owned, x.gather(1, index)[:, 0], torch.nan)
    # An ignored row has one token of probability 1, the target.
    state = torch.stack([top, relative.exp().sum(1), products.sum(1), picked])
    return torch.where(kept, state, torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=x.dtype, device=x.device)[:, None])[None]


def finish(states: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy [n]`` (``[0]`` if not requested), float32, from ``[1, 4, n]``."""
    top, total, weighted, picked = states[0]
    log = total.log()
    lse = top + log
    entropies = log - weighted / total if entropy else log[:0]
    return (picked - lse).float(), lse.float(), entropies.float()


def grad(tile: Tile, upstream: Upstream, out: Tensor) -> None:
    """Write the gradient of a tile's logits into ``out``, which may be the logits themselves."""
    x, kept, slope = _scaled(tile)
    log = x - upstream.lse[:, None]
    p = log.exp()
    d = -upstream.grad_logprob[:, None] * p
    trains = upstream.grad_logprob != 0
    if upstream.entropy is not None and upstream.grad_entropy is not None:
        finite = torch.where(p == 0, 0.0, log)
        d = d - upstream.grad_entropy[:, None] * p * (finite + upstream.entropy[:, None])
        trains = trains | (upstream.grad_entropy != 0)
    owned, index = _own_targets(tile, x.shape[1])
    d = d.scatter_add(1, index, torch.where(owned, upstream.grad_logprob, 0.0)[:, None].to(d.dtype))
    # A token that does not train gets 0, even if its logits are NaN.
    out.copy_(torch.where((kept & trains)[:, None], d * slope * tile.scale, 0.0))
