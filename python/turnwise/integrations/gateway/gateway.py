"""The gateway: opens sessions for episodes, and serves HTTP while any of them is open."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from turnwise.inference.common.proxies import LOOPBACK, bypass_proxies
from turnwise.integrations.gateway.models import disable_agents_tracing
from turnwise.integrations.gateway.sessions.children import ChildSession
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.types.protocols import ArenaForHooks

if TYPE_CHECKING:
    from turnwise.integrations.gateway.service.server import GatewayServer

REMEMBERED = 1000
"""Number of ended sessions that are remembered. Their late calls get the reason of the end as the answer."""

SessionT = TypeVar("SessionT", bound=GatewaySession)


class Gateway:
    """Serves an arena's actors as models of the OpenAI and Anthropic APIs, one URL per session and actor.

    It listens while a session is open, or for the whole of an ``async with`` block. ``settings`` may be changed by
    keywords: ``Gateway(renderer="qwen3")``. Raises ``ImportError`` if aiohttp is missing.

    Example::

        gateway = Gateway()
        arena.add_episode(AgentEpisode(agent, gateway, actors=["solver"]))
    """

    def __init__(self, settings: GatewaySettings | None = None, **changes: Any) -> None:
        self.settings = GatewaySettings(**changes) if settings is None else settings
        if settings is not None and changes:
            raise TypeError(f"got settings and {sorted(changes)}: expected one of them")
        if self.settings.host not in LOOPBACK:
            warnings.warn(
                f"host={self.settings.host!r}: is open to other hosts, and keys travel unencrypted", stacklevel=2
            )
        self.sessions: dict[str, GatewaySession] = {}
        self.on_session_end: Callable[[GatewaySession], None] = lambda session: None
        """Called with each session when it has ended, for example to measure."""
        self.ended: dict[str, tuple[list[str], str]] = {}
        """The keys of the latest ended sessions, and why they take no more calls."""
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[GatewayServer] | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._close()

    @asynccontextmanager
    async def session(self, actors: Sequence[str], arena: ArenaForHooks) -> AsyncIterator[GatewaySession]:
        """Open a session for the running episode. It ends with the block, and then takes no more calls.

        Raises the error of the model or of turnwise in a call, even if the agent caught it.
        """
        async with self.serve(GatewaySession(actors, arena, self.settings)) as session:
            yield session

    @asynccontextmanager
    async def serve(self, session: SessionT) -> AsyncIterator[SessionT]:
        """Serve ``session`` for the block, see :meth:`session`."""
        session.opened_at((await self._open()).url, self.sessions, ChildSession)
        reason = "the episode has ended"
        try:
            yield session
        except BaseException as error:
            ended = isinstance(error, (TimeoutError, asyncio.CancelledError))
            reason = "its deadline has passed" if ended else f"the episode has failed: {type(error).__name__}"
            if session.failure is not None and isinstance(error, Exception):
                raise session.failure from error
            raise
        else:
            if session.failure is not None:
                raise session.failure
        finally:
            try:
                await session.end(reason)
                for model in (model for one in session.walk() for model in one.models.values()):
                    await model.close()
            finally:
                for one in session.walk():
                    del self.sessions[one.id]
                    self.ended[one.id] = one.keys, one.is_over
                self.on_session_end(session)
                while len(self.ended) > REMEMBERED:
                    del self.ended[next(iter(self.ended))]
                await self._close()

    @asynccontextmanager
    async def at_socket(self, path: str) -> AsyncIterator[None]:
        """Serve the open sessions at a Unix socket too for the block."""
        assert self._starting is not None, "no session is open"
        async with (await self._starting).at_socket(path):
            yield

    # -- the server, while a session needs it --------------------------------------------------------------------------
    async def _open(self) -> GatewayServer:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a server of an event loop that has ended is gone
            self._loop, self._users, self._starting, self._stopping = loop, 0, None, None
        self._users += 1
        if self._starting is None:
            self._starting = loop.create_task(self._start(self._stopping))
        try:
            return await asyncio.shield(self._starting)
        except BaseException:
            await self._close()
            raise

    async def _start(self, before: asyncio.Task[None] | None) -> GatewayServer:
        try:
            from turnwise.integrations.gateway.service.server import GatewayServer
        except ImportError as error:
            raise ImportError("the gateway needs aiohttp: pip install 'turnwise[gateway]'") from error
        if before is not None:
            await before
        server = GatewayServer(self.settings, self.sessions, self.ended)
        await server.start()
        bypass_proxies(server.url)
        disable_agents_tracing()
        return server

    async def _close(self) -> None:
        self._users -= 1
        if self._users or self._starting is None:
            return
        starting, self._starting = self._starting, None

        async def stop() -> None:
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().stop()

        self._stopping = asyncio.get_running_loop().create_task(stop())
        await asyncio.shield(self._stopping)
