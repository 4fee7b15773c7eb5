"""Compute the LM head chunk by chunk: torch's BLAS makes the products, a kernel turns logits into their gradient.

A chunk is some tokens with all their logits. It takes one product for the logits, and two for the gradients of hidden
and weight. The gradient of the logits overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core
from turnwise.ops.logprob.choice import FEW, Chunks, Sizes, choose, choose_on_cpu, device_of
from turnwise.ops.logprob.steps import kernels
from turnwise.ops.logprob.tiles import Softmax, Tile, Upstream, add_narrow


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


@cache
def _is_intel() -> bool:
    """True on an Intel processor. There MKL's product is faster than oneDNN's, which copies the weight each time."""
    facts: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "Intel" in str(facts.get("cpu_name"))


class Products:
    """The three matrix products of ``hidden [n, H]``, ``weight [V, H]`` and the gradients ``d [n, V]`` of logits."""

    def __init__(self, hidden: Tensor) -> None:
        self.on_gpu = native_core(hidden)[0] == "cuda"
        self.dtype = torch.promote_types(hidden.dtype, torch.float32) if self.on_gpu else hidden.dtype  # of the logits
        # oneDNN's float32 product with a weight. None if torch lacks it, or its own product is faster.
        self.linear: Any = None
        plain = hidden.dtype is torch.float32 and hidden.is_cpu and not self.on_gpu
        if plain and torch.backends.mkldnn.is_available() and not _is_intel():
            self.linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute ``hidden @ weight.T``, in ``out`` if it is given. On a GPU always float32: rounding a logit of 30 to
        bf16 costs up to 0.06."""
        if self.linear is not None and out is None:
            return self.linear(hidden, weight, None, "none", [], "")
        if self.dtype is hidden.dtype:
            return torch.mm(hidden, weight.t(), out=out)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
        return torch.mm(hidden.float(), weight.float().t(), out=out)  # emulates the GPU

    def hidden_gradient(self, out: Tensor, d: Tensor, weight: Tensor) -> None:
        """Set ``out`` to ``d @ weight``, in the dtype of ``out``: that of ``d``, or float32."""
        if self.linear is not None:
            out.copy_(self.linear(d, weight.t(), None, "none", [], ""))
        else:
            self._multiply(out, d, weight, add=False)

    def weight_gradient(self, out: Tensor, d: Tensor, hidden: Tensor, add: bool = False) -> None:
        """Set ``out`` to ``d.T @ hidden``, or add it, in the dtype of ``out``: that of ``d``, or float32."""
        self._multiply(out, d.t(), hidden, add)

    def _multiply(self, out: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
        if self.on_gpu and not left.is_cuda:  # emulated: oneDNN multiplies what lies behind narrow rows by 0, even NaN
            left = left.contiguous()
        if out.dtype is not left.dtype:
            if not add:
                out.zero_()
            if left.is_cuda:
                _add_product(out, left, right)
            else:
                add_narrow(out, torch.mm(left, right))
        elif add:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)


class Head:
    """Hidden states, weights and targets, divided into chunks. Rows at ``positions`` are gathered chunk by chunk.

    ``backend`` makes the steps between the products; with ``"torch"`` hidden and weight are widened to float32.
    ``max_memory`` is the number of bytes that a chunk's logits may take.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        positions: Tensor | None,
        softmax: Softmax,
        backend: str = "native",
        max_memory: int | None = None,
        shard: Any = None,
    ) -> None:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if backend == "torch":
            hidden, weight = hidden.to(wide), weight.to(wide)
        self.backend, self.max_memory = backend, max_memory
        self.hidden, self.weight = _dense(hidden), _dense(weight)
        self.targets, self.positions = targets, positions
        self.bias = None if bias is None else bias.to(wide).contiguous()
        self.softmax = softmax
        self.shard = shard  # of a head that is split over processes, with `finish` and `widest`; see ops/parallel
        self.tokens, self.vocabulary = targets.shape[0], weight.shape[0]
        self.products = Products(hidden)
        self.kernels = kernels(backend)

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
        softmax = self.softmax._replace(ignore_index=None)
        tensors = self.hidden, self.weight, self.targets[keep], self.bias, positions
        return Head(*tensors, softmax, self.backend, self.max_memory, self.shard), keep

    @property
    def sizes(self) -> Sizes:
        copied = self.positions is not None or self.softmax.ignore_index is not None
        # All ranks of a head that is split cut the tokens alike.
        vocabulary = self.vocabulary if self.shard is None else self.shard.widest
        return Sizes(self.tokens, self.hidden.shape[1], vocabulary, self.hidden.element_size(), copied)

    def size(self) -> Chunks:
        """Choose the tokens of a chunk."""
        if self.products.on_gpu:
            return choose(self.sizes, device_of(self.hidden), self.max_memory)
        return choose_on_cpu(self.sizes, self.max_memory)

    def chunks(self) -> list[slice]:
        rows = self.size().rows
        return [slice(i, min(i + rows, self.tokens)) for i in range(0, self.tokens, rows)]

    def rows(self, chunk: slice) -> Tensor:
        """The hidden states ``[n, H]`` of a chunk."""
        rows = self.hidden[chunk] if self.positions is None else self.hidden.index_select(0, self.positions[chunk])
        ignored = self.softmax.ignored(self.targets[chunk])
        # A product multiplies an ignored row by 0, which would pass on its NaN.
        return rows if ignored is None else rows.masked_fill(ignored[:, None], 0.0)

    def space(self, chunks: Iterable[slice]) -> Tensor | None:
        """Make memory for the logits of any of the chunks, in turn; ``None`` where products bring their own.

        A CPU gets large memory from the kernel, which fills it with zeros first.
        """
        if self.products.on_gpu or self.products.linear is not None:
            return None
        most = max((chunk.stop - chunk.start for chunk in chunks), default=0)
        return self.hidden.new_empty((most, self.vocabulary), dtype=self.products.dtype)

    def tile(self, rows: Tensor, chunk: slice, out: Tensor | None = None) -> Tile:
        """Multiply the hidden states of a chunk by the weight: its logits ``[n, V]``, in the first rows of ``out`` if
        it is given, with what the kernels need."""
        return self.tile_of(self.products.logits(rows, self.weight, None if out is None else out[: len(rows)]), chunk)

    def tile_of(self, logits: Tensor, chunk: slice) -> Tile:
        return Tile(logits, self.bias, self.targets[chunk], *self.softmax.columns)

    def finish(self, states: Tensor, chunk: slice, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Compute ``logprob``, ``lse`` and ``entropy`` of a chunk's tokens from their states ``[splits, 4, n]``."""
        if self.shard is None:
            return self.kernels.finish(states, entropy)
        return self.shard.finish(states, self.targets[chunk])

    def gradient(self, tile: Tile, upstream: Upstream) -> Tensor:
        """Overwrite logits with their gradient, in the weight's dtype: that of a narrow one in half of each row."""
        logits, dtype = tile.logits, self.weight.dtype
        out = logits if logits.dtype is dtype else logits.view(dtype)[:, : self.vocabulary]
        self.kernels.grad(tile, upstream, out)
        return out

    def recompute_gradient(self, rows: Tensor, chunk: slice, upstream: Upstream, out: Tensor | None = None) -> Tensor:
        """Compute the logits of a chunk again, and then their gradient."""
        if self.backend != "triton":
            return self.gradient(self.tile(rows, chunk, out), upstream)
        from turnwise.ops.logprob.linear_triton import logit_gradients

        return logit_gradients(rows, self.weight, self.bias, self.targets[chunk], self.softmax, upstream)


def scan_chunks(head: Head, entropy: bool, kept: Tensor | None = None) -> Tensor:
    """Scan all logits: the states ``[splits, 4, N]`` of the tokens. Keeps the logits of the first ones in ``kept``."""
    if head.backend == "triton":
        from turnwise.ops.logprob.linear_triton import scan

        return scan(head.hidden, head.weight, head.targets, head.bias, head.positions, head.softmax, entropy)
    # A chunk without tokens makes the states of no chunk.
    chunks = head.chunks() or [slice(0, 0)]
    held = 0 if kept is None else len(kept)
    space = head.space(chunk for chunk in chunks if chunk.stop > held)
    outs = [kept[chunk] if kept is not None and chunk.stop <= held else space for chunk in chunks]
    tiles = (head.tile(head.rows(chunk), chunk, out) for chunk, out in zip(chunks, outs, strict=True))
    return torch.cat([head.kernels.scan(tile, entropy) for tile in tiles], dim=2)


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
    keeps: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy`` (``[0]`` if not requested), float32, chunk by chunk.

    If it ``keeps`` logits, also returns those of the first tokens that train, as many as the memory holds: ``[K, V]``.
    """
    softmax = Softmax(temperature, softcap, ignore_index)
    whole = Head(hidden, weight, targets, bias, positions, softmax, backend, max_memory)
    head, keep = whole.trained()
    held = head.size().keep(head.tokens) if keeps and backend != "triton" else 0
    kept = torch.empty((held, head.vocabulary), dtype=head.products.dtype, device=hidden.device)
    logprob, lse, entropies = head.finish(scan_chunks(head, entropy, kept), slice(None), entropy)
    if keep is None:
        return logprob, lse, entropies, kept
    logprob, lse = spread(logprob, keep, whole.tokens), spread(lse, keep, whole.tokens)
    return logprob, lse, spread(entropies, keep, whole.tokens) if entropy else entropies, kept


def spread(values: Tensor, keep: Tensor, tokens: int) -> Tensor:
    """Put values at the indices ``keep`` of zeros ``[tokens, ...]``."""
    return values.new_zeros(tokens, *values.shape[1:]).index_copy_(0, keep, values)


class Gradients:
    """The needed gradients of hidden, weight and bias, filled chunk by chunk, in ``dtype`` or the weight's dtype.

    ``hidden_dtype`` is the dtype of the gradient of hidden, if it is another. With ``into [V, H]`` float32 the weight's
    gradient is added to it, and ``weight`` is empty.
    """

    def __init__(
        self,
        head: Head,
        need_hidden: bool,
        need_weight: bool,
        need_bias: bool,
        dtype: torch.dtype | None = None,
        hidden_dtype: torch.dtype | None = None,
        into: Tensor | None = None,
    ) -> None:
        self.head, self.products, self.into = head, head.products, into
        hidden, weight = head.hidden, head.weight
        make = hidden.new_empty if head.positions is None else hidden.new_zeros
        self.hidden = make(hidden.shape if need_hidden else 0, dtype=hidden_dtype or dtype)
        self.weight = weight.new_empty(weight.shape if need_weight and into is None else 0, dtype=dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.bias = torch.zeros(head.vocabulary if need_bias else 0, dtype=wide, device=hidden.device)
        self.need_hidden, self.need_weight, self.need_bias = need_hidden, need_weight, need_bias
        self._total = self.weight if into is None else into
        self._begun = into is not None

    def begin(self, chunks: int) -> None:
        """Prepare for so many chunks. Sums of narrow floats over many parts lose too much, so they are float32."""
        if chunks > FEW and self.into is None and self._total.element_size() < 4:
            self._total = torch.empty_like(self.weight, dtype=torch.float32)

    def add(self, chunk: slice, rows: Tensor, d: Tensor) -> None:
        """Add the products of the gradient ``d [n, V]`` of a chunk's logits. ``rows [n, H]`` are its hidden states."""
        if self.need_bias:
            self.bias += d.sum(0, dtype=self.bias.dtype)
        if self.need_hidden and self.head.positions is None:
            self.products.hidden_gradient(self.hidden[chunk], d, self.head.weight)
        elif self.need_hidden and self.head.positions is not None:
            part = torch.empty_like(rows, dtype=self.hidden.dtype)
            self.products.hidden_gradient(part, d, self.head.weight)
            # On a GPU index_put_ sorts the positions, so the order of sums is fixed; index_add_ has no fixed order.
            self.hidden.index_put_((self.head.positions[chunk],), part, accumulate=True)
        if self.need_weight:
            self.products.weight_gradient(self._total, d, rows, add=self._begun)
            self._begun = True

    def end(self) -> Gradients:
        """Finish the sums after the last chunk."""
        if self.need_weight and not self._begun:
            self._total.zero_()
        if self._total is not self.weight and self.into is None:
            self.weight.copy_(self._total)
        return self


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
    max_memory: int | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    backend: str,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of hidden, weight and bias, ``[0]`` if not needed. Overwrites the ``kept`` logits of the
    first tokens, and recomputes those of the others."""
    softmax = Softmax(temperature, softcap, ignore_index)
    head, keep = Head(hidden, weight, targets, bias, positions, softmax, backend, max_memory).trained()
    gradients = Gradients(head, need_hidden, need_weight, need_bias)
    upstream = Upstream(lse, grad_logprob, entropy, grad_entropy)
    fill(head, gradients, upstream if keep is None else upstream.rows(keep), kept)
    return gradients.hidden, gradients.weight, gradients.bias.to(hidden.dtype if bias is None else bias.dtype)


def fill(head: Head, gradients: Gradients, upstream: Upstream, kept: Tensor | None = None) -> None:
    """Compute all gradients from those of the head's log-probabilities and entropies, and from ``kept`` logits."""
    held = 0 if kept is None else len(kept)
    chunks = head.chunks()
    gradients.begin(len(chunks))
    space = head.space(chunk for chunk in chunks if chunk.stop > held)
    for chunk in chunks:
        rows = head.rows(chunk)
        if kept is not None and chunk.stop <= held:
            d = head.gradient(head.tile_of(kept[chunk], chunk), upstream.rows(chunk))
        else:
            d = head.recompute_gradient(rows, chunk, upstream.rows(chunk), space)
        gradients.add(chunk, rows, d)
        del d  # before the next one is made
    gradients.end()
