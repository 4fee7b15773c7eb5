"""The LM head with a frozen weight, as under LoRA: the forward also makes the slope of hidden, chunk by chunk.

A token's log-probability has a gradient with respect to its hidden row, and the upstream gradient only scales it. So
the backward needs no logits: two products in all, where recomputed logits take three. The target's term is computed
from the log-probability, because ``1 - p[t]`` loses its digits where ``p[t]`` is near 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.ops.logprob.linear_chunks import Head, spread
from turnwise.ops.logprob.tiles import Softmax, Tile, Upstream


def serves(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if only hidden needs a gradient. Float16 gradients underflow next to a likely target."""
    needed = torch.is_grad_enabled() and hidden.requires_grad
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    return needed and frozen and hidden.dtype in (torch.float32, torch.bfloat16)


def forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    entropy: bool,
    max_memory: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy`` (``[0]`` if not requested), and the slope ``[M, H]`` of hidden."""
    softmax = Softmax(temperature, softcap, ignore_index)
    whole = Head(hidden, weight, targets, bias, positions, softmax, max_memory=max_memory)
    head, keep = whole.trained()
    slope, parts = head.hidden.new_empty(head.tokens, head.hidden.shape[1]), []
    chunks = head.chunks() or [slice(0, 0)]
    space = head.space(chunks)
    for chunk in chunks:
        tile = head.tile(head.rows(chunk), chunk, space)
        parts.append(head.finish(head.kernels.scan(tile, entropy), chunk, entropy))
        logprob, lse, _ = parts[-1]
        d = head.gradient(tile, Upstream(lse, torch.ones_like(lse), None, None))
        _set_target(d, tile, logprob, lse)
        head.products.hidden_gradient(slope[chunk], d, head.weight)
        del tile, d  # before the next ones are made
    logprob, lse, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
    if keep is None:
        return logprob, lse, entropies, slope
    logprob, lse, slope = (spread(x, keep, whole.tokens) for x in (logprob, lse, slope))
    return logprob, lse, spread(entropies, keep, whole.tokens) if entropy else entropies, slope


def _set_target(d: Tensor, tile: Tile, logprob: Tensor, lse: Tensor) -> None:
    """Write the gradient ``1 - p[t]`` of the target's logit, exact near 0."""
    term = -torch.expm1(logprob) * tile.scale  # 0 for an ignored token, whose log-probability is 0
    if tile.cap:
        term *= 1 - ((logprob + lse) / (tile.scale * tile.cap)) ** 2
    targets = tile.targets.long().clamp(0, d.shape[1] - 1)  # of an id out of range the log-probability is NaN
    d.scatter_(1, targets[:, None], term.to(d.dtype)[:, None])


def backward(grad_logprob: Tensor, slope: Tensor, like: Tensor, positions: Tensor | None) -> Tensor:
    """Compute the gradient of hidden, in the shape of ``like``."""
    rows = torch.empty_like(slope)
    torch.mul(slope, grad_logprob[:, None], out=rows)  # in float32, rounded once
    rows.masked_fill_((grad_logprob == 0)[:, None], 0.0)  # the token does not train, so even NaN logits give 0
    if positions is None:
        return rows
    return like.new_zeros(like.shape).index_put_((positions,), rows, accumulate=True)  # adds in a fixed order
