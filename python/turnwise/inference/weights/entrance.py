"""The listener of a sender: it admits receivers that know the key, and refuses strangers."""

from __future__ import annotations

import errno
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from turnwise.inference.weights.wire import Frame, Wire, WrongKey, admit

MAX_HANDSHAKES = 64
"""The most connections at the same time that have not yet proved that they know the key; the oldest gives way."""

MAX_REFUSALS = 10
"""Refused connections that are shown."""


@dataclass(eq=False, slots=True)
class Peer:
    """A receiver that knows the key. ``wants`` and ``took`` are numbers of weights, 0 for none."""

    wire: Wire
    wants: int = 0
    took: int = 0
    sending: int = 0
    """The weights that it was sent alone, until it reports that they arrived."""
    streaming: bool = False
    report: Frame = field(default_factory=dict)
    """Its last report about the group of the epoch."""
    lost: bool = False


class Entrance:
    """Listens at a free ``port`` of ``host``, with a thread for each connection.

    The thread calls ``admitted`` with the receiver once the other side has proved that it knows the key. Writes to it
    fail after ``seconds`` in which it took nothing.

    Example: ``Entrance("127.0.0.1", key, mark, 30.0, lambda peer: print(peer.wire.receive()))``
    """

    def __init__(self, host: str, key: str, mark: str, seconds: float, admitted: Callable[[Peer], None]) -> None:
        self._key, self._mark, self._seconds, self._admitted = key, mark, seconds, admitted
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards what follows
        self._strangers: dict[socket.socket, None] = {}  # that have proved nothing yet, the oldest first
        self._is_full = self._closed = False
        self._refused = 0
        threading.Thread(target=self._listen, name="turnwise-publish", daemon=True).start()

    def close(self) -> None:
        """Admit no more receivers. Those that are admitted stay."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._is_full:
                    self._is_full = True
                    warnings.warn(f"receivers of weights wait: {error}", stacklevel=2)
                time.sleep(0.1)  # or a connection that was reset at once
                continue
            with self._lock:
                if len(self._strangers) >= MAX_HANDSHAKES:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                self._strangers[connection] = None
            try:
                threading.Thread(target=self._admit, args=(connection,), name="turnwise-receiver", daemon=True).start()
            except RuntimeError as error:  # no thread is left
                self._refuse(connection, f"a receiver of weights could not be served: {error}")

    def _admit(self, connection: socket.socket) -> None:
        try:
            wire = admit(connection, self._key, self._mark)
            wire.limit_writes(self._seconds)
        except Exception as error:  # whatever a stranger sent
            stranger = "" if isinstance(error, WrongKey) else "a connection is not that of a receiver of weights: "
            self._refuse(connection, f"{stranger}{error}")
            return
        with self._lock:
            self._strangers.pop(connection, None)
        self._admitted(Peer(wire))

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        """Close a stranger's connection. The first few are shown, as each could else be a line of the log."""
        connection.close()
        with self._lock:
            self._strangers.pop(connection, None)
            self._refused += 1
            count = self._refused
        if count <= MAX_REFUSALS:
            last = "" if count < MAX_REFUSALS else "; further ones are not shown"
            warnings.warn(f"{reason}{last}", stacklevel=2)
