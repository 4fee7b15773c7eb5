"""One process group of a sender and its receivers, in which a broadcast reaches all of them at once.

Its ranks find each other through a :class:`GroupStore` that the sender keeps. Receivers read and write it over their
wires, which have checked the key. The group's own sockets check nothing: gloo accepts the first connection with the
right small number. So each use begins with a rehearsal: rank 0 broadcasts a random number, and each receiver proves
over its wire that this number arrived. A stranger who took a connection of the group has taken it from a receiver,
which then gets no number, and no weights are sent. Weights take the same connections as the number.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

NUMBER_BYTES = 32
"""Bytes of the random number of a rehearsal."""

AHEAD = 2
"""Buckets that are broadcast at the same time, as gloo has two threads."""


class GroupFailed(Exception):
    """Raised if a broadcast in a group failed. The group can't be used any more."""


# -- the store through which ranks find each other ---------------------------------------------------------------------
class GroupStore:
    """Values by key, and the calls that wait for one. Belongs to one group."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Callable[[bytes], None]]] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value
            calls = self._waiting.pop(key, [])
        for call in calls:
            call(value)

    def add(self, key: str, count: int) -> int:
        with self._lock:
            self._values[key] = str(int(self._values.get(key, b"0")) + count).encode()
            return int(self._values[key])

    def has(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def get(self, key: str, seconds: float) -> bytes:
        """Wait for the value of ``key``. Raises ``RuntimeError`` after ``seconds``."""
        values: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.when_set(key, values.put)
        try:
            return values.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(f"no rank of the group set {key!r} within {seconds:g} s") from None

    def when_set(self, key: str, call: Callable[[bytes], None]) -> None:
        """Call ``call`` with the value of ``key``, now or once it is set."""
        with self._lock:
            if key not in self._values:
                self._waiting.setdefault(key, []).append(call)
                return
            value = self._values[key]
        call(value)


class TorchStore(distributed.Store):
    """A group's store as torch's process groups use it. ``ask(method, *values)`` calls that of :class:`GroupStore`."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        super().__init__()
        self._ask = ask

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("has", list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def has_extended_api(self) -> bool:
        return False


# -- the group ---------------------------------------------------------------------------------------------------------
class Progress:
    """Seconds that are left for the next sign of progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        self._until = time.monotonic() + self._seconds

    def left(self) -> float:
        return max(self._until - time.monotonic(), 0.0)


class BroadcastGroup:
    """Rank ``rank`` of ``size`` ranks that broadcast tensors on ``device``: by nccl on GPUs, else by gloo.

    ``host`` is the address of this machine at which gloo listens. A wait ends by itself only after ``seconds``, so each
    method takes a call ``check``, which raises to end it sooner.
    """

    def __init__(
        self, device: torch.device, store: distributed.Store, rank: int, size: int, host: str, seconds: float
    ) -> None:
        limit = timedelta(seconds=seconds)
        self._device = device
        self._under_way: deque[Any] = deque()
        self._store = store  # kept, as torch's group can't call it once Python has dropped it
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = distributed.ProcessGroupNCCL(store, rank, size, options)
            return
        gloo: Any = distributed.ProcessGroupGloo
        settings = gloo._Options()
        settings._timeout = limit
        # Lazy: ranks connect only along the edges of the broadcast, not all with all.
        settings._devices = [gloo.create_device(hostname=host, lazy_init=True)]
        self._group = gloo(store, rank, size, settings)

    def rehearse(self, number: bytes | None, check: Callable[[], None]) -> bytes:
        """Broadcast ``number`` from rank 0, and return it on all ranks. The other ranks pass ``None``."""
        content = torch.zeros(NUMBER_BYTES, dtype=torch.uint8)
        if number is not None:
            content = torch.frombuffer(bytearray(number), dtype=torch.uint8)
        content = content.to(self._device)
        self.broadcast([content], check)
        return content.cpu().numpy().tobytes()

    def broadcast(self, buckets: Sequence[Tensor], check: Callable[[], None], each: Callable[[], object] = int) -> None:
        """Broadcast ``buckets`` from rank 0, and call ``each`` after each one. Raises :class:`GroupFailed`."""
        under_way, left = self._under_way, iter(buckets)
        try:
            while True:
                while len(under_way) < AHEAD and (bucket := next(left, None)) is not None:
                    under_way.append(self._group.broadcast(bucket, 0))
                if not under_way:
                    break
                pause = 1e-4
                while not under_way[0].is_completed():
                    check()
                    time.sleep(pause)
                    pause = min(2 * pause, 0.005)
                under_way.popleft().wait()
                each()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise GroupFailed(str(error).splitlines()[0]) from error

    def abandon(self) -> None:
        """Give up the group, also in the middle of a broadcast. Another thread destroys it."""
        threading.Thread(target=_destroy, args=([self._group, self._store], self._under_way), daemon=True).start()
        self._group = None


def _destroy(group_and_store: list[Any], under_way: deque[Any]) -> None:
    """Destroy a group, then its store. Its broadcasts must have ended: gloo would wait for them with Python's lock."""
    group_and_store[0].abort()
    while not all(work.is_completed() for work in under_way):
        time.sleep(0.1)
    under_way.clear()
    del group_and_store[0]
