"""One block of bytes that holds a set of weights: a header, an index in JSON, and the tensors.

The header names the writer and the number of the set, and marks a set that is being written. So a process that reads
another process's block can check before and after that it holds the expected weights.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment in bytes: each tensor begins at a multiple of it."""

_MAGIC = b"turnwise"
_HEADER = struct.Struct("<8s32sQQQ")
"""Magic, the sender's mark, sequence number (0 while weights are written), bytes of the index, bytes in all."""

Index = dict[str, tuple[str, tuple[int, ...], int]]
"""Dtype, shape and offset by name; tied tensors have one offset."""


WeightHandle = Mapping[str, Any]
"""Identifies a sender's weights and locates them. Fits into JSON: ``{"kind": "shared_memory", "pid": 17, ...}``."""


class TransferError(RuntimeError):
    """Raised if weights can't be stored, or if a handle's weights are not those that its sender stored."""


class WeightTransfer(Protocol):
    """The trainer's side. One sender holds one set of weights; ``send`` replaces the previous set."""

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Store ``weights`` (any dtype, device and strides; tied ones once), and return their handle.

        Raises :class:`TransferError` if there is no room. The previous weights may then be lost too.
        """
        ...

    def close(self) -> None:
        """Free the memory or files of the weights. May be called again."""
        ...


class BlockWriter:
    """Writes sets of weights into blocks, one set after the other, under a ``mark`` that no other writer has."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        self.sequence = 0

    def write(self, weights: Mapping[str, Tensor], block_of: Callable[[int], Tensor]) -> dict[str, Any]:
        """Fill the block ``[>= bytes]`` uint8 that ``block_of(bytes)`` returns.

        Returns mark, sequence number, bytes and sums of the weights, for a handle.
        """
        index, names, data_bytes = plan_layout(weights)
        text = json.dumps(index).encode()
        start = _aligned(_HEADER.size + len(text))
        size = start + data_bytes
        block = block_of(size)
        # Number 0 marks the block as incomplete until all tensors are written.
        self.sequence += 1
        _write_bytes(block, 0, self._header(0, len(text), size))
        _write_bytes(block, _HEADER.size, text)
        for name in names:
            _tensor_at(block, index[name], start).copy_(weights[name].detach())
        if block.is_cuda:
            torch.cuda.synchronize(block.device)  # other processes don't wait for this one's streams
        _write_bytes(block, 0, self._header(self.sequence, len(text), size))
        return {"mark": self.mark, "sequence": self.sequence, "bytes": size, "sums": checksum(weights)}

    def _header(self, sequence: int, index_bytes: int, size: int) -> bytes:
        return _HEADER.pack(_MAGIC, self.mark.encode(), sequence, index_bytes, size)


def new_block(size: int, device: torch.device) -> Tensor:
    """Allocate ``[size]`` uint8. Raises :class:`TransferError` without enough memory."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise TransferError(f"no room for {size / 2**20:.1f} MiB of weights on {device}: {error}") from error


def read_weights(block: Tensor, handle: WeightHandle) -> dict[str, Tensor]:
    """View the weights in ``block`` by name. Raises :class:`TransferError` unless they are the ones of ``handle``."""
    check_block(block, handle)
    index_bytes = _HEADER.unpack(_bytes(block, 0, _HEADER.size))[3]
    index: Index = json.loads(_bytes(block, _HEADER.size, index_bytes))
    start = _aligned(_HEADER.size + index_bytes)
    return {name: _tensor_at(block, entry, start) for name, entry in index.items()}


def check_block(block: Tensor, handle: WeightHandle) -> None:
    """Raise :class:`TransferError` unless the weights in ``block`` are those that ``handle`` names."""
    magic, mark, sequence, _, _ = _HEADER.unpack(_bytes(block, 0, _HEADER.size))
    if (magic, mark) != (_MAGIC, handle["mark"].encode()):
        raise TransferError("the memory that the handle names holds something else: its sender is gone")
    if sequence != handle["sequence"]:
        state = f"its sender's weights number {sequence}" if sequence else "half-written weights"
        raise TransferError(f"the memory of weights number {handle['sequence']} holds {state} by now")


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of the names, dtypes, shapes and sums of ``weights``. A change of any one bit changes it.

    The sum of a tensor is that of its bytes as 64-bit words, at the speed of memory on any device.
    """
    sums: dict[Any, int] = {}
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        key = storage_key(tensor)
        if key not in sums:
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)
            words = data.numel() // 8 * 8
            rest = int.from_bytes(data[words:].cpu().numpy().tobytes(), "little")
            sums[key] = int(data[:words].view(torch.int64).sum()) + rest if words else rest
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {sums[key]}\n".encode())
    return digest.hexdigest()


def plan_layout(weights: Mapping[str, Tensor]) -> tuple[Index, list[str], int]:
    """Plan the offset of each tensor, the names to copy there (one of tied ones), and the total bytes.

    Raises ``ValueError`` for tensors without memory of their own.
    """
    check_memory(weights)
    index: Index = {}
    offsets: dict[Any, int] = {}
    names, end = [], 0
    for name, tensor in weights.items():
        key = storage_key(tensor)
        if key not in offsets:
            offsets[key] = end
            end = _aligned(end + tensor.numel() * tensor.element_size())
            names.append(name)
        index[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offsets[key])
    return index, names, end


def storage_key(tensor: Tensor) -> Any:
    """A key that only tied tensors share.

    Empty tensors, and those without their own memory, count as tied only if they are the same object. So take them
    from ``state_dict(keep_vars=True)``, which makes no new objects.
    """
    if not tensor.numel() or not has_memory(tensor):
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def has_memory(tensor: Tensor) -> bool:
    """True if the elements of ``tensor`` have an address. A meta tensor and a DTensor (which FSDP makes of a parameter)
    have none: their ``data_ptr()`` is 0."""
    return not tensor.numel() or tensor.data_ptr() != 0


def check_memory(weights: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` for the first of ``weights`` without memory of its own, as its bytes can't be written."""
    for name, tensor in weights.items():
        if not has_memory(tensor):
            raise ValueError(
                f"weight {name!r} is a {type(tensor).__name__} on {tensor.device} without memory of its own: expected "
                "a plain tensor. Gather what FSDP has sharded first, on every rank: torch.distributed.checkpoint."
                "state_dict.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
            )


def _tensor_at(block: Tensor, entry: Any, start: int) -> Tensor:
    dtype_name, shape, offset = entry
    dtype: torch.dtype = getattr(torch, dtype_name)
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(tuple(shape), dtype=dtype, device=block.device)
    first = start + offset
    return block[first : first + count * dtype.itemsize].view(dtype).view(tuple(shape))


def _write_bytes(block: Tensor, first: int, data: bytes) -> None:
    block[first : first + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _bytes(block: Tensor, first: int, count: int) -> bytes:
    return block[first : first + count].cpu().numpy().tobytes()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
