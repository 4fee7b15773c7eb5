"""Authenticated messages between two processes that share a key: nothing is unpickled before its sender is known.

Both sides prove that they have the key by an HMAC-SHA256 over two fresh random numbers, and never send the key itself.
Every message carries HMACs under a key of this connection, over its direction, number, length and content. So a message
can't be forged, changed, repeated or dropped without the key, and no one waits for the bytes of a forged length.
Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import struct
from contextlib import suppress
from typing import Any

HELLO = b"turnwise workers 2\n"
NONCE = 32
"""Bytes of a random number, and of an HMAC-SHA256."""

_NO = bytes(NONCE)
"""Answer to a peer without the key."""

HANDSHAKE_SECONDS = 10.0
_HEADER = struct.Struct("!Q32s32s")
"""Length of a message, its HMAC, and that of the content."""


class KeyRefused(PermissionError):
    """Raised if the two sides don't have the same key."""


class Channel:
    """One connection after its handshake. A message is a tuple of its kind and its content."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, ours: bytes, theirs: bytes
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0

    async def send(self, kind: str, *content: Any) -> None:
        """Send a message. Raises ``ConnectionError`` if the connection has ended."""
        payload = pickle.dumps((kind, *content), protocol=5)
        signatures = self._signatures(self._ours, self._sent, len(payload), payload)
        self._sent += 1
        self._writer.write(_HEADER.pack(len(payload), *signatures))
        self._writer.write(payload)
        await self._writer.drain()

    async def receive(self) -> tuple[Any, ...]:
        """Return the next message. Raises ``ConnectionError`` if the connection has ended or the signature is wrong."""
        try:
            length, *given = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            self._check(given[0], self._signatures(self._theirs, self._received, length)[0])
            payload = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the connection was closed") from error
        self._check(given[1], self._signatures(self._theirs, self._received, length, payload)[1])
        self._received += 1
        message: tuple[Any, ...] = pickle.loads(payload)
        return message

    def _signatures(self, side: bytes, number: int, length: int, *payload: bytes) -> list[bytes]:
        """Return the HMAC of a message's length, and that of its content if it is given."""
        place = number.to_bytes(8, "big")
        parts = [(b"length", length.to_bytes(8, "big")), *((b"content", content) for content in payload)]
        return [_sign(self._key, side, place, *part) for part in parts]

    def _check(self, given: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(given, expected):
            raise ConnectionError("a message does not carry the peer's signature")

    def close(self) -> None:
        """Close the connection, without waiting."""
        with suppress(RuntimeError):  # the loop has ended
            self._writer.close()


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> Channel:
    """Return the channel to a peer that connected. Raises :class:`KeyRefused` for one without the key."""
    nonce = secrets.token_bytes(NONCE)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        writer.write(HELLO + nonce)
        theirs = await _read(reader, NONCE)
        proof = await _read(reader, NONCE)
        if not hmac.compare_digest(proof, _sign(key.encode(), b"connects", nonce, theirs)):
            writer.write(_NO)
            raise KeyRefused("a peer connected without this run's key")
        writer.write(_sign(key.encode(), b"accepts", nonce, theirs))
        await writer.drain()
    session = _sign(key.encode(), b"session", nonce, theirs)
    return Channel(reader, writer, session, b"accepts", b"connects")


async def connect(host: str, port: int, key: str) -> Channel:
    """Connect to a worker. Raises :class:`KeyRefused` unless both sides have the same key, and ``OSError``."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        reader, writer = await asyncio.open_connection(host, port, limit=2**20)
        try:
            if await _read(reader, len(HELLO)) != HELLO:
                raise ConnectionError("no turnwise worker of this version listens there")
            theirs, nonce = await _read(reader, NONCE), secrets.token_bytes(NONCE)
            writer.write(nonce + _sign(key.encode(), b"connects", theirs, nonce))
            proof = await _read(reader, NONCE)
            if proof == _NO:
                raise KeyRefused("it refuses this run's key")
            if not hmac.compare_digest(proof, _sign(key.encode(), b"accepts", theirs, nonce)):
                raise KeyRefused("it does not have this run's key")
        except BaseException:
            writer.close()
            raise
    return Channel(reader, writer, _sign(key.encode(), b"session", theirs, nonce), b"connects", b"accepts")


async def _read(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the connection was closed") from error


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")
