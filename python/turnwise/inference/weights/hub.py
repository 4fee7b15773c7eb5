"""Serves the receivers of a collective transfer in rounds: one broadcast to all, however many there are.

A receiver connects, proves that it knows the key, and asks for weights by their number. The first request opens a
*round*: the sender waits for the receivers that took the previous weights, and sends to all that asked by then, in one
group. A receiver that asks during the round gets the weights over its own connection. So does a single receiver that
asks later. The next round uses the same group if its receivers are the same. Otherwise the sender makes another group,
and the *epoch* grows by one.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import warnings
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.inference.weights.entrance import Entrance, Peer
from turnwise.inference.weights.group import NUMBER_BYTES, BroadcastGroup, GroupFailed, GroupStore, Progress, TorchStore
from turnwise.inference.weights.wire import Frame, prove

QUIET_SECONDS = 0.25
"""Seconds without another receiver after which a round begins, if no other is expected."""

ANSWER_SECONDS = 5.0
"""The most seconds in which a receiver must report that it left a group."""

GRACE_SECONDS = 0.5
"""Seconds in which sending may finish before new weights stop it: receivers may just have got all bytes."""

ATTEMPTS = 3
"""Groups of the same receivers that may fail until each receiver gets the weights alone."""

CHUNK = 2**24
"""Bytes that go to a single receiver at once."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Bytes of a ``bucket``, and seconds; see :class:`~turnwise.inference.weights.publish.CollectiveTransfer`."""

    bucket: int
    deadline: float
    gather: float


class BroadcastLost(Exception):
    """Raised with the reason if a round ends early."""


class Hub:
    """The receivers of a sender, and the thread that serves them in rounds.

    It holds no reference to the transfer, so that a transfer without users ends the hub.
    """

    def __init__(self, backend: str, host: str, key: str, mark: str, limits: TransferLimits) -> None:
        self._backend, self._host, self._key, self._mark, self._limits = backend, host, key, mark, limits
        self.counts: Counter[str] = Counter(epoch=0, in_groups=0, alone=0, lost=0)
        self._changed = threading.Condition()  # guards what follows
        self._peers: list[Peer] = []
        self._block: Tensor | None = None
        self._sequence = self._before = 0  # the weights offered, and the last ones that a receiver took
        self._round_of = 0  # the weights of the last round
        self._users = 0  # threads that read the block
        self._in_round = False
        self._replaced = self._closed = False
        self._last_asked, self._expected = 0.0, 0
        self._store: GroupStore = GroupStore()
        self._group: BroadcastGroup | None = None
        self._in_group: list[Peer] = []
        self._entrance = Entrance(host, key, mark, limits.deadline, self._receive)
        self.port = self._entrance.port
        threading.Thread(target=self._serve, name="turnwise-publish", daemon=True).start()

    @contextmanager
    def replacing(self) -> Iterator[Callable[[Tensor, int], None]]:
        """Stop all sending, so that the block can be written. Yields the call that offers the next weights."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._in_round or self._users), GRACE_SECONDS)
            if self._sequence and any(peer.took == self._sequence for peer in self._peers):
                self._before = self._sequence
            self._sequence, self._block, self._replaced = 0, None, True
            for peer in self._peers:
                if peer.streaming:
                    peer.wire.cut()  # it may be stuck, and then its thread would be too
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._users)

        def offer(block: Tensor, sequence: int) -> None:
            with self._changed:
                self._block, self._sequence = block, sequence

        try:
            yield offer
        finally:
            with self._changed:
                self._replaced = False
                late = [peer for peer in self._peers if peer.wants and peer.wants != self._sequence]
                self._changed.notify_all()
            for peer in late:
                self._reject(peer)

    def expect(self, count: int) -> None:
        with self._changed:
            self._expected = count
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            peers, self._peers = self._peers, []
            self._changed.notify_all()
        self._entrance.close()
        for peer in peers:
            peer.wire.cut()

    # -- the receivers, each in its own thread -------------------------------------------------------------------------
    def _receive(self, peer: Peer) -> None:
        """Listen to a receiver that knows the key, until it ends."""
        with self._changed:
            if self._closed:
                peer.wire.close()
                return
            self._peers.append(peer)
        try:
            while True:
                self._handle(peer, peer.wire.receive())
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._lose(peer, str(error), leaves=isinstance(error, OSError))
        finally:
            peer.wire.close()

    def _handle(self, peer: Peer, frame: Frame) -> None:
        if "ask" in frame:
            self._answer(peer, frame)
            return
        if "want" not in frame:
            with self._changed:
                peer.report = frame
                if frame.get("got") == 0 and peer.sending:
                    peer.took, peer.sending = peer.sending, 0
                    self.counts["alone"] += 1
                self._changed.notify_all()
            return
        sequence = int(frame["want"])
        with self._changed:
            is_current = sequence == self._sequence
            if self._replaced or (is_current and not self._in_round):
                # The next round serves or, after new weights, rejects it.
                peer.wants, self._last_asked = sequence, time.monotonic()
                self._changed.notify_all()
                return
        if is_current:
            self._send_alone(peer, sequence)
        else:
            self._reject(peer)

    def _answer(self, peer: Peer, frame: Frame) -> None:
        """Read or write the group's store for a receiver."""
        with self._changed:
            if frame["epoch"] != self.counts["epoch"]:
                return
            store = self._store
        number, method, [key, *values] = frame["ask"], frame["method"], frame["values"]
        if method == "get":

            def send(value: bytes) -> None:
                with suppress(OSError):  # its own thread notices
                    peer.wire.send(to=number, answer=b64encode(value).decode())

            store.when_set(str(key), send)
            return
        if method == "set":
            store.set(str(key), b64decode(values[0]))
            answer: Any = True
        elif method == "add":
            answer = store.add(str(key), int(values[0]))
        else:
            answer = store.has(list(key))
        peer.wire.send(to=number, answer=answer)

    def _reject(self, peer: Peer) -> None:
        with self._changed:
            holds, peer.wants = self._sequence, 0
        with suppress(OSError):  # its own thread notices
            peer.wire.send(gone=f"its sender holds weights number {holds}")

    def _send_alone(self, peer: Peer, sequence: int) -> None:
        """Send the weights to one receiver, for which no other waits."""
        with self._changed:
            block = self._block
            if block is not None and not self._replaced and sequence == self._sequence:
                peer.sending, peer.streaming = sequence, True
                self._users += 1
        if not peer.streaming or block is None:
            self._reject(peer)
            return
        try:
            chunks = (memoryview(chunk.cpu().numpy()) for chunk in block.split(CHUNK))
            peer.wire.send_bytes(chunks, alone=block.numel())
        except OSError as error:
            self._lose(peer, f"it took no weights: {error}")
        finally:
            with self._changed:
                peer.streaming = False
                self._users -= 1
                self._changed.notify_all()

    def _lose(self, peer: Peer, reason: str, leaves: bool = False) -> None:
        """Cut the connection to a receiver, which can connect again. No warning if it ``leaves`` with all it wants."""
        with self._changed:
            if peer.lost or self._closed:
                return
            peer.lost = True
            self._peers.remove(peer)
            missed = peer.wants or peer.sending
            if missed:
                self.counts["lost"] += 1
            self._changed.notify_all()
        peer.wire.cut()
        if missed or not leaves:
            warnings.warn(f"a receiver of weights at {peer.wire.there} was lost: {reason}", stacklevel=2)

    # -- rounds, in a thread of their own ------------------------------------------------------------------------------
    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting())
                if self._closed:
                    break
                peers = self._gather()
                block, sequence = self._block, self._sequence
                if not peers or block is None:
                    continue
                late, self._round_of, self._in_round = self._round_of == sequence, sequence, True
                self._users += 1
            try:
                self._send_to_all(peers, block, sequence, late)
            finally:
                with self._changed:
                    self._in_round = False
                    self._users -= 1
                    self._changed.notify_all()
        self._leave_group()

    def _waiting(self) -> list[Peer]:
        if self._replaced or not self._sequence:
            return []
        return [peer for peer in self._peers if peer.wants == self._sequence]

    def _gather(self) -> list[Peer]:
        """Wait for the receivers of a round, and return them. Only the first round of weights expects some."""
        latest, first = time.monotonic() + self._limits.gather, self._round_of != self._sequence
        while waiting := self._waiting():
            expected = [peer for peer in self._peers if first and peer.took and peer.took == self._before]
            if expected and all(peer.wants == self._sequence for peer in expected):
                return waiting
            until = latest
            if not expected and (not first or len(waiting) >= self._expected):
                until = min(latest, self._last_asked + QUIET_SECONDS)
            if (left := until - time.monotonic()) <= 0 or self._closed:
                return waiting
            self._changed.wait(left)
        return []

    def _send_to_all(self, peers: list[Peer], block: Tensor, sequence: int, late: bool) -> None:
        for attempt in itertools.count(1):
            with self._changed:
                left = [peer for peer in peers if peer.wants == sequence and not peer.lost]
                over = self._replaced or self._closed
            if over or not left:
                return
            # One receiver needs no group for weights in host memory, and a late one must not end that of the others.
            if attempt > ATTEMPTS or (len(left) == 1 and (late or self._backend == "gloo")):
                for peer in left:
                    peer.wants = 0
                    threading.Thread(target=self._send_alone, args=(peer, sequence), daemon=True).start()
                return
            try:
                self._broadcast(left, block, sequence)
            except Exception as error:  # whatever it is, the receivers must not wait for this thread
                if not isinstance(error, GroupFailed | BroadcastLost | OSError):
                    warnings.warn(f"weights could not be broadcast: {error!r}", stacklevel=2)
                self._give_up(left, str(error))

    def _broadcast(self, peers: list[Peer], block: Tensor, sequence: int) -> None:
        """Send ``block`` to ``peers`` in one group. Raises an error if one of them did not get it."""
        deadline = Progress(self._limits.deadline)
        if self._group is None or set(peers) != set(self._in_group):
            self._make_group(peers, block.device)
        group, peers, epoch = self._group, self._in_group, self.counts["epoch"]
        assert group is not None

        def check() -> None:
            with self._changed:
                self._check(peers, epoch, deadline)

        def wait_for(what: str) -> None:
            with self._changed:
                while late := [peer for peer in peers if peer.report.get(what) != epoch]:
                    count = len(late)
                    self._check(peers, epoch, deadline)
                    self._changed.wait(deadline.left())
                    if sum(peer.report.get(what) != epoch for peer in late) < count:
                        deadline.restart()

        number = secrets.token_bytes(NUMBER_BYTES)
        for rank, peer in enumerate(peers, 1):
            with self._changed:
                peer.report = {}
            size = {"rank": rank, "size": len(peers) + 1, "bucket": self._limits.bucket}
            with suppress(OSError):  # its own thread notices
                peer.wire.send(group=epoch, seconds=2 * self._limits.deadline, **size)
        group.rehearse(number, check)
        wait_for("ready")
        for rank, peer in enumerate(peers, 1):
            if peer.report.get("proof") != prove(self._key, "rehearsal", self._mark, epoch, rank, number.hex()):
                raise BroadcastLost(f"{peer.wire.there} proved another number than the one that was broadcast")
        deadline.restart()
        for peer in peers:
            with suppress(OSError):
                peer.wire.send(go=epoch)
        group.broadcast(block.split(self._limits.bucket), check, deadline.restart)
        wait_for("got")
        with self._changed:
            for peer in peers:
                peer.took, peer.wants = sequence, 0
            self.counts["in_groups"] += len(peers)

    def _check(self, peers: Sequence[Peer], epoch: int, deadline: Progress) -> None:
        """Raise :class:`BroadcastLost` if the round can't end well. The caller holds the lock."""
        if self._replaced or self._closed:
            raise BroadcastLost("the weights were replaced")
        for peer in peers:
            if peer.lost:
                raise BroadcastLost(f"{peer.wire.there} is gone")
            if peer.report.get("failed") == epoch:
                raise BroadcastLost(f"{peer.wire.there} failed: {peer.report.get('reason')}")
        if not deadline.left():
            raise BroadcastLost(f"nothing arrived for {self._limits.deadline:g} s")

    def _make_group(self, peers: list[Peer], device: torch.device) -> None:
        self._leave_group()
        store, seconds = GroupStore(), 2 * self._limits.deadline
        with self._changed:
            self.counts["epoch"] += 1
            self._store, self._in_group = store, list(peers)

        def ask(method: str, key: Any, *values: Any) -> Any:
            return store.get(key, seconds) if method == "get" else getattr(store, method)(key, *values)

        self._group = BroadcastGroup(device, TorchStore(ask), 0, len(peers) + 1, self._host, seconds)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.abandon()
        self._group, self._in_group = None, []

    def _give_up(self, peers: Sequence[Peer], reason: str) -> None:
        """End the group's broadcast, and drop the peers that don't report that they left it."""
        epoch = self.counts["epoch"]
        self._leave_group()
        for peer in peers:
            with suppress(OSError):  # its own thread notices
                if not peer.lost:
                    peer.wire.send(abort=epoch)
        deadline = Progress(ANSWER_SECONDS)

        def silent() -> list[Peer]:
            ends = ("got", "failed")
            return [m for m in peers if not m.lost and epoch not in [m.report.get(end) for end in ends]]

        with self._changed:
            while silent() and deadline.left() and not self._closed:
                self._changed.wait(deadline.left())
            late = silent()
            for peer in peers:
                if peer.report.get("got") == epoch:
                    peer.took, peer.wants = self._round_of, 0
                    self.counts["in_groups"] += 1
        for peer in late:
            self._lose(peer, f"it did not leave a group that failed ({reason})")
