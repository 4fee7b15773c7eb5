"""Sync weights with another process: the trainer stores its weights once, and sends a *handle* that locates them.

A handle is a small mapping that fits into JSON. The receiver opens it with :func:`open_weights`, which returns the
tensors without a copy and checks at the end that they did not change. A handle can be opened any number of times, until
its sender's next ``send`` or ``close``.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import secrets
import stat
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from turnwise.inference.common.proxies import is_loopback
from turnwise.inference.weights.publish import CollectiveTransfer
from turnwise.inference.weights.receive import open_group
from turnwise.inference.weights.weight_block import (
    BlockWriter,
    TransferError,
    WeightHandle,
    WeightTransfer,
    check_block,
    checksum,
    new_block,
    plan_layout,
    read_weights,
    storage_key,
)
from turnwise.inference.weights.wire import LOOPBACK, address_towards
from turnwise.utils.files import replacement

_HAS_MEMORY = hasattr(os, "memfd_create")


# -- shared memory -----------------------------------------------------------------------------------------------------
class SharedMemoryTransfer:
    """Stores weights in shared memory, for processes of the same user that see this one under ``/proc``. Linux only.

    The memory is a file without a name (``memfd_create``). The system frees it with the last process that has it open,
    so a killed trainer leaves nothing behind. The small ``/dev/shm`` of a container is no limit. The block is reused
    while the weights fit.
    """

    def __init__(self) -> None:
        if not _HAS_MEMORY:
            raise ValueError(f"transfer='shared_memory' needs Linux, this is {sys.platform}: take 'safetensors'")
        self._writer = BlockWriter()
        self._block: _Block | None = None

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        written = self._writer.write(weights, self._room)
        assert self._block is not None
        return {"kind": "shared_memory", "pid": os.getpid(), "descriptor": self._block.descriptor, **written}

    def close(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None

    def _room(self, size: int) -> Tensor:
        if self._block is None or self._block.size < size:
            self.close()  # freed before the next block, as there may be no room for both
            self._block = _Block(size)
        return self._block.memory


class _Block:
    """``size`` bytes of memory behind a ``descriptor``. All are reserved, as writing to missing memory would kill."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("turnwise-weights", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        try:
            os.posix_fallocate(self.descriptor, 0, size)
            self.memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        except (OSError, ValueError) as error:
            self._close()
            raise TransferError(f"no room for {size / 2**20:.1f} MiB of shared memory: {error}") from error

    def close(self) -> None:
        self._close()
        del self.memory  # the system unmaps it with the last tensor on it


@contextmanager
def _open_memory(handle: WeightHandle) -> Iterator[dict[str, Tensor]]:
    memory = _map(f"/proc/{handle['pid']}/fd/{handle['descriptor']}", handle["bytes"])
    yield read_weights(memory, handle)
    check_block(memory, handle)


def _map(path: str, size: int) -> Tensor:
    """Map the first ``size`` bytes at ``path``. Writes to them stay private to this process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferError(f"the weights in shared memory at {path} are gone, or another user's: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size < size:
            raise TransferError(f"the shared memory at {path} has {status.st_size} bytes: expected {size} of weights")
        return torch.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)


# -- files -------------------------------------------------------------------------------------------------------------
class SafetensorsTransfer:
    """Stores weights in a file of ``folder``, for processes on any host that see it under the same path.

    Without a folder it makes a temporary one. A file gets its name only when it is complete; then the previous one is
    removed. A killed trainer leaves its last file behind.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="turnwise-weights-")
            folder = self._temporary.name
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mark = secrets.token_hex(16)
        self._sequence = 0
        self._remove: Callable[[], Any] = lambda: None

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        # Tied tensors are stored once; the metadata maps their other names to that one.
        _, names, _ = plan_layout(weights)
        first = {storage_key(weights[name]): name for name in names}
        aliases = {name: first[storage_key(tensor)] for name, tensor in weights.items() if name not in set(names)}
        self._sequence += 1
        path = self._folder / f"weights-{self._mark}-{self._sequence}.safetensors"
        metadata = {"turnwise": json.dumps({"mark": self._mark, "sequence": self._sequence, "aliases": aliases})}
        try:
            # Copies, because views of one storage may overlap, which the format rejects.
            copies = {name: weights[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in names}
            with replacement(path) as partial:
                save_file(copies, partial, metadata)
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                    size = os.fstat(file.fileno()).st_size
        except (OSError, SafetensorError) as error:
            raise TransferError(f"weights could not be written to {path}: {error}") from error
        self._remove()
        self._remove = weakref.finalize(self, path.unlink, missing_ok=True)
        return {
            "kind": "safetensors", "path": str(path), "mark": self._mark, "sequence": self._sequence, "bytes": size,
            "sums": checksum(weights),
        }  # fmt: skip

    def close(self) -> None:
        self._remove()
        if self._temporary is not None:
            self._temporary.cleanup()


@contextmanager
def _open_file(handle: WeightHandle) -> Iterator[dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    path = handle["path"]
    try:
        size = os.path.getsize(path)
        if size != handle["bytes"]:
            raise TransferError(f"{path} has {size} bytes: expected {handle['bytes']}; it was cut short or replaced")
        with safe_open(path, framework="pt") as file:
            stamp = json.loads((file.metadata() or {}).get("turnwise", "{}"))
            if (stamp.get("mark"), stamp.get("sequence")) != (handle["mark"], handle["sequence"]):
                raise TransferError(f"{path} holds other weights than the handle names")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise TransferError(f"the weights in {path} can't be read: {error}") from error
    yield tensors | {name: tensors[other] for name, other in stamp["aliases"].items()}


# -- CUDA IPC ----------------------------------------------------------------------------------------------------------
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
        if self._block is None or self._block.numel() < size or self._block.device != device:
            self.close()  # freed before the next block, as there may be no room for both
            self._block = new_block(size, device)
            # Shared once per block, as each sharing adds to its counter of users, which receivers would have to lower.
            shared = self._block.untyped_storage()._share_cuda_()
            self._ipc_handle = {
                "device": str(torch.cuda.get_device_properties(device).uuid),
                "handle": [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in shared[1:]],
            }
        return self._block


@contextmanager
def _open_ipc(handle: WeightHandle) -> Iterator[dict[str, Tensor]]:
    """Open the weights of an ``ipc`` handle on their GPU."""
    # Other processes may number the GPUs differently.
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    if handle["device"] not in uuids:
        raise TransferError(f"the weights are on GPU {handle['device']}, which this process doesn't see: take 'nccl'")
    device = uuids.index(handle["device"])
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


# -- one of both -------------------------------------------------------------------------------------------------------
class AutomaticTransfer:
    """Stores weights in shared memory if they fit, else in files of a temporary folder. Warns once of the change."""

    def __init__(self) -> None:
        self._transfer: WeightTransfer = SharedMemoryTransfer() if _HAS_MEMORY else SafetensorsTransfer()

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        try:
            return self._transfer.send(weights)
        except TransferError as error:
            if isinstance(self._transfer, SafetensorsTransfer):
                raise
            self._transfer.close()
            self._transfer = SafetensorsTransfer()
            warnings.warn(f"weights go over temporary files from here on: {error}", stacklevel=2)
            return self._transfer.send(weights)

    def close(self) -> None:
        self._transfer.close()


TRANSFERS: dict[str, Callable[[str], WeightTransfer]] = {
    "auto": lambda host: AutomaticTransfer(),
    "shared_memory": lambda host: SharedMemoryTransfer(),
    "safetensors": lambda host: SafetensorsTransfer(),
    "ipc": lambda host: CudaIPCTransfer(),
    "nccl": lambda host: CollectiveTransfer("nccl", host),
    "gloo": lambda host: CollectiveTransfer("gloo", host),
}
"""Transfers by the names that clients take as ``transfer``. Each is called with the address at which receivers reach
this machine."""

_OPENERS: dict[str, Callable[[Mapping[str, Any]], AbstractContextManager[dict[str, Tensor]]]] = {
    "shared_memory": _open_memory,
    "safetensors": _open_file,
    "ipc": _open_ipc,
    "nccl": open_group,
    "gloo": open_group,
}


_FIELDS: dict[str, dict[str, type]] = {
    "shared_memory": {"pid": int, "descriptor": int},
    "safetensors": {"path": str},
    "ipc": {"device": str, "handle": list},
    "nccl": {"host": str, "port": int, "key": str},
    "gloo": {"host": str, "port": int, "key": str},
}
"""The fields of each kind of handle that locate its weights."""


def make_transfer(name: str, host: str = LOOPBACK) -> WeightTransfer:
    """Make the transfer ``name``. Raises ``ValueError`` for an unknown name, or one that this machine can't serve."""
    if name not in TRANSFERS:
        raise ValueError(f"transfer={name!r}: expected one of {', '.join(TRANSFERS)}")
    return TRANSFERS[name](host)


def transfer_to(urls: Sequence[str], name: str, folder: str | Path | None) -> WeightTransfer:
    """Make the transfer ``name`` to the servers at ``urls``, with ``folder`` for weights that travel as files."""
    if folder is not None and name not in ("auto", "safetensors", "gloo", "nccl"):
        raise ValueError(
            f"transfer={name!r}: expected 'auto', 'safetensors', 'gloo' or 'nccl' with folder={str(folder)!r}"
        )
    if folder is not None and name in ("auto", "safetensors"):
        return SafetensorsTransfer(folder)
    hosts = [urlsplit(url).hostname or "" for url in urls]
    others = [host for host in hosts if not is_loopback(host)]
    if name == "auto" and others:
        name = "gloo"
    # The address towards another host is one that this host's own servers reach too.
    return make_transfer(name, address_towards([*others, *hosts][0]) if name in ("gloo", "nccl") else LOOPBACK)


# -- the receiver's side -----------------------------------------------------------------------------------------------
@contextmanager
def open_weights(handle: WeightHandle) -> Iterator[dict[str, Tensor]]:
    """Open the weights of ``handle`` inside ``with``: tensors by name, without a copy. Tied ones share memory.

    Raises :class:`TransferError` if the weights are gone, incomplete, changed or replaced. It may also raise at the end
    of ``with``: then the values read inside may mix two sets of weights, and must not be used.
    """
    if not isinstance(handle, Mapping):
        raise TransferError(f"a handle that is a {type(handle).__name__}: expected a mapping, as `send` makes it")
    kind = handle.get("kind")
    if kind not in tuple(_OPENERS):
        raise TransferError(f"handle of kind {kind!r}: expected one of {sorted(_OPENERS)}")
    for name, type_ in {"mark": str, "sequence": int, "bytes": int, "sums": str, **_FIELDS[kind]}.items():
        if type(handle.get(name)) is not type_:
            raise TransferError(
                f"the handle has {name}={handle.get(name)!r}: expected {type_.__name__}, as `send` makes it"
            )
    with _OPENERS[kind](handle) as weights:
        if checksum(weights) != handle["sums"]:
            raise TransferError("the weights that arrived have other sums than those that were sent")
        yield weights
