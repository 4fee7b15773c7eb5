"""Sync weights through CUDA IPC on one host, or through process groups between hosts.

``ipc`` shares one block of a GPU with processes of the same host that see the same GPU. ``nccl`` sends the block from
GPU to GPU over any connection. ``gloo`` sends it between CPUs over TCP, for hosts without a common folder.
"""

from __future__ import annotations

import base64
import socket
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from turnwise.inference.weights.weight_block import BlockWriter, TransferError, WeightHandle, check_block, read_weights

LOOPBACK = "127.0.0.1"

Group = Any
"""torch's ``ProcessGroupNCCL`` or ``ProcessGroupGloo``."""

GROUP_TIMEOUT = timedelta(seconds=300)
"""The most time that one side of a process group waits for the other."""

CONNECT_SECONDS = 30.0
"""The most seconds for connecting to a sender's host."""

POLL_SECONDS = 0.01
"""Seconds between two checks for requests or answers."""

MOST_RECEIVERS = 64
"""Groups that a sender keeps. Beyond them it drops those that were unused longest; their receivers get a new one."""

MOST_ASKED = 10_000
"""The most tickets between two checks. If the counter moved further, something other than a receiver wrote it."""

COMING, CLOSED = "coming", "closed"


# -- one GPU, several processes ----------------------------------------------------------------------------------------
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


# -- several hosts or GPUs ---------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _ReceiverGroup:
    """A sender's group with one receiver: its ``number``, and the ``ticket`` and time (``used``) of its last use."""

    group: Group
    number: int
    ticket: int = 0
    used: float = 0.0


class ProcessGroupTransfer:
    """Sends weights to every process that opens their handle, one after the other, by ``backend`` (``nccl``, ``gloo``).

    ``host`` is the address at which receivers reach this process. Every process that reaches it gets the weights, so
    use an address other than loopback only in a trusted network. The last weights stay in a separate block, for
    ``nccl`` on their GPU. So training can continue, and a restarted engine gets the same weights as the others.
    """

    def __init__(self, backend: str, host: str = LOOPBACK) -> None:
        if not getattr(distributed, f"is_{backend}_available")():
            raise ValueError(f"transfer={backend!r}: this PyTorch ({torch.__version__}) was built without it")
        self._backend, self._host = backend, host
        self._writer = BlockWriter()
        self._block: Tensor | None = None
        self._held = 0
        self._lock = threading.Lock()  # held while the block is written or sent
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._port = listener.getsockname()[1]
        self._server: distributed.Store | None = distributed.TCPStore(
            host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=GROUP_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        self._store: distributed.Store | None = self._server
        self._groups: OrderedDict[str, _ReceiverGroup] = OrderedDict()
        self._made = 0
        self._seen, self._open = 0, set[int]()
        self._closed = threading.Event()
        threading.Thread(target=_serve, args=(weakref.ref(self), self._closed), daemon=True).start()

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        device = next(iter(weights.values())).device if self._backend == "nccl" else torch.device("cpu")
        with self._lock:
            if self._store is None:
                raise TransferError("the transfer is closed")
            written = self._writer.write(weights, lambda size: self._room(size, device))
            self._held = written["bytes"]
        return {"kind": self._backend, "host": self._host, "port": self._port, **written}

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._store is not None:
                self._store.set(CLOSED, "")  # the groups' own references may keep the store alive
            self._block = self._store = self._server = None
            self._groups.clear()

    def _room(self, size: int, device: torch.device) -> Tensor:
        if not _fits(self._block, size, device):
            self._block = None  # freed before the next block, as there may be no room for both
            self._block = _new_block(size, device)
        assert self._block is not None
        return self._block

    def answer(self) -> None:
        """Send the weights to all receivers that asked for them since the last call."""
        with self._lock:
            if self._store is None:
                return
            try:
                asked = self._store.add("tickets", 0)
                if not 0 <= asked - self._seen <= MOST_ASKED:
                    raise ValueError(f"{asked} tickets after {self._seen}")
            except (RuntimeError, ValueError) as error:
                self._reset_ticket_counter(error)
                return
            self._open |= set(range(self._seen + 1, asked + 1))  # a ticket stays open if its receiver dies here
            self._seen = asked
            for ticket in sorted(self._open):
                if self._store.check([f"ask/{ticket}"]):
                    self._open.discard(ticket)
                    self._answer(self._store, ticket, self._store.get(f"ask/{ticket}"))

    def _reset_ticket_counter(self, error: Exception) -> None:
        """Restore the counter of tickets. After an invalid value, the store drops its reader's connection."""
        warnings.warn(f"what asks at {self._host}:{self._port} for weights is no receiver: {error}", stacklevel=2)
        self._store = distributed.TCPStore(self._host, self._port, is_master=False, timeout=GROUP_TIMEOUT)
        self._store.set("tickets", str(self._seen))

    def _answer(self, store: distributed.Store, ticket: int, asked: bytes) -> None:
        try:
            receiver, wanted = asked.decode().split()
            sequence = int(wanted)
        except ValueError:
            said = f"{asked[:80]!r} is no request: expected the receiver's name and the number of weights"
            store.set(f"answer/{ticket}", said)
            warnings.warn(f"at {self._host}:{self._port}, {said}", stacklevel=2)
            return
        if self._block is None or sequence != self._writer.sequence:
            store.set(f"answer/{ticket}", f"its sender holds weights number {self._writer.sequence}")
            return
        # Announce the group's number first, so that the receiver joins it while this side makes it.
        line = self._groups.get(receiver)
        self._made += line is None
        number = self._made if line is None else line.number
        store.set(f"answer/{ticket}", f"{COMING} {number}")
        try:
            if line is None:
                self._make_room(store)
                group = _group(self._backend, store, f"{receiver}/{number}", 0, self._host)
                line = self._groups[receiver] = _ReceiverGroup(group, number)
            self._groups.move_to_end(receiver)
            line.ticket, line.used = ticket, time.monotonic()
            line.group.send([self._block[: self._held]], 1, 0).wait()
            if self._block.is_cuda:
                torch.cuda.synchronize(self._block.device)
        except Exception as error:  # the receiver raises too, and its caller repeats the whole update
            self._groups.pop(receiver, None)
            warnings.warn(f"a receiver of weights was lost: {error}", stacklevel=2)

    def _make_room(self, store: distributed.Store) -> None:
        """Drop the groups that were unused longest, except those whose receiver may still be reading."""
        for receiver, line in list(self._groups.items()):
            if len(self._groups) < MOST_RECEIVERS:
                return
            waited = time.monotonic() - line.used
            if store.check([f"got/{line.ticket}"]) or waited > GROUP_TIMEOUT.total_seconds():
                del self._groups[receiver]


def _serve(sender: weakref.ref[ProcessGroupTransfer], closed: threading.Event) -> None:
    while not closed.wait(POLL_SECONDS):
        owner = sender()
        if owner is None:
            return
        owner.answer()
        del owner


class _Connection:
    """A receiver's connection to one sender."""

    def __init__(self, kind: str, host: str, port: int) -> None:
        self._kind, self._host = kind, host
        socket.create_connection(
            (host, port), timeout=CONNECT_SECONDS
        ).close()  # fails early; the store would keep trying for GROUP_TIMEOUT
        self._store = distributed.TCPStore(host, port, is_master=False, timeout=GROUP_TIMEOUT)
        self._name = f"receiver-{self._store.add('receivers', 1)}"
        self._group: Group | None = None
        self._number = ""

    def receive(self, block: Tensor, sequence: int) -> None:
        """Fill ``block`` with the weights of number ``sequence``."""
        ticket = self._store.add("tickets", 1)
        self._store.set(f"ask/{ticket}", f"{self._name} {sequence}")
        answer = self._answer(f"answer/{ticket}")
        coming, _, number = answer.partition(" ")
        if coming != COMING:
            raise TransferError(f"weights number {sequence} are gone: {answer}")
        if self._group is None or number != self._number:  # the sender has dropped the previous group
            self._group = _group(self._kind, self._store, f"{self._name}/{number}", 1, self._host)
            self._number = number
        self._group.recv([block], 0, 0).wait()
        if block.is_cuda:
            torch.cuda.synchronize(block.device)
        self._store.set(f"got/{ticket}", "")

    def _answer(self, key: str) -> str:
        deadline = time.monotonic() + GROUP_TIMEOUT.total_seconds()
        while not self._store.check([key]):
            if self._store.check([CLOSED]):
                return "its sender has closed"
            if time.monotonic() > deadline:
                return f"its sender did not answer within {GROUP_TIMEOUT.total_seconds():g} s"
            time.sleep(POLL_SECONDS)
        return self._store.get(key).decode()


_connections: dict[tuple[str, str, int, str], _Connection] = {}
"""The one connection that this process keeps open, because making a group takes longer than sending small weights."""


@contextmanager
def open_group(handle: WeightHandle) -> Iterator[dict[str, Tensor]]:
    """Open the weights of an ``nccl`` handle on this process's GPU, or of a ``gloo`` handle on the CPU."""
    kind, host, port = handle["kind"], handle["host"], handle["port"]
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu")
    key = (kind, host, port, handle["mark"])
    try:
        if key not in _connections:
            _connections.clear()
            _connections[key] = _Connection(kind, host, port)
        block = torch.empty(handle["bytes"], dtype=torch.uint8, device=device)
        _connections[key].receive(block, handle["sequence"])
    except (RuntimeError, OSError) as error:
        _connections.pop(key, None)
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"the weights at {host}:{port} did not arrive: {error}") from error
    yield read_weights(block, handle)


def _group(kind: str, store: distributed.Store, name: str, rank: int, host: str) -> Group:
    """Make a group of two, separate from all other groups of the process, as engines have their own."""
    apart = distributed.PrefixStore(name, store)
    if kind == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        return distributed.ProcessGroupNCCL(apart, rank, 2, options)
    gloo: Any = distributed.ProcessGroupGloo
    made = gloo._Options()
    made._timeout = GROUP_TIMEOUT
    made._devices = [gloo.create_device(hostname=host) if host == LOOPBACK else gloo.create_default_device()]
    return gloo(apart, rank, 2, made)


def address_towards(host: str) -> str:
    """The address of this machine at which ``host`` reaches it."""
    family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])
