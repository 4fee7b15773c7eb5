"""The LM head with a frozen weight, as under LoRA: the forward also makes the slope of hidden, tile by tile.

With ``z = (hidden @ weight.T) / temperature`` and ``p = softmax(z)``, a token's log-probability has the gradient
``((1 - p[t]) weight[t] - sum over v != t of p[v] weight[v]) / temperature`` with respect to its hidden row. The sum is
a product with each tile of softmax weights, added up as the softmax itself is: relative to a maximum that may grow
(Milakov and Gimelshein, https://arxiv.org/abs/1805.02867). The upstream gradient only scales the row, so the backward
needs no logits: two products in all, where recomputed logits take three. The target is computed separately, because
its terms nearly cancel where ``p[t]`` is near 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.ops.logprob.choice import choose_frozen, device_of
from turnwise.ops.logprob.linear_native import Head, cut, spread
from turnwise.ops.logprob.tiles import Softmax, finish, new_state, scan, weights


def serves(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if only hidden needs a gradient. Float16 weights underflow next to a likely target."""
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy`` (``[0]`` if not requested), and the slope ``[M, H]`` of hidden."""
    whole = Head(hidden, weight, targets, bias, positions, Softmax(temperature, softcap, ignore_index))
    head, keep = whole.trained()
    logprob, lse, entropies, slope = _forward(head, entropy)
    if keep is None:
        return logprob, lse, entropies, slope
    logprob, lse = spread(logprob, keep, whole.tokens), spread(lse, keep, whole.tokens)
    entropies = spread(entropies, keep, whole.tokens) if entropy else entropies
    return logprob, lse, entropies, slope.new_zeros(whole.tokens, slope.shape[1]).index_copy_(0, keep, slope)


def backward(grad_logprob: Tensor, slope: Tensor, like: Tensor, positions: Tensor | None) -> Tensor:
    """Compute the gradient of hidden, in the shape of ``like``."""
    rows = torch.empty_like(slope)
    torch.mul(slope, grad_logprob[:, None], out=rows)  # in float32, rounded once
    rows.masked_fill_((grad_logprob == 0)[:, None], 0.0)  # the token does not train, so even NaN logits give 0
    if positions is None:
        return rows
    return like.new_zeros(like.shape).index_put_((positions,), rows, accumulate=True)  # adds in a fixed order


def _forward(head: Head, entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slope = head.hidden.new_empty(head.tokens, head.hidden.shape[1])
    parts = [finish(new_state(0, slope), entropy)]
    on_gpu = head.products.on_gpu
    tiles = choose_frozen(head.sizes, device_of(slope)) if on_gpu else head.tiles(backward=False)
    for span in head.blocks(tiles.span):
        wide = slope.dtype is torch.float32
        total = slope[span].zero_() if wide else torch.zeros_like(slope[span], dtype=torch.float32)
        # Columns in the outer loop, so that the weight is read once.
        blocks = cut(span, tiles.rows)
        states = [new_state(block.stop - block.start, slope) for block in blocks]
        references = [state.new_empty(state.shape[1], dtype=torch.float32) for state in states]
        sums = [total[block.start - span.start : block.stop - span.start] for block in blocks]
        for columns in head.columns(tiles.columns):
            for block, *kept in zip(blocks, states, references, sums, strict=True):
                _add_tile(head, block, columns, entropy, *kept)
        for block, state, reference, block_sums in zip(blocks, states, references, sums, strict=True):
            parts.append(finish(state, entropy))
            logprob, lse, _ = parts[-1]
            _finish_slope(head, block, logprob, lse, reference, block_sums)
            if not wide:
                slope[block].copy_(block_sums)
        del total, sums, block_sums  # before the next ones are made
    logprob, lse, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
    return logprob, lse, entropies, slope


def _add_tile(
    head: Head, block: slice, columns: slice, entropy: bool, state: Tensor, reference: Tensor, sums: Tensor
) -> None:
    part, tile = head.weight[columns], head.tile(head.rows(block), block, columns)
    scan(tile, state, entropy)
    narrow = tile.logits.dtype is not part.dtype
    out = torch.empty_like(tile.logits, dtype=part.dtype) if narrow else tile.logits
    weights(tile, state, reference, sums, out)
    head.products.add_hidden(sums, out, part)


def _finish_slope(head: Head, block: slice, logprob: Tensor, lse: Tensor, reference: Tensor, sums: Tensor) -> None:
    """Turn the sums of the other tokens into the slope: scale them, and add the target's term."""
    scale, cap, _ = head.softmax.columns
    target_term = -torch.expm1(logprob) * scale  # 1 - p[t], exact near 0
    if cap:
        target_term *= 1 - ((logprob + lse) / (scale * cap)) ** 2
    targets = head.targets[block].clamp(0, head.vocabulary - 1)  # of an id out of range the log-probability is NaN
    sums.mul_(-torch.exp(reference - lse)[:, None])
    sums.addcmul_(head.weight.index_select(0, targets).float(), target_term[:, None])
