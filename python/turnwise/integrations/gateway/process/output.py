"""Reads what a process writes: the last part of it, whoever has the pipe open."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

OUTPUT_BYTES = 64 * 1024
"""Number of the latest bytes of a process's output that are kept."""
FREE_BYTES, SLICE = 16 << 20, 1 << 16
"""Output that is read at full speed, and the bytes of each millisecond from then on: a flood leaves time for others."""


@contextlib.asynccontextmanager
async def pipe(tail: Tail) -> AsyncIterator[int]:
    """Yield the end of a pipe that ``tail`` reads; close it once the process has it."""
    output, written = os.pipe()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: tail, os.fdopen(output, "rb"))
    try:
        yield written
    finally:
        transport.close()


class Tail(asyncio.Protocol):
    """Reads a pipe, keeps the last part of it, and shows all of it to the tail ``also``."""

    def __init__(self, also: Tail | None = None) -> None:
        self.also = also
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._read = 0
        self._ended = asyncio.Event()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._read += len(data)
        if self._read > FREE_BYTES and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(len(data) / SLICE / 1000, self._resume)
        if self.also is not None:
            self.also.data_received(data)
        self._kept.append(data)
        self._size += len(data)
        while self._size - len(self._kept[0]) >= OUTPUT_BYTES:
            self._size -= len(self._kept.popleft())

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()

    async def ends(self) -> None:
        """Wait until all is read, which takes no time once nothing has the pipe open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._ended.wait()

    @property
    def output(self) -> bytes:
        return b"".join(self._kept)[-OUTPUT_BYTES:]
