"""An event loop that notices when nothing in it can go on: a replay then waits for what its record doesn't have."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

GRACE = 0.2
"""Seconds to wait for unknown threads before the loop counts as idle."""


class DeadlockDetectingLoop(asyncio.SelectorEventLoop):
    """Calls ``on_idle()`` when all tasks wait: no timer, no open socket, no running thread of the loop.

    ``on_idle`` must wake a waiting task or end the program; otherwise the loop calls it again.
    """

    def __init__(self) -> None:
        self.on_idle: Callable[[], None] = lambda: None
        self.in_threads = 0
        super().__init__(_WatchingSelector(self))

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.in_threads += 1
        future.add_done_callback(self._out_of_thread)
        return future

    def _out_of_thread(self, future: asyncio.Future[Any]) -> None:
        self.in_threads -= 1


class _WatchingSelector(selectors.DefaultSelector):
    def __init__(self, loop: DeadlockDetectingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        # One open file is the loop's own, through which threads wake it.
        if timeout is not None or self._loop.in_threads or len(self.get_map()) > 1:
            return super().select(timeout)
        ready = super().select(GRACE)
        if not ready:
            self._loop.on_idle()
        return ready
