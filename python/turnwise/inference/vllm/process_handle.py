"""One start of an engine's process: vLLM's ``AsyncLLM`` here, the process there, and whether it still lives."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

KILL_SECONDS = 30.0
"""Seconds for the system to remove a killed process."""


class EngineLost(Exception):
    """The engine's process died, or was killed as it answered nothing."""


class EngineProcess:
    """Starts the process, which blocks the event loop until it is ready; everything here runs on that loop.

    ``start`` makes the ``AsyncLLM``. What is awaited here may take ``timeout`` seconds each (``None``: any time).
    """

    def __init__(self, start: Callable[[], Any], timeout: float | None) -> None:
        self.llm = start()
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._dead = self._loop.create_future()
        self._ping: asyncio.Task[Any] | None = None
        self._started = list(self.llm.engine_core.resources.engine_manager.processes)
        self.processes: list[int] = [process.pid for process in self._started]
        self._sentinels: list[int] = [process.sentinel for process in self._started]
        for sentinel in self._sentinels:
            self._loop.add_reader(sentinel, self._died)

    @property
    def is_dead(self) -> bool:
        return self._dead.done() or self.llm.errored

    async def run_unless_dead(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises :class:`EngineLost` if the process dies first, ``TimeoutError`` if time runs
        out first."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(_consume_exception)
        either: set[asyncio.Future[Any]] = {task, self._dead}
        try:
            await asyncio.wait(either, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and (task.exception() is None or not self.is_dead):
                return task.result()
            if task.done() or self._dead.done():
                raise EngineLost("its process ended")
            raise TimeoutError
        finally:
            task.cancel()

    async def run_or_kill(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """As :meth:`race` for what any engine can do at any time: one that doesn't is killed."""
        try:
            return await self.run_unless_dead(coroutine)
        except TimeoutError:
            self.kill()
            raise EngineLost(f"it answered nothing within timeout={self._timeout} s") from None

    async def is_responsive(self) -> bool:
        """True if the engine answers at all; one that doesn't is killed."""
        if self._ping is None or self._ping.done():
            self._ping = self._loop.create_task(self.run_or_kill(self.llm.get_weight_version()))
        try:
            await asyncio.shield(self._ping)
        except EngineLost:
            return False
        return True

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        kill(self.processes)

    def end(self) -> None:
        """Kill the process and free this side. It has nothing to save, and its own shutdown takes seconds."""
        self._died()
        self.kill()
        for process in self._started:
            process.join(KILL_SECONDS)  # vLLM fails on one that is still being taken apart
        self.llm.shutdown()

    def _died(self) -> None:
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)
        self._sentinels.clear()
        if not self._dead.done():
            self._dead.set_result(None)


def kill(processes: Iterable[int]) -> None:
    """End processes that lead groups of their own, and all that they started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def _consume_exception(task: asyncio.Future[Any]) -> None:
    """Take the exception of a task without a caller, so that asyncio doesn't warn."""
    if not task.cancelled():
        task.exception()
