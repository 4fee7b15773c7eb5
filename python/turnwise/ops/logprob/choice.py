"""Choose the tokens of a chunk: a chunk has all its logits in memory at once, so each product is one call.

On a GPU the choice follows a model of what many small products cost more than one large product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST = {2: 512, 4: 256}  # tokens of a chunk on a CPU, by the bytes of a logit; larger chunks are no faster
CPU_MEMORY = 256 << 20  # default bytes of the logits of a chunk on a CPU, and on a GPU of less than 16 GiB
GPU_MEMORY, GPU_SHARE = 1 << 30, 1 / 64  # the same on a GPU: at most so many bytes, and this share of its memory

FEW = 24  # sums of up to so many parts stay in the weight's narrow dtype; over more parts they lose too much
ROWS, COLUMNS = 128, 256  # of the result that a multiprocessor makes at a time in a product of cuBLAS
_FLOPS = 400  # operations in the time that a product takes to move one byte; half of the bytes cost nothing


class Device(NamedTuple):
    """The facts of a GPU that the choice reads; by default an H100's."""

    multiprocessors: int = 132
    memory: int = 80 << 30  # bytes
    capability: tuple[int, int] = (9, 0)


def device_of(tensor: Tensor) -> Device:
    """Read the facts of the tensor's GPU; those of an H100 for a CPU tensor, where tests emulate one."""
    if not tensor.is_cuda:
        return Device()
    properties = torch.cuda.get_device_properties(tensor.device)
    return Device(properties.multi_processor_count, properties.total_memory, (properties.major, properties.minor))


class Sizes(NamedTuple):
    """One call: ``hidden [tokens, width]`` and ``weight [vocabulary, width]``, with ``size`` bytes per value.

    ``copied``: rows of hidden are gathered or masked, which takes a copy.
    """

    tokens: int
    width: int
    vocabulary: int
    size: int
    copied: bool = False

    def row_memory(self, logit: int) -> int:
        """Bytes that a token of a chunk takes: its logits of ``logit`` bytes each, and copies of its hidden row."""
        return logit * self.vocabulary + 2 * self.copied * self.size * self.width


class Chunks(NamedTuple):
    """Tokens of a chunk: those to take, and the most that the memory holds."""

    rows: int
    most: int

    def keep(self, tokens: int) -> int:
        """Tokens whose logits the memory holds until the backward, whole chunks of them, beside those of a chunk."""
        return tokens if tokens <= self.most else max(self.most - self.rows, 0) // self.rows * self.rows


def default_memory(device: Device | None) -> int:
    """Bytes that the logits of a chunk may take if the caller names no number; ``None`` is a CPU.

    It depends on the whole memory, not on what is free at the moment, so equal calls give equal bits.
    """
    if device is None:
        return CPU_MEMORY
    return max(CPU_MEMORY, min(GPU_MEMORY, int(GPU_SHARE * device.memory)))


def choose_on_cpu(sizes: Sizes, max_memory: int | None) -> Chunks:
    """Choose a sixteenth of the tokens, but at least :data:`LEAST`, within the memory."""
    size = sizes.size
    most = max((max_memory or default_memory(None)) // sizes.row_memory(size), 1)
    return Chunks(min(max(LEAST.get(size, LEAST[4]), sizes.tokens // 16), most), most)


def choose(sizes: Sizes, device: Device, max_memory: int | None) -> Chunks:
    """Choose the tokens of a chunk on a GPU, with float32 logits.

    The product with the weight takes whole waves of the multiprocessors, and each chunk reads and writes the weight's
    gradient once. The choice makes the sum of both smallest.

    Example: ``choose(Sizes(8192, 4096, 151_936, 2), Device(), None)``
    """
    most = max((max_memory or default_memory(device)) // sizes.row_memory(4), 1)
    if most < ROWS:
        return Chunks(most, most)
    wave = 2 * ROWS * COLUMNS * device.multiprocessors / _FLOPS  # as bytes, for each column of the vocabulary
    chunk = 2 * sizes.size * sizes.width  # bytes, for each column of the vocabulary
    fits = min(most // ROWS, -(-sizes.tokens // ROWS)) * ROWS

    def cost(rows: int) -> tuple[float, int]:
        whole, rest = divmod(sizes.tokens, rows)
        waves = whole * _waves(rows, sizes.width, device) + _waves(rest, sizes.width, device)
        return wave * waves + chunk * -(-sizes.tokens // rows), rows

    return Chunks(min(map(cost, range(ROWS, max(fits, ROWS) + 1, ROWS)))[1], most)


def _waves(rows: int, width: int, device: Device) -> int:
    """Waves of all multiprocessors for the gradient of ``rows`` hidden states."""
    return -(-(-(-rows // ROWS) * -(-width // COLUMNS)) // device.multiprocessors)


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
