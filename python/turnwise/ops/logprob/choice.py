"""Choose how the LM head cuts its work: the shape of a tile of logits, and the tokens that share a product.

On a GPU the choice follows a model of each option's products, traffic and launches. On an H200 it was within 13% of the
measured times (``bench/results/2026-11-27-h200.md``), which made it superfluous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Logits of a tile on a CPU: a few MiB, which stay in the cache. The backward adds to [tokens, H] for each tile, so it
# takes more columns at once.
_CPU_ROWS, _CPU_FORWARD, _CPU_BACKWARD = 2048, 1 << 20, 1 << 21

MEMORY = 256 << 20  # bytes that an op may hold on a GPU in addition to its inputs, results and gradients
FEW = 24  # sums of up to so many parts stay in the weight's narrow dtype; over more parts they lose too much
ROWS, COLUMNS = 128, 256  # of the result that a multiprocessor makes at a time in a product of cuBLAS
_L2 = 0.7  # share of the L2 for a tile of logits
_FLOPS = 400  # operations in the time that a product takes to move one byte; half of the bytes cost nothing
_TILE = 0.1  # waves of the multiprocessors that a tile costs in addition to its product
_SMALL = MEMORY >> 5  # bytes of states and small tensors


class Device(NamedTuple):
    """The facts of a GPU that the choice reads; by default an H100's."""

    multiprocessors: int = 132
    l2: int = 50 << 20  # bytes
    capability: tuple[int, int] = (9, 0)


def device_of(tensor: Tensor) -> Device:
    """Read the facts of the tensor's GPU; those of an H100 for a CPU tensor, where tests emulate one."""
    if not tensor.is_cuda:
        return Device()
    properties = torch.cuda.get_device_properties(tensor.device)
    return Device(properties.multi_processor_count, properties.L2_cache_size, (properties.major, properties.minor))


class Sizes(NamedTuple):
    """One call: ``hidden [tokens, width]`` and ``weight [vocabulary, width]``, with ``size`` bytes per value.

    ``copied``: rows of hidden are gathered or masked, which takes a copy.
    """

    tokens: int
    width: int
    vocabulary: int
    size: int
    copied: bool = False

    @property
    def narrow(self) -> bool:
        return self.size < 4


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities
# ---------------------------------------------------------------------------------------------------------------------
class Tiles(NamedTuple):
    """How ``linear_logprob`` cuts tokens and columns. A span of tokens sees all columns before the next span starts."""

    rows: int  # tokens of a tile of logits
    columns: int  # columns of a tile
    group: int  # tokens whose logit gradients share the products of the backward: one tile, or a few narrow ones
    span: int  # tokens whose hidden gradients are summed in float32 at once

    def forward_memory(self, sizes: Sizes) -> int:
        """Bytes in addition to inputs and results."""
        rows = min(self.rows, sizes.tokens)
        logits = 4 * rows * min(self.columns, sizes.vocabulary)
        return logits + 32 * sizes.tokens + sizes.copied * sizes.size * rows * sizes.width

    def backward_memory(self, sizes: Sizes) -> int:
        """Bytes in addition to inputs and gradients, if all gradients are needed."""
        rows, group, span = (min(n, sizes.tokens) for n in (self.rows, self.group, self.span))
        columns = min(self.columns, sizes.vocabulary)
        total = 4 * rows * columns + sizes.copied * sizes.size * group * sizes.width
        if sizes.narrow or sizes.copied:  # else the sums are the gradient itself
            total += 4 * span * sizes.width
        if sizes.narrow:
            total += sizes.size * group * columns  # the narrow gradients of a group
            total += 4 * columns * sizes.width * (span > group)  # the sums of a tile's weight rows over its groups
            if sizes.tokens > FEW * span:
                total += 4 * sizes.vocabulary * sizes.width
        return total

    def slope_memory(self, sizes: Sizes) -> int:
        """Bytes in addition to inputs and the slope of hidden that a frozen weight's forward makes."""
        rows, span, columns = min(self.rows, sizes.tokens), min(self.span, sizes.tokens), self.columns
        each = 4 + sizes.size * sizes.narrow  # bytes of a logit, and of its narrow weight
        total = each * rows * min(columns, sizes.vocabulary) + sizes.copied * sizes.size * rows * sizes.width
        return total + 32 * sizes.tokens + 4 * span * sizes.width * sizes.narrow  # else the sums are the slope itself


def choose_on_cpu(sizes: Sizes, backward: bool) -> Tiles:
    """Choose tiles that stay in a CPU's cache. Each block of tokens is its own group."""
    logits = _CPU_BACKWARD if backward else _CPU_FORWARD
    columns = max(256, logits // max(min(sizes.tokens, _CPU_ROWS), 1) // 64 * 64)
    return Tiles(_CPU_ROWS, columns, _CPU_ROWS, max(sizes.tokens, 1))


def choose(sizes: Sizes, device: Device, backward: bool) -> Tiles:
    """Choose the tiles on a GPU, within :data:`MEMORY`: full waves of the multiprocessors, and logits in the L2.

    The backward reads and writes float32 sums of hidden rows once for each column of tiles, and weight rows once for
    each span. So it takes the largest spans and tiles that the memory holds.

    Example: ``choose(Sizes(8192, 4096, 151_936, 2), Device(), backward=False)``
    """
    largest = max(int(_L2 * device.l2) // (4 * ROWS * COLUMNS * device.multiprocessors), 1)  # waves of a tile
    choices: list[tuple[bool, float, Tiles]] = []  # too large, bytes of work, tiles
    for rows in {_part(sizes.tokens, n, ROWS) for n in (2048, 1536, 1024)}:
        for waves in range(1, largest + 1):
            # The most columns whose product takes the multiprocessors so many waves.
            across = max(waves * device.multiprocessors // -(-rows // ROWS), 1)
            columns = min(across, -(-sizes.vocabulary // COLUMNS)) * COLUMNS
            work = _waves(sizes, rows, columns, device)
            work *= 2 * ROWS * COLUMNS * device.multiprocessors * sizes.width / _FLOPS  # as bytes
            if not backward:
                choices.append((False, work, Tiles(rows, columns, rows, max(sizes.tokens, 1))))
                continue
            tiles = _backward_tiles(sizes, rows, columns)
            if tiles is not None:
                sums = 8 * sizes.tokens * -(-sizes.vocabulary // columns)
                weight = 2 * sizes.size * sizes.vocabulary * -(-sizes.tokens // tiles.group)
                work += sizes.width * (sums + weight)
                choices.append((tiles.backward_memory(sizes) > MEMORY, work, tiles))
    return min(choices)[2] if choices else Tiles(ROWS, COLUMNS, ROWS, ROWS)


def choose_frozen(sizes: Sizes, device: Device) -> Tiles:
    """Choose the tiles of a frozen weight's forward on a GPU: those of :func:`choose`, so that the results are equal.

    A span has as many tokens as have sums that fit in :data:`MEMORY`.
    """
    rows, columns, *_ = choose(sizes, device, backward=False)
    left = MEMORY - _SMALL - Tiles(rows, columns, rows, 0).slope_memory(sizes)
    span = _part(sizes.tokens, left // (4 * sizes.width), rows) if sizes.narrow else max(sizes.tokens, rows)
    return Tiles(rows, columns, rows, span)


def _part(total: int, most: int, unit: int) -> int:
    """The size of a part, a multiple of ``unit``, if ``total`` is cut into the fewest parts of at most ``most``."""
    count = max(-(-total // max(most // unit * unit, unit)), 1)
    return max(-(-total // (count * unit)), 1) * unit


def _waves(sizes: Sizes, rows: int, columns: int, device: Device) -> float:
    """Waves of all multiprocessors for all logits, with those that the last tiles of each kind leave half idle."""
    total = 0.0
    for n in (rows, sizes.tokens % rows):
        for v in (columns, sizes.vocabulary % columns):
            count = (sizes.tokens // rows if n == rows else 1) * (sizes.vocabulary // columns if v == columns else 1)
            if n and v:
                total += count * (-(-(-(-n // ROWS) * -(-v // COLUMNS)) // device.multiprocessors) + _TILE)
    return total


def _backward_tiles(sizes: Sizes, rows: int, columns: int) -> Tiles | None:
    """The fewest spans, each one group of tiles, that the memory holds; ``None`` if it holds none.

    More than :data:`FEW` also need a sum of the weight's gradient.
    """
    if not sizes.narrow:  # a tile of float32 logits becomes its own gradient
        span = sizes.tokens if not sizes.copied else _part(sizes.tokens, MEMORY // 2 // (8 * sizes.width), rows)
        tiles = Tiles(rows, columns, rows, max(span, rows))
        return tiles if tiles.backward_memory(sizes) <= MEMORY else None
    blocks = -(-sizes.tokens // rows)
    for count in range(1, max(blocks, 1) + 1):
        span = max(-(-blocks // count), 1) * rows
        tiles = Tiles(rows, columns, span, span)
        if tiles.backward_memory(sizes._replace(tokens=min(sizes.tokens, FEW * span))) <= MEMORY - _SMALL:
            return tiles
    return None


def tf32_allowed() -> bool:
    """True if torch lets cuBLAS compute float32 in TF32."""
    return torch.backends.cuda.matmul.allow_tf32


tf32_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in common/dispatch.py


def head_op(hidden: Tensor, frozen: bool = False) -> str:
    """The key of a call of the LM head in ``ON_GPU``, the table of backends.

    Float32 products have one of their own. Triton's kernels make each of three in TF32 on the tensor cores; cuBLAS uses
    those only if torch allows TF32. With a ``frozen`` weight cuBLAS makes two products and Triton three, so TF32's
    speedup must be larger.
    """
    if not hidden.is_cuda or hidden.dtype is not torch.float32 or tf32_allowed():
        return "linear_logprob"
    slower = frozen and device_of(hidden).capability < (10, 0)
    return "linear_logprob" if slower else "linear_logprob, float32"


# ---------------------------------------------------------------------------------------------------------------------
# The loss in one pass
# ---------------------------------------------------------------------------------------------------------------------
class Chunks(NamedTuple):
    """How ``linear_policy_loss`` cuts tokens and columns: a chunk of tokens keeps all its logits, in some tiles."""

    rows: int  # tokens of a chunk
    columns: int  # columns of a tile

    def memory(self, sizes: Sizes, weight: bool = True) -> int:
        """Bytes in addition to inputs and gradients. ``weight``: the weight is trained."""
        rows = min(self.rows, sizes.tokens)
        total = 4 * rows * sizes.vocabulary + sizes.copied * sizes.size * rows * sizes.width
        if sizes.narrow or sizes.copied:
            total += 4 * rows * sizes.width
        if sizes.narrow:
            total += sizes.size * rows * min(self.columns, sizes.vocabulary)
            total += 4 * sizes.vocabulary * sizes.width * (weight and sizes.tokens > FEW * self.rows)
        return total


def choose_chunks(sizes: Sizes, device: Device) -> Chunks:
    """Choose the fewest even chunks whose logits the memory holds; a chunk has at least one row of products.

    The tiles take two waves of the multiprocessors.
    """
    logits = 2 * device.multiprocessors * ROWS * COLUMNS
    each = 4 * sizes.vocabulary + (4 + sizes.copied * sizes.size) * sizes.width
    rows = _part(sizes.tokens, (MEMORY - sizes.size * logits * sizes.narrow) // each, ROWS)
    return Chunks(rows, max(logits // rows // COLUMNS, 1) * COLUMNS)


def one_pass(sizes: Sizes, chunks: Chunks, device: Device, weight: bool, triton: bool) -> bool:
    """True if the loss is expected to be faster in one pass with these chunks than in two, and within the memory.

    One pass saves one of four products, or of three if the weight is frozen (``weight`` is False). But each chunk reads
    the weight twice, and reads and writes its gradient. ``triton``: two passes would use Triton's kernels.
    """
    if chunks.memory(sizes, weight) > MEMORY:
        return False
    if triton and device.capability >= (10, 0):
        return False  # TF32's lead over float32 is too large there
    if not sizes.narrow:
        return sizes.width >= 2048 or chunks.rows >= 1024
    return sizes.width >= 2048 and chunks.rows >= (1024 if weight else 256)
