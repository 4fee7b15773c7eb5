"""The limits of one attempt: they count the calls of its session and of the sessions of all its sub-agents."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakKeyDictionary

from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.integrations.gateway.wire.request import WireError, session_over

LONG = 32_768
"""Bytes of a request, or characters of a chat, from which on it is read and rendered in a thread."""
LEAST_UNDER_WAY = 64
"""Requests of one attempt that may be under way at once, if ``max_calls`` is smaller."""

_rendering: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""For each event loop, how many long chats are rendered at once."""


class TooManyChildrenError(RuntimeError):
    """Raised for a sub-agent beyond ``max_children`` or ``max_depth``."""


class AttemptLimits:
    """Counts what one attempt uses, and raises :class:`WireError` where that is more than its ``settings`` allow.

    Example: ``with limits.request(): ...`` holds one of the requests that may be under way.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.bytes_read = 0
        """Bytes of all requests."""
        self.under_way = 0
        """Requests that are being answered."""
        self.prompt_tokens = 0
        """Tokens of all prompts."""
        self.children = 0
        """Sub-agents so far."""
        self.arrived = 0
        """Calls so far."""
        self.opening = threading.Lock()
        """Held while a sub-agent is opened, and when the session ends: agents may have threads of their own."""
        self._slots = asyncio.Semaphore(settings.max_parallel)
        self._long = asyncio.Semaphore(1)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request for the block, as each holds a connection."""
        most = max(self.settings.max_calls, LEAST_UNDER_WAY)
        if self.under_way >= most:
            raise WireError(429, "too_many_requests", f"{most} requests of the session are under way")
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    def begin_reading(self, size: int) -> None:
        """Count the bytes of a request before they are there, as many requests may arrive at once."""
        if self.bytes_read + size > self.settings.max_total_body:
            raise session_over(f"its requests have max_total_body={self.settings.max_total_body} bytes")
        self.bytes_read += size

    def next_call(self) -> int:
        """Return the index of a new call among those of the attempt."""
        if self.arrived >= self.settings.max_calls:
            raise session_over(f"it has made its max_calls={self.settings.max_calls} calls")
        self.arrived += 1
        return self.arrived - 1

    def add_child(self, depth: int) -> None:
        """Count a sub-agent of an agent at ``depth``. Raises :class:`TooManyChildrenError`."""
        if depth >= self.settings.max_depth:
            raise TooManyChildrenError(f"child(): there are max_depth={self.settings.max_depth} in each other")
        if self.children >= self.settings.max_children:
            raise TooManyChildrenError(f"child(): the attempt has max_children={self.settings.max_children}")
        self.children += 1

    def check_prompts(self) -> None:
        """Raise if the prompts have as many tokens as they may."""
        if self.prompt_tokens >= (most := self.settings.max_total_tokens):
            raise session_over(f"its prompts have max_total_tokens={most} tokens")

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until fewer than ``max_parallel`` calls run, and run for the block."""
        try:
            async with asyncio.timeout(self.settings.call_timeout):
                await self._slots.acquire()
        except TimeoutError:
            raise WireError(
                429,
                "too_many_calls",
                f"waited {self.settings.call_timeout:g} s behind {self.settings.max_parallel} calls",
            ) from None
        try:
            yield
        finally:
            self._slots.release()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait until the attempt may work on ``size`` bytes: on one long request at a time."""
        if size < LONG:
            yield
            return
        of_all = _rendering.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))
        async with self._long, of_all:
            yield
