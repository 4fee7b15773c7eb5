"""Compute the LM head tile by tile: torch's BLAS makes the products, the compiled module does the rest in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core
from turnwise.ops.logprob.tiles import Softmax, Tile, Upstream, add_narrow, finish, grad, new_state, scan

_TOKENS = 2048  # rows of a tile
# Logits of a tile. CPU: a few MiB, which stay in the cache. The backward adds to [tokens, H] for each tile, so it takes
# more columns at once. GPU: enough to keep the tensor cores busy; each takes 6 bytes (float32 and narrow gradient).
_CPU_FORWARD, _CPU_BACKWARD, _GPU = 1 << 20, 1 << 21, 1 << 24
_GPU_BLOCKS = 4  # blocks per product of the weight gradient; each product reads and writes the whole weight gradient


def _onednn() -> Any:
    """oneDNN's float32 product ``x @ w.T``, on some CPUs twice as fast as MKL's. ``None`` if torch lacks it."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _dense(matrix: Tensor) -> Tensor:
    """Copy a matrix unless its rows or its columns are contiguous and don't overlap. BLAS takes no other layout."""
    for x in (matrix, matrix.t()):
        if x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
            return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


class Products:
    """The three matrix products of ``hidden [n, H]``, ``weight [v, H]`` and the gradients ``d [n, v]`` of logits."""

    def __init__(self, hidden: Tensor) -> None:
        self.on_gpu = native_core(hidden)[0] == "cuda"
        self.wide = hidden.dtype is torch.float32
        self.dtype = torch.float32 if self.on_gpu else hidden.dtype  # of the logits
        self.linear = _onednn() if self.wide and hidden.is_cpu and not self.on_gpu else None

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute ``hidden @ weight.T``. On a GPU always float32: rounding a logit of 30 to bf16 costs up to 0.06."""
        if self.linear is not None:
            return self.linear(hidden, weight, None, "none", [], "")
        if self.dtype is hidden.dtype:
            return torch.mm(hidden, weight.t())
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return torch.mm(hidden.float(), weight.float().t())  # emulates the GPU

    def add_hidden(self, total: Tensor, d: Tensor, weight: Tensor) -> None:
        """Add ``d @ weight`` to ``total`` in float32."""
        if self.linear is not None:
            total.add_(self.linear(d, weight.t(), None, "none", [], ""))
        elif self.wide:
            total.addmm_(d, weight)
        elif d.is_cuda:
            total.add_(torch.mm(d, weight, out_dtype=torch.float32))
        else:
            add_narrow(total, torch.mm(d, weight))

    def weight_gradient(self, out: Tensor, d: Tensor, hidden: Tensor, add: bool = False) -> None:
        """Set ``out`` to ``d.T @ hidden``, or add it, in the dtype of ``out``: the weight's own, or float32."""
        if out.dtype is not d.dtype:
            if not add:
                out.zero_()
            self.add_hidden(out, d.t(), hidden)
        elif self.linear is not None:
            product = self.linear(d.t(), hidden.t(), None, "none", [], "")
            out.add_(product) if add else out.copy_(product)
        elif add:
            out.addmm_(d.t(), hidden)
        else:
            torch.mm(d.t(), hidden, out=out)


class Head:
    """Hidden states, weights and targets, divided into tiles. Rows at ``positions`` are gathered block by block."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        positions: Tensor | None,
        softmax: Softmax,
        backend: str = "native",
        shard: Any = None,
    ) -> None:
        self.triton = backend == "triton"
        self.hidden, self.weight = _dense(hidden), _dense(weight)
        self.targets, self.positions = targets, positions
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.bias = None if bias is None else bias.to(wide).contiguous()
        self.softmax = softmax
        self.shard = shard  # of a head that is split over processes, with `finish` and `widest`; see ops/parallel
        self.tokens, self.vocabulary = targets.shape[0], weight.shape[0]
        self.products = Products(hidden)

    def trained(self, mask: Tensor | None = None) -> tuple[Head, Tensor | None]:
        """Drop the tokens that are ignored or masked, so that their logits are not computed.

        Also returns the indices of the tokens that are left; ``None`` if nothing was dropped. Only on a CPU: finding
        the tokens makes a GPU wait.
        """
        ignored = self.softmax.ignored(self.targets)
        kept = None if mask is None else mask != 0
        if ignored is not None:
            kept = ~ignored if kept is None else kept & ~ignored
        if kept is None or not kept.is_cpu or bool(kept.all()):
            return self, None
        keep = kept.nonzero()[:, 0]
        positions = keep if self.positions is None else self.positions[keep]
        backend = "triton" if self.triton else "native"
        softmax = self.softmax._replace(ignore_index=None)
        tensors = self.hidden, self.weight, self.targets[keep], self.bias, positions
        return Head(*tensors, softmax, backend, self.shard), keep

    def finish(self, state: Tensor, block: slice, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Compute ``logprob``, ``lse`` and ``entropy`` of a block whose tiles are all scanned."""
        return finish(state, entropy) if self.shard is None else self.shard.finish(state[None], self.targets[block])

    def blocks(self, size: int) -> list[slice]:
        return [slice(i, min(i + size, self.tokens)) for i in range(0, self.tokens, size)]

    def columns(self, backward: bool, tokens: int) -> Iterator[slice]:
        logits = _GPU if self.products.on_gpu else _CPU_BACKWARD if backward else _CPU_FORWARD
        width = max(256, logits // max(tokens, 1) // 64 * 64)
        return (slice(i, min(i + width, self.vocabulary)) for i in range(0, self.vocabulary, width))

    def rows(self, block: slice) -> Tensor:
        rows = self.hidden[block] if self.positions is None else self.hidden.index_select(0, self.positions[block])
        ignored = self.softmax.ignored(self.targets[block])
        # A product multiplies an ignored row by 0, which would pass on its NaN.
        return rows if ignored is None else rows.masked_fill(ignored[:, None], 0.0)

    def gradient(self, tile: Tile, upstream: Upstream, out: Tensor | None = None) -> Tensor:
        """Compute the gradient of a tile's logits in the weight's dtype.

        Without ``out`` it overwrites logits of that dtype, and allocates memory for logits of another.
        """
        if out is None:
            narrow = tile.logits.dtype is not self.weight.dtype
            out = torch.empty_like(tile.logits, dtype=self.weight.dtype) if narrow else tile.logits
        grad(tile, upstream, out)
        return out

    def recompute_gradient(
        self, rows: Tensor, block: slice, columns: slice, upstream: Upstream, out: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of a tile again, and then their gradient."""
        if not self.triton:
            return self.gradient(self.tile(rows, block, columns), upstream, out)
        from turnwise.ops.logprob import linear_triton as linear_logprob_triton

        bias = None if self.bias is None else self.bias[columns]
        targets = self.targets[block]
        return linear_logprob_triton.logit_gradients(
            rows, self.weight[columns], bias, targets, columns.start, self.softmax, upstream
        )

    def tile(self, rows: Tensor, block: slice, columns: slice) -> Tile:
        logits = self.products.logits(rows, self.weight[columns])
        bias = None if self.bias is None else self.bias[columns]
        return Tile(logits, bias, self.targets[block], columns.start, *self.softmax.columns)


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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy`` (``[0]`` if not requested), float32, tile by tile."""
    softmax = Softmax(temperature, softcap, ignore_index)
    whole = Head(hidden, weight, targets, bias, positions, softmax, backend)
    head, keep = whole.trained()
    results = _forward(head, entropy)
    if keep is None:
        return results
    logprob, lse, entropies = results
    logprob, lse = spread(logprob, keep, whole.tokens), spread(lse, keep, whole.tokens)
    return logprob, lse, spread(entropies, keep, whole.tokens) if entropy else entropies


def spread(values: Tensor, keep: Tensor, tokens: int) -> Tensor:
    """Put values at the indices ``keep`` of ``[tokens]`` zeros."""
    return values.new_zeros(tokens).index_copy_(0, keep, values)


def scan_blocks(head: Head, entropy: bool) -> list[Tensor]:
    """Scan all tiles: the states of the blocks of tokens, ``[4, n]`` each (``[splits, 4, n]`` on Triton)."""
    if head.triton:
        from turnwise.ops.logprob import linear_triton as linear_logprob_triton

        return [
            linear_logprob_triton.scan(
                head.hidden, head.weight, head.targets, head.bias, head.positions, head.softmax, entropy
            )
        ]
    # Columns in the outer loop, so that the weight is read once; each block keeps its softmax state.
    blocks = head.blocks(_TOKENS)
    states = [new_state(block.stop - block.start, head.hidden) for block in blocks]
    for columns in head.columns(False, min(head.tokens, _TOKENS)):
        for block, state in zip(blocks, states, strict=True):
            scan(head.tile(head.rows(block), block, columns), state, entropy)
    return states or [new_state(0, head.hidden)]


def _forward(head: Head, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    states = scan_blocks(head, entropy)
    if head.triton:
        from turnwise.ops.logprob import triton as logprob_triton

        return logprob_triton.finish(states[0], entropy)
    if len(states) == 1:
        return finish(states[0], entropy)
    logprob, lse, entropies = zip(*(finish(state, entropy) for state in states), strict=True)
    return torch.cat(logprob), torch.cat(lse), torch.cat(entropies)


class Gradients:
    """The needed gradients of hidden, weight and bias, filled tile by tile, in ``dtype`` or the weight's dtype.

    ``hidden_dtype`` is the dtype of the gradient of hidden, if it is another.
    """

    def __init__(
        self,
        head: Head,
        need_hidden: bool,
        need_weight: bool,
        need_bias: bool,
        dtype: torch.dtype | None = None,
        hidden_dtype: torch.dtype | None = None,
    ) -> None:
        self.head, self.products = head, head.products
        hidden, weight = head.hidden, head.weight
        self.hidden = hidden.new_zeros(hidden.shape if need_hidden else 0, dtype=hidden_dtype or dtype)
        self.weight = weight.new_empty(weight.shape if need_weight else 0, dtype=dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.bias = torch.zeros(head.vocabulary if need_bias else 0, dtype=wide, device=hidden.device)
        self.need_hidden, self.need_weight, self.need_bias = need_hidden, need_weight, need_bias

    def new_hidden(self, tokens: int) -> Tensor:
        """Allocate float32 sums ``[tokens, H]`` for the hidden rows of a block."""
        return torch.zeros((tokens, self.head.hidden.shape[1]), dtype=torch.float32, device=self.hidden.device)

    def keep_hidden(self, block: slice, sums: Tensor) -> None:
        """Store or add the sums of a block in the gradient of hidden. A position may occur more than once."""
        positions = self.head.positions
        values = sums.to(self.hidden.dtype)
        if positions is None:
            self.hidden[block] = values
        else:
            # On a GPU index_put_ sorts the positions, so the order of sums is fixed; index_add_ has no fixed order.
            self.hidden.index_put_((positions[block],), values, accumulate=True)

    def add_bias(self, columns: slice, d: Tensor) -> None:
        if self.need_bias:
            self.bias[columns] += d.sum(0, dtype=self.bias.dtype)


def backward(
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    lse: Tensor,
    entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of hidden, weight and bias, ``[0]`` if not needed. Recomputes the logits tile by tile."""
    softmax = Softmax(temperature, softcap, ignore_index)
    head, keep = Head(hidden, weight, targets, bias, positions, softmax, backend).trained()
    gradients = Gradients(head, need_hidden, need_weight, need_bias)
    upstream = Upstream(lse, grad_logprob, entropy, grad_entropy)
    fill(head, gradients, upstream if keep is None else upstream.rows(keep))
    return gradients.hidden, gradients.weight, gradients.bias.to(hidden.dtype if bias is None else bias.dtype)


def fill(head: Head, gradients: Gradients, upstream: Upstream) -> None:
    """Compute all gradients from those of the head's log-probabilities and entropies."""
    blocks = head.blocks(_TOKENS)
    need_hidden = gradients.need_hidden
    sums = [gradients.new_hidden(block.stop - block.start) if need_hidden else None for block in blocks]
    if not blocks:
        gradients.weight.zero_()
    for columns in head.columns(True, min(head.tokens, _TOKENS)):
        _tile_backward(head, gradients, upstream, blocks, sums, columns)
    for block, total in zip(blocks, sums, strict=True):
        if total is not None:
            gradients.keep_hidden(block, total)


def _tile_backward(
    head: Head,
    gradients: Gradients,
    upstream: Upstream,
    blocks: list[slice],
    sums: list[Tensor | None],
    columns: slice,
) -> None:
    """Process all tokens for some columns, so that the gradient of those weights is written once."""
    products, part = head.products, head.weight[columns]
    # On a GPU several blocks share one product, if their gradients are a separate narrow tensor (not float32, Triton).
    together = _GPU_BLOCKS if products.on_gpu and not (products.wide or head.triton) and gradients.need_weight else 1
    groups = [slice(i, i + together) for i in range(0, len(blocks), together)]
    total = torch.empty_like(part, dtype=torch.float32) if len(groups) > 1 and gradients.need_weight else None
    for group in groups:
        # Each block of the group: gradient of its logits, then of its hidden rows.
        whole = slice(blocks[group][0].start, blocks[group][-1].stop)
        held = part.new_empty(whole.stop - whole.start, part.shape[0]) if together > 1 else None
        for block, hidden_sums in zip(blocks[group], sums[group], strict=True):
            rows = head.rows(block)
            mine = None if held is None else held[block.start - whole.start : block.stop - whole.start]
            d = head.recompute_gradient(rows, block, columns, upstream.rows(block), mine)
            gradients.add_bias(columns, d)
            if hidden_sums is not None:
                products.add_hidden(hidden_sums, d, part)
        if gradients.need_weight:
            out = gradients.weight[columns] if total is None else total
            if held is not None:
                d, rows = held, head.rows(whole)
            products.weight_gradient(out, d, rows, add=whole.start > 0)
    if total is not None:
        gradients.weight[columns] = total
