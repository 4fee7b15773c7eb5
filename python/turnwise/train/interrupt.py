"""Turns Ctrl-C into a request: the loop stops between stages, saves, and ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """A flag that Ctrl-C sets. The first one asks the loop to stop, save and end; a second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._event: asyncio.Event | None = None

    def request(self) -> None:
        """Ask for a stop, from the event loop's thread."""
        self.requested = True
        if self._event is not None:
            self._event.set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT inside the block. Outside the main thread this does nothing, as only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._event = asyncio.Event()
        loop = asyncio.get_running_loop()

        def heard(signum: int, frame: Any) -> None:
            signal.signal(signal.SIGINT, previous)  # so that a second Ctrl-C interrupts
            loop.call_soon_threadsafe(self.request)
            self.requested = True

        previous = signal.signal(signal.SIGINT, heard)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            self._event = None

    async def unless_requested(self, work: Any) -> Any:
        """Return ``await work``, or cancel it and return ``None`` if a stop is requested first."""
        task = asyncio.ensure_future(work)
        if self._event is None:
            return await task
        waiting = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        finally:
            if not task.done():
                task.cancel()
            waiting.cancel()
            await asyncio.wait({waiting})  # no task is left behind
