"""Turns SIGINT, SIGTERM and SIGHUP into a request to stop: the loop ends between stages, and saves.

The exit code of a run that a signal ended is 128 plus its number: 130, 143, 129.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from turnwise.utils import signals
from turnwise.utils.signals import SIGNALS

PATIENCE = 10.0
"""Seconds after SIGTERM or SIGHUP in which running stages may end by themselves. Schedulers kill 30 s after them."""

LEAVE = 10.0
"""Seconds that a cancelled task has to end before the loop continues without it."""

BLOCKED = 2.0
"""Seconds that code may block the event loop once :data:`PATIENCE` is over; then it is interrupted."""


class StopNow(KeyboardInterrupt):
    """Raised in the main thread by the third signal, and if the thread still blocks after :data:`PATIENCE`."""


class StopRequest:
    """A flag that a signal sets. After the first signal the loop stops, saves and ends.

    Running stages may still end by themselves: until a second signal after SIGINT, for :data:`PATIENCE` seconds after
    SIGTERM and SIGHUP. Code that blocks the event loop for longer than that gets a :class:`StopNow`, unless it is
    :meth:`undisturbed`. A third signal raises one at once.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._count, self._last_signal, self._deadline = 0, 0.0, float("inf")
        self._undisturbed, self._forced = 0, False
        self._asked: asyncio.Event | None = None
        self._hurry: asyncio.Event | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def request(self, number: int = signal.SIGINT) -> None:
        """Request a stop as signal ``number`` does, from the event loop's thread."""
        self._count_signal(number)
        self._wake()

    def _count_signal(self, number: int) -> bool:
        """Count a signal, unless it belongs to the one before, and return True if it is the third."""
        now = time.monotonic()
        if self._count and now - self._last_signal < signals.TOGETHER:
            return False
        self._count, self._last_signal = self._count + 1, now
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._deadline = float("inf") if number == signal.SIGINT else now + PATIENCE
        return self._count > 2

    def _wake(self) -> None:
        if self._asked is not None and self._hurry is not None:
            self._asked.set()
            if self._count > 1:
                self._hurry.set()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let the block end by itself, also after :data:`PATIENCE`, unless a third signal comes."""
        self._undisturbed += 1
        try:
            yield
        finally:
            self._undisturbed -= 1

    def _force(self, loop: asyncio.AbstractEventLoop, main: int, asked: threading.Event, over: threading.Event) -> None:
        """Interrupt the thread ``main`` if it blocks ``loop`` after the patience."""
        asked.wait()
        while not over.wait(max(0.05, min(1.0, self._deadline - time.monotonic()))):
            if time.monotonic() < self._deadline or self._undisturbed:
                continue
            turned = threading.Event()
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(turned.set)
            if not turned.wait(BLOCKED) and not over.is_set() and not self._undisturbed and self.signal is not None:
                self._forced = True
                signal.pthread_kill(main, self.signal)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle :data:`SIGNALS` inside the block, but not those that this process ignores (``nohup``).

        Outside the main thread only :meth:`request` stops the loop, as no other thread may handle signals.
        """
        self._asked, self._hurry = asyncio.Event(), asyncio.Event()
        loop, terminals = asyncio.get_running_loop(), [fd for fd in (1, 2) if _is_terminal(fd)]
        before: dict[signal.Signals, Any] = {}
        asked, over = threading.Event(), threading.Event()

        def handle(number: int, frame: Any) -> None:
            now, self._forced = self._count_signal(number) or (self._forced and not self._undisturbed), False
            asked.set()
            if number == signal.SIGHUP:
                _redirect_to_null(terminals)
            with suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(self._wake)
            if now:
                raise StopNow

        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            before = {number: signal.signal(number, handle) for number in handled}
            args = (loop, threading.get_ident(), asked, over)
            threading.Thread(target=self._force, args=args, name="turnwise-signals", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            asked.set()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._asked = self._hurry = None

    async def unless_requested(self, work: Awaitable[Any], *, patient: bool = False) -> Any:
        """Return ``await work``, or cancel it and return ``None`` if a stop is requested first.

        ``patient`` work may end by itself until a second signal, or until :data:`PATIENCE` is over.
        """
        task = asyncio.ensure_future(work)
        if self._asked is None or self._hurry is None:
            return await task
        asked, hurry = asyncio.ensure_future(self._asked.wait()), asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if patient and not task.done():
                left = max(0.0, self._deadline - time.monotonic())
                until = None if left == float("inf") else left
                await asyncio.wait({task, hurry}, timeout=until, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            await wait_or_abandon([task, asked, hurry])


async def wait_or_abandon(tasks: list[asyncio.Future[Any]]) -> None:
    """Cancel ``tasks``, and wait at most :data:`LEAVE` seconds until they have ended."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # asyncio warns of unread errors
    if running := [task for task in tasks if not task.done()]:
        await asyncio.wait(running, timeout=LEAVE)


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _redirect_to_null(terminals: list[int]) -> None:
    """Discard output to ``terminals``, which are gone: writing to them would fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in terminals:
        os.dup2(null, descriptor)
    os.close(null)
