"""Compute the LM head tile by tile: torch's BLAS makes the products, the compiled module does the rest in the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core
from turnwise.ops.logprob.choice import FEW, Sizes, Tiles, choose, choose_on_cpu, device_of
from turnwise.ops.logprob.tiles import Softmax, Tile, Upstream, add_narrow, finish, grad, new_state, scan


def _dense(matrix: Tensor) -> Tensor:
    """Copy a matrix unless its rows or its columns are contiguous and don't overlap. BLAS takes no other layout."""
    for x in (matrix, matrix.t()):
        if x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
            return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


_adds_wide = True  # False once torch has rejected adding a narrow product to a float32 matrix


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` (narrow, on a GPU) to ``total`` (float32), in the product's own kernel if torch can."""
    global _adds_wide
    if _adds_wide:
        try:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        except RuntimeError as error:  # some releases want all inputs of one dtype
            if "same dtype" not in str(error):
                raise
            _adds_wide = False
        else:
            return
    total.add_(torch.mm(left, right, out_dtype=torch.float32))


class Products:
    """The three matrix products of ``hidden [n, H]``, ``weight [v, H]`` and the gradients ``d [n, v]`` of logits."""

    def __init__(self, hidden: Tensor) -> None:
        self.on_gpu = native_core(hidden)[0] == "cuda"
        self.wide = hidden.dtype is torch.float32
        self.dtype = torch.float32 if self.on_gpu else hidden.dtype  # of the logits
        # oneDNN's float32 product `x @ w.T`, on some CPUs twice as fast as MKL's. None if torch lacks it.
        self.linear: Any = None
        if self.wide and hidden.is_cpu and not self.on_gpu and torch.backends.mkldnn.is_available():
            self.linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

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
            _add_product(total, d, weight)
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


def cut(whole: slice, size: int) -> list[slice]:
    """Cut a range into parts of ``size``; the last one may be shorter."""
    return [slice(i, min(i + size, whole.stop)) for i in range(whole.start, whole.stop, size)]


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

    @property
    def sizes(self) -> Sizes:
        copied = self.positions is not None or self.softmax.ignore_index is not None
        return Sizes(self.tokens, self.hidden.shape[1], self.vocabulary, self.hidden.element_size(), copied)

    def tiles(self, backward: bool) -> Tiles:
        if not self.products.on_gpu:
            return choose_on_cpu(self.sizes, backward)
        tiles = choose(self.sizes, device_of(self.hidden), backward)
        return tiles._replace(rows=tiles.group) if self.triton else tiles  # Triton's kernel writes only gradients

    def blocks(self, size: int) -> list[slice]:
        return cut(slice(0, self.tokens), size)

    def columns(self, width: int) -> list[slice]:
        return cut(slice(0, self.vocabulary), width)

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
    tiles = head.tiles(backward=False)
    blocks = head.blocks(tiles.rows)
    states = [new_state(block.stop - block.start, head.hidden) for block in blocks]
    for columns in head.columns(tiles.columns):
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

    def sums(self, block: slice) -> Tensor:
        """Float32 zeros ``[n, H]`` for the hidden rows of a block: part of the gradient itself if that serves."""
        if self.head.positions is None and self.hidden.dtype is torch.float32:
            return self.hidden[block]
        size = block.stop - block.start, self.head.hidden.shape[1]
        return torch.zeros(size, dtype=torch.float32, device=self.hidden.device)

    def keep_hidden(self, block: slice, sums: Tensor) -> None:
        """Store or add the sums of a block in the gradient of hidden. A position may occur more than once."""
        positions = self.head.positions
        if positions is None:
            self.hidden[block].copy_(sums)  # nothing to do for part of the gradient itself
        else:
            # On a GPU index_put_ sorts the positions, so the order of sums is fixed; index_add_ has no fixed order.
            self.hidden.index_put_((positions[block],), sums.to(self.hidden.dtype), accumulate=True)

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
    tiles = head.tiles(backward=True)
    spans = head.blocks(tiles.span)
    weight = gradients.weight
    if not spans:
        weight.zero_()
    if len(spans) > FEW and weight.dtype is not torch.float32:  # sums of so many parts lose too much
        weight = torch.empty_like(weight, dtype=torch.float32)
    for span in spans:
        sums = gradients.sums(span) if gradients.need_hidden else None
        for columns in head.columns(tiles.columns):
            _tile_backward(head, gradients, upstream, tiles, span, columns, sums, weight)
        if sums is not None:
            gradients.keep_hidden(span, sums)
        del sums  # before the next ones are made
    if weight is not gradients.weight:
        gradients.weight.copy_(weight)


def _tile_backward(
    head: Head,
    gradients: Gradients,
    upstream: Upstream,
    tiles: Tiles,
    span: slice,
    columns: slice,
    sums: Tensor | None,
    weight: Tensor,
) -> None:
    """Process all tokens of a span for some columns, so that the gradient of those weights is written once."""
    products, part = head.products, head.weight[columns]
    groups = cut(span, tiles.group)
    several = gradients.need_weight and len(groups) > 1 and weight.dtype is not torch.float32
    total = torch.empty_like(part, dtype=torch.float32) if several else None
    for group in groups:
        # Gradient of the group's logits: of one tile, or of several that are written side by side.
        rows, tokens = head.rows(group), group.stop - group.start
        if tokens <= tiles.rows:
            d = head.recompute_gradient(rows, group, columns, upstream.rows(group))
        else:
            d = part.new_empty(tokens, part.shape[0])
            for block in cut(group, tiles.rows):
                inner = slice(block.start - group.start, block.stop - group.start)
                head.recompute_gradient(rows[inner], block, columns, upstream.rows(block), d[inner])
        # Gradients of its hidden rows, and of the weight's.
        gradients.add_bias(columns, d)
        if sums is not None:
            products.add_hidden(sums[group.start - span.start : group.stop - span.start], d, part)
        if total is not None:
            products.weight_gradient(total, d, rows, add=group is not groups[0])
        elif gradients.need_weight:
            products.weight_gradient(weight[columns], d, rows, add=group.start > 0)
        del rows, d  # before the next ones are made
    if total is not None and span.start > 0:
        weight[columns] += total
    elif total is not None:
        weight[columns] = total
