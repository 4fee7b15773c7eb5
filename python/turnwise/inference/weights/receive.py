"""The receiver's side of a collective transfer: in a group with the other receivers, or alone if it comes late."""

from __future__ import annotations

import itertools
import threading
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from turnwise.inference.weights.group import BroadcastGroup, GroupFailed, TorchStore
from turnwise.inference.weights.weight_block import TransferError, WeightHandle, read_weights
from turnwise.inference.weights.wire import Frame, join, prove, receiver_key

PATIENCE = 300.0
"""The most seconds in which a waiting receiver gets no frame from its sender."""

PAUSE = 0.02
"""Seconds that a waiting thread reads the wire before it checks its other conditions."""


class Receiver:
    """A receiver's connection to the sender ``mark`` at ``host``, which it can ask for weights any number of times."""

    def __init__(self, kind: str, host: str, port: int, mark: str, key: str) -> None:
        self.sender = f"{host}:{port}"
        self._mark, self._key = mark, key
        self._wire = join(host, port, key, mark)
        self._device = choose_device(kind)
        self._reading = threading.Lock()
        self._orders: deque[Frame] = deque()
        self._answers: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._alone: Tensor | None = None
        self._group: BroadcastGroup | None = None
        self._epoch = 0

    def receive(self, size: int, sequence: int) -> Tensor:
        """Return the block ``[size]`` uint8 of weights number ``sequence``.

        Raises :class:`TransferError` if the sender has others, and ``OSError`` if it is gone or silent.
        """
        self._wire.send(want=sequence)
        while True:
            order = self._next_order()
            if "gone" in order:
                raise TransferError(f"weights number {sequence} are gone: {order['gone']}")
            if "alone" in order:
                block, self._alone = self._alone, None
                assert block is not None
                self._wire.send(got=0)
            elif "group" in order:
                try:
                    block = self._in_group(order, size)
                except GroupFailed as error:
                    self._leave()
                    self._wire.send(failed=order["group"], reason=str(error)[:200])
                    continue  # the sender makes another group, or sends to this receiver alone
            else:
                continue  # about a group that is over
            if block.numel() != size:
                raise TransferError(f"{block.numel()} bytes of weights arrived: expected {size}")
            return block

    def close(self) -> None:
        self._leave()
        self._wire.close()

    def _in_group(self, order: Frame, size: int) -> Tensor:
        epoch, rank = int(order["group"]), int(order["rank"])

        def check() -> None:
            self.pump(0)
            if any(order.get("abort") == epoch for order in self._orders):
                raise GroupFailed("the sender gave up the group")

        if self._group is None or epoch != self._epoch:
            self._leave()
            seconds = float(order["seconds"])
            store = TorchStore(partial(self._ask, epoch, seconds))
            self._epoch = epoch
            self._group = BroadcastGroup(self._device, store, rank, int(order["size"]), self._wire.here, seconds)
        # A new block each time: a broadcast of a group that failed may still write into the one before.
        block = torch.empty(size, dtype=torch.uint8, device=self._device)
        number = self._group.rehearse(None, check)
        self._wire.send(ready=epoch, proof=prove(self._key, "rehearsal", self._mark, epoch, rank, number.hex()))
        until = time.monotonic() + PATIENCE
        while not any(order.get("go") == epoch for order in self._orders):
            check()
            self.pump(PAUSE)
            if time.monotonic() > until:
                raise GroupFailed(f"the sender sent nothing for {PATIENCE:g} s")
        self._group.broadcast(block.split(int(order["bucket"])), check)
        self._orders.clear()
        self._wire.send(got=epoch)
        return block

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abandon()
        self._group, self._epoch = None, 0

    # -- the wire, which any waiting thread reads for all of them ------------------------------------------------------
    def pump(self, seconds: float) -> None:
        """Read a frame if one comes within ``seconds``. Raises ``OSError`` if the sender is gone."""
        if not self._reading.acquire(timeout=seconds):
            return
        try:
            if not self._wire.is_readable(seconds):
                return
            frame = self._wire.receive(PATIENCE)
            if "to" in frame:
                self._answers[frame["to"]] = frame["answer"]
                return
            if "alone" in frame:
                self._alone = self._read_block(int(frame["alone"]))  # its bytes follow
            self._orders.append(frame)
        finally:
            self._reading.release()

    def _ask(self, epoch: int, seconds: float, method: str, *values: Any) -> Any:
        """Call a method of the store of group ``epoch``. Raises ``RuntimeError`` without an answer in ``seconds``."""
        number = next(self._numbers)
        texts = [b64encode(value).decode() if isinstance(value, bytes) else value for value in values]
        self._wire.send(ask=number, epoch=epoch, method=method, values=texts)
        until = time.monotonic() + seconds
        while number not in self._answers:
            if self._epoch != epoch or time.monotonic() > until:
                raise RuntimeError(f"no answer to {method} {texts[:1]} of group {epoch}")
            self.pump(PAUSE)
        answer = self._answers.pop(number)
        return b64decode(answer) if method == "get" else answer

    def _next_order(self) -> Frame:
        until = time.monotonic() + PATIENCE
        while not self._orders:
            if time.monotonic() > until:
                raise TimeoutError(f"its sender did not answer within {PATIENCE:g} s")
            self.pump(PAUSE)
        return self._orders.popleft()

    def _read_block(self, size: int) -> Tensor:
        block = torch.empty(size, dtype=torch.uint8)
        content: Any = block.numpy()
        self._wire.receive_bytes(memoryview(content), silence=PATIENCE)
        return block.to(self._device)


def choose_device(kind: str) -> torch.device:
    """The device on which weights of a handle of this ``kind`` arrive."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu")


_receivers: dict[tuple[str, str, int, str], Receiver] = {}
"""The one connection that this process keeps open, so that it stays a member of its group."""

_opening = threading.Lock()


@contextmanager
def open_group(handle: WeightHandle) -> Iterator[dict[str, Tensor]]:
    """Open the weights of an ``nccl`` handle on this process's GPU, or of a ``gloo`` handle on the CPU."""
    kind, host, port, mark = handle["kind"], handle["host"], handle["port"], handle["mark"]
    key = (kind, host, port, mark)
    with _opening:
        try:
            if key not in _receivers:
                _close_all()
                _receivers[key] = Receiver(kind, host, port, mark, receiver_key(handle["key"]))
            block = _receivers[key].receive(handle["bytes"], handle["sequence"])
        except (RuntimeError, OSError) as error:
            _close_all()
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"the weights at {host}:{port} did not arrive: {error}") from error
    yield read_weights(block, handle)


def _close_all() -> None:
    for receiver in _receivers.values():
        receiver.close()
    _receivers.clear()
