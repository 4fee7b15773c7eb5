"""One start of an engine's process: vLLM's ``AsyncLLM`` on this side, the child process, and a watch on its life."""

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
    """Raised if the engine's process died, or was killed because it did not answer."""


class EngineProcess:
    """Starts the process, and blocks the event loop until it is ready. Everything here runs on that loop.

    ``start`` makes the ``AsyncLLM``. Each awaited call may take ``timeout`` seconds (``None``: any time).
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
        """Return the coroutine's result.

        Raises :class:`EngineLost` if the process dies first, and ``TimeoutError`` if the time runs out first.
        """
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
        """Return the coroutine's result, or kill the engine when the time runs out. For calls that never take long.

        Raises :class:`EngineLost` if the process dies or is killed.
        """
        try:
            return await self.run_unless_dead(coroutine)
        except TimeoutError:
            self.kill()
            raise EngineLost(f"it answered nothing within timeout={self._timeout} s") from None

    async def is_responsive(self) -> bool:
        """True if the engine answers a simple call. An engine that doesn't is killed."""
        if self._ping is None or self._ping.done():
            self._ping = self._loop.create_task(self.run_or_kill(self.llm.get_weight_version()))
        try:
            await asyncio.shield(self._ping)
        except EngineLost:
            return False
        return True

    def kill(self) -> None:
        """Kill the process and all processes that it started, at once."""
        kill(self.processes)

    def end(self) -> None:
        """Kill the process and free this side. The process has nothing to save, and its own shutdown takes seconds."""
        self._died()
        self.kill()
        for process in self._started:
            process.join(KILL_SECONDS)  # vLLM's shutdown fails while the system still removes the process
        self.llm.shutdown()
        # vLLM's own watch may have seen the end first. It then leaves the sockets to this loop, which may stop before,
        # and an open one hangs whoever collects its context as garbage.
        core = self.llm.engine_core.resources
        for socket in (core.input_socket, core.output_socket):
            socket.close(linger=0)

    def _died(self) -> None:
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)
        self._sentinels.clear()
        if not self._dead.done():
            self._dead.set_result(None)


def kill(processes: Iterable[int]) -> None:
    """Kill processes that lead their own groups, and all processes in these groups."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def _consume_exception(task: asyncio.Future[Any]) -> None:
    """Read the exception of a task without a caller, so that asyncio doesn't warn."""
    if not task.cancelled():
        task.exception()
