"""An asyncio event loop whose clock jumps: hours of waiting pass in milliseconds, and every run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` as ``asyncio.run`` does, on a :class:`VirtualClockLoop`."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when all tasks wait: ``asyncio.sleep(3600)`` costs nothing.

    ``loop.time()`` begins at 0, in seconds. Tasks may wait for timers only: threads, processes and sockets take real
    time, which does not pass on this clock. Raises ``RuntimeError`` if all tasks wait and no timer is set.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance the clock by ``seconds``."""
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("everything waits and no timer is set: a deadlock, or work outside of the event loop")
        self._loop.jump(max(timeout, 0.0))
        return []
