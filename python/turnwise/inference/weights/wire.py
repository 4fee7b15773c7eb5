"""A connection on which both sides have proved that they know one key: frames of JSON, and the bytes of weights.

The sender of weights listens. It sends a random number, and the receiver answers with an HMAC over it and its own
number. The sender then proves the same, so a receiver loads nothing from a stranger. Neither sends the key.

torch's ``TCPStore`` has no such check. It serves everyone who reaches its port, and lists its keys on request, so even
random names of groups are no secret. Facts that the ranks of a group must know of each other therefore travel in frames
of this connection (see ``group``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

from turnwise.inference.weights.weight_block import TransferError
from turnwise.utils.files import KEY_VARIABLE

LOOPBACK = "127.0.0.1"

PROTOCOL = 2
"""Changes with the frames, so that processes of different versions reject each other."""

HANDSHAKE_SECONDS = 10.0
"""The most seconds until a new connection has proved that it knows the key."""

CONNECT_SECONDS = 30.0
"""The most seconds for connecting to a sender's host."""

MAX_BYTES = 2**24
"""The most bytes of a frame. Before the key is checked they are fewer."""

MAX_HANDSHAKE_BYTES = 2**10

_LENGTH = struct.Struct("!I")

Frame = dict[str, Any]


class WrongKey(TransferError):
    """Raised if the two sides of a connection have different keys."""


class Wire:
    """One side of a connection. One thread reads at a time; any may write."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._writing = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished without closing the connection counts as gone after 25 seconds.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._poll = select.poll()  # select() fails for descriptors from 1024 on
        self._poll.register(connection, select.POLLIN)
        here, there = connection.getsockname(), connection.getpeername()
        self.here, self.there = str(here[0]), f"{there[0]}:{there[1]}"

    def limit_writes(self, seconds: float) -> None:
        """Let a write fail after ``seconds`` in which the other side took nothing."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, **frame: Any) -> None:
        """Send one frame. Raises ``OSError`` if the other side is gone or takes nothing."""
        content = json.dumps(frame).encode()
        with self._writing:
            self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def send_bytes(self, content: Any, **frame: Any) -> None:
        """Send a frame, and right after it the buffers that ``content`` yields."""
        head = json.dumps(frame).encode()
        with self._writing:
            self._socket.sendall(_LENGTH.pack(len(head)) + head)
            for piece in content:
                self._socket.sendall(piece)

    def is_readable(self, seconds: float) -> bool:
        """True if there is something to read within ``seconds``, the end of the connection included."""
        return bool(self._poll.poll(seconds * 1000))

    def receive(self, seconds: float | None = None, most: int = MAX_BYTES) -> Frame:
        """Read one frame. Raises ``OSError`` if there is none within ``seconds``, or none that is valid."""
        until = None if seconds is None else time.monotonic() + seconds
        head = bytearray(_LENGTH.size)
        self.receive_bytes(memoryview(head), until)
        [length] = _LENGTH.unpack(head)
        if length > most:
            raise OSError(f"{self.there} sent a frame of {length} bytes: expected at most {most}")
        content = bytearray(length)
        self.receive_bytes(memoryview(content), until)
        try:
            frame = json.loads(content)
        except (ValueError, RecursionError):
            frame = None
        if not isinstance(frame, dict):
            raise OSError(f"{self.there} sent {bytes(content[:40])!r}: expected a mapping in JSON")
        return frame

    def receive_bytes(self, target: memoryview, until: float | None = None, silence: float | None = None) -> None:
        """Fill ``target``. Raises ``OSError`` at the time ``until``, and after ``silence`` seconds without a byte."""
        while len(target):
            left = silence if until is None else max(until - time.monotonic(), 0.0)
            if left is not None and not self.is_readable(left):
                raise TimeoutError(f"{self.there} sent nothing in time")
            count = self._socket.recv_into(target)
            if not count:
                raise ConnectionResetError(f"{self.there} closed the connection")
            target = target[count:]

    def cut(self) -> None:
        """End the connection for both sides, also for threads that read or write now."""
        with suppress(OSError):  # the other side may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._socket.close()


# -- the two sides of a handshake --------------------------------------------------------------------------------------
def sender_key() -> tuple[str, str]:
    """Return a sender's key, and the key in its handles: ``""`` if all processes of the run have it already."""
    if shared := os.environ.get(KEY_VARIABLE, ""):
        return shared, ""
    key = secrets.token_urlsafe(24)
    return key, key


def receiver_key(in_handle: str) -> str:
    """Return the key for a handle that holds ``in_handle``. Raises :class:`TransferError` if this process lacks it."""
    key = in_handle or os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise TransferError(
            f"the sender of the weights asks for the key of its run: set {KEY_VARIABLE} in this process too"
        )
    return key


def prove(key: str, *values: Any) -> str:
    """The HMAC of ``values``, which only a process with ``key`` can make."""
    return hmac.new(key.encode(), json.dumps(values).encode(), hashlib.sha256).hexdigest()


def _is_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="backslashreplace"), expected.encode())


def admit(connection: socket.socket, key: str, mark: str) -> Wire:
    """Return the wire of a new ``connection`` to the sender ``mark`` once it has proved that it knows ``key``.

    Raises ``OSError`` for a stranger, and :class:`WrongKey`. Until then it sends only a random number.
    """
    wire = Wire(connection)
    wire.limit_writes(HANDSHAKE_SECONDS)
    ours = secrets.token_hex(16)
    wire.send(turnwise=PROTOCOL, number=ours)
    answer = wire.receive(HANDSHAKE_SECONDS, MAX_HANDSHAKE_BYTES)
    theirs, proof = str(answer.get("number")), str(answer.get("proof"))
    if not _is_equal(proof, prove(key, "receiver", mark, ours, theirs)):
        wire.send(refused="it does not have the sender's key")
        raise WrongKey(f"{wire.there} asked for weights with a wrong key")
    wire.send(proof=prove(key, "sender", mark, ours, theirs))
    return wire


def join(host: str, port: int, key: str, mark: str) -> Wire:
    """Connect to the sender ``mark``. Raises ``OSError`` if it is not there, and :class:`WrongKey`."""
    wire = Wire(socket.create_connection((host, port), timeout=CONNECT_SECONDS))
    try:
        theirs = wire.receive(HANDSHAKE_SECONDS, MAX_HANDSHAKE_BYTES)
        if theirs.get("turnwise") != PROTOCOL:
            raise OSError(f"it speaks {theirs.get('turnwise')!r}: expected {PROTOCOL}, that of this turnwise")
        number, ours = str(theirs.get("number")), secrets.token_hex(16)
        wire.send(number=ours, proof=prove(key, "receiver", mark, number, ours))
        answer = wire.receive(HANDSHAKE_SECONDS, MAX_HANDSHAKE_BYTES)
        expected = prove(key, "sender", mark, number, ours)
        if "refused" in answer or not _is_equal(str(answer.get("proof")), expected):
            raise WrongKey(
                f"the key of this process is not that of the sender of weights at {host}:{port}: it comes from the "
                f"weight handle, or from {KEY_VARIABLE}, which must be the same in all processes of a run"
            )
    except BaseException:
        wire.close()
        raise
    return wire


def address_towards(host: str) -> str:
    """The address of this machine at which ``host`` reaches it."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
