"""Sync weights through CUDA IPC: one block of a GPU, for processes of the same host that see the same GPU."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from turnwise.inference.weights.weight_block import BlockWriter, TransferError, WeightHandle, check_block, read_weights


class CudaIPCTransfer:
    """Stores weights in a block of their own GPU, for processes of this host that see that GPU.

    The block is a copy, and takes as much of the GPU as the weights. So training can continue while receivers read it,
    and a restarted engine gets the same weights as the others. Receivers copy nothing. The block is reused while the
    weights fit.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("transfer='ipc' needs a CUDA GPU, and PyTorch sees none here")
        self._writer = BlockWriter()
        self._block: Tensor | None = None
        self._ipc_handle: dict[str, Any] = {}

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        devices = {tensor.device for tensor in weights.values()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            names = sorted(map(str, devices))
            raise TransferError(f"transfer='ipc' takes weights of one CUDA GPU, these are on {', '.join(names)}")
        [device] = devices
        written = self._writer.write(weights, lambda size: self._room(size, device))
        return {"kind": "ipc", **self._ipc_handle, **written}

    def close(self) -> None:
        self._block, self._ipc_handle = None, {}

    def _room(self, size: int, device: torch.device) -> Tensor:
        if not _fits(self._block, size, device):
            self.close()  # freed before the next block, as there may be no room for both
            self._block = _new_block(size, device)
            # Shared once per block, as each sharing adds to its counter of users, which receivers would have to lower.
            shared = self._block.untyped_storage()._share_cuda_()
            self._ipc_handle = {
                "device": str(torch.cuda.get_device_properties(device).uuid),
                "handle": [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in shared[1:]],
            }
        assert self._block is not None
        return self._block


def _fits(block: Tensor | None, size: int, device: torch.device) -> bool:
    return block is not None and block.numel() >= size and block.device == device


def _new_block(size: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise TransferError(f"no room for {size / 2**20:.1f} MiB of weights on {device}: {error}") from error


@contextmanager
def open_ipc(handle: WeightHandle) -> Iterator[dict[str, Tensor]]:
    """Open the weights of an ``ipc`` handle on their GPU."""
    device = _device_of(handle["device"])
    ipc_handle = [base64.b64decode(x) if isinstance(x, str) else x for x in handle["handle"]]
    torch.cuda.init()
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device, *ipc_handle)
    except RuntimeError as error:
        raise TransferError(f"the weights on cuda:{device} can't be opened: {error}") from error
    block = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
    yield read_weights(block, handle)
    torch.cuda.synchronize(device)
    check_block(block, handle)


def _device_of(uuid: str) -> int:
    """This process's index of the GPU. Other processes may see other GPUs."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise TransferError(f"the weights are on GPU {uuid}, which this process doesn't see: take transfer='nccl'")
