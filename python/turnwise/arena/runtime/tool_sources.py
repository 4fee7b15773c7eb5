"""The tools that an actor has now: functions, schemas, and those of open sources such as MCP servers."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from turnwise.arena.runtime.context import require_context
from turnwise.arena.runtime.recording_hooks import record_input
from turnwise.arena.runtime.user_code import end_task, ended_within
from turnwise.arena.runtime.watch import not_counted
from turnwise.chat.messages import Tool
from turnwise.chat.tools import by_name, schemas
from turnwise.types import Actor, ToolSource, ToolSourceError
from turnwise.types.completions import OpenTools
from turnwise.utils.signals import error_text

CLOSE_SECONDS = 10.0
"""Seconds that a source gets to close; then it is cancelled."""
STARTS = 2 * (os.cpu_count() or 1)
"""Sources that start at the same time; more wait."""

_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ToolSource, OpenSource]] = WeakKeyDictionary()
_starts: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def tools_of(actor: Actor) -> tuple[dict[str, Callable[..., Any] | None], list[Tool]]:
    """Return the tools of ``actor`` by name, and their schemas. ``None`` is one that the episode answers.

    A source is asked once in an episode, and its answer recorded. Raises ``ValueError`` for two tools of one name, and
    ``ToolSourceError`` for a source that can't be opened.
    """
    own = [tool for tool in actor.tools if not isinstance(tool, ToolSource)]
    with not_counted():
        functions, shown = by_name(own), schemas(own)
    owners = dict.fromkeys(functions, "the actor")
    for number, source in enumerate(sources_of([actor])):
        for schema in await _listed(source, f"{actor.id}/{number}"):
            name = schema["function"]["name"]
            if name in owners:
                raise ValueError(
                    f"tools of actor {actor.id!r}: {owners[name]} and {source.name!r} both have {name!r}: set prefix "
                    "or only of a server"
                )
            owners[name], functions[name] = repr(source.name), SourceTool(source, name)
            shown.append(schema)
    return functions, shown


def sources_of(actors: Iterable[Actor]) -> list[ToolSource]:
    """Return the sources of tools of ``actors``, each once, in order."""
    return list(dict.fromkeys(tool for actor in actors for tool in actor.tools if isinstance(tool, ToolSource)))


def unforkable(actors: Iterable[Actor]) -> str:
    """Return why the branches of a tree can't have the tools of ``actors``; empty if they can."""
    for actor in actors:
        for source in sources_of([actor]):
            if not source.shared:
                return (
                    f"the tools of actor {actor.id!r} are those of {source.name!r}, which has a state of its own in "
                    "each episode, and no branch can copy it: expected shared=True, if no episode needs such a state"
                )
    return ""


def check_forkable(actors: Iterable[Actor]) -> None:
    """Raise ``ValueError`` for tools of ``actors`` that the branches of a tree can't have."""
    if problem := unforkable(actors):
        raise ValueError(problem)


async def _listed(source: ToolSource, key: str) -> list[Tool]:
    """Return the schemas of a source, which the episode keeps under ``key``."""
    context = require_context()
    if key not in context.listings:

        async def ask(name: str) -> list[Tool]:
            return list((await _opened(source).tools()).tools)

        context.listings[key] = await record_input("tools", ask, source.name)
    return context.listings[key]


class SourceTool:
    """A tool of a source, which is opened when it is first called: a replay calls none."""

    def __init__(self, source: ToolSource, name: str) -> None:
        self.source, self.__name__ = source, name

    async def __call__(self, arguments: dict[str, Any]) -> str:
        return await _opened(self.source).call(self.__name__, arguments)


def _opened(source: ToolSource) -> OpenSource:
    """Return ``source`` as it is open for this attempt at the episode, or for the process."""
    context, loop = require_context(), asyncio.get_running_loop()
    held: dict[Any, Any] = _shared.setdefault(loop, {}) if source.shared else context.sources
    opened: OpenSource | None = held.get(source)
    if opened is not None and source.shared and opened.has_ended:
        opened.leave()
        opened = None
    if opened is None:
        opened = held[source] = OpenSource(source)
    return opened


class OpenSource:
    """A source while it is open. Its own task enters and leaves it, as libraries of structured tasks require."""

    def __init__(self, source: ToolSource) -> None:
        self.source, self._closing = source, asyncio.Event()
        self._error: Exception | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[OpenTools] = loop.create_future()
        # In a context of its own: what all episodes share is no part of the one that opened it.
        what = f"tools of {source.name!r}"
        self._task = loop.create_task(self._hold(), name=what, context=contextvars.Context())

    @property
    def has_ended(self) -> bool:
        return self._task.done() or (self._ready.done() and self._ready.result().has_ended)

    async def tools(self) -> OpenTools:
        """Wait until it is open. Raises ``ToolSourceError`` if it can't be opened, or has ended."""
        waited: set[asyncio.Future[Any]] = {self._ready, self._task}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.has_ended:
            raise self._ended()
        return self._ready.result()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the answer of a tool. Raises ``ToolSourceError`` if the source ends before."""
        tools = await self.tools()
        calling = asyncio.ensure_future(tools.call(name, arguments))
        try:
            await asyncio.wait({calling, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():  # a library may never answer what was under way
                raise self._ended()
            return await calling
        finally:
            calling.cancel()

    def _ended(self) -> ToolSourceError:
        if isinstance(self._error, ToolSourceError):
            return ToolSourceError(str(self._error))
        why = "" if self._error is None else f": {error_text(self._error)}"
        return ToolSourceError(f"the tools of {self.source.name!r} have ended{why}")

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with _starts.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(STARTS)):
                    tools = await stack.enter_async_context(self.source.opened())
                self._ready.set_result(tools)
                await self._closing.wait()
        except Exception as error:
            self._error = error
        finally:
            held = _shared.get(asyncio.get_running_loop(), {})
            if held.get(self.source) is self:
                del held[self.source]

    def leave(self) -> None:
        """Let the source close by itself."""
        self._closing.set()

    async def close(self) -> None:
        """Close the source, and wait until it is. One that doesn't end is left behind, with a warning."""
        self.leave()
        try:
            if self._ready.done():
                await ended_within(self._task, CLOSE_SECONDS)
        finally:
            if not self._task.done():
                await end_task(self._task, self._task.get_name())
