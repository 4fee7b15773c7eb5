"""A server outside any episode: each request is an episode of one call."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

from turnwise.arena import Arena
from turnwise.arena.runner import create_context
from turnwise.arena.runtime.context import use_context
from turnwise.integrations.gateway.service.server import GatewayServer
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.types import EpisodeRequest

STANDING_ROOTS = ("/v1", "/v1/v1")
"""Roots of a server without sessions: a request names its actor as the model."""


class OneCallSessions(Mapping[str, GatewaySession]):
    """Makes a session for each request that asks for one; all take the same key.

    A request's sampling settings apply as the client sent them. Without a seed, each request draws its own.
    """

    def __init__(self, arena: Arena, settings: GatewaySettings, key: str) -> None:
        self.arena, self.settings, self.key = arena.evaluation(arena.sampling), settings, key

    def __getitem__(self, name: str) -> GatewaySession:
        if name:
            raise KeyError(name)
        episode_type = next(iter(self.arena.episodes))
        request = EpisodeRequest(episode_type, {}, seed=secrets.randbits(62))
        with use_context(create_context(self.arena, request, None, Counter())):
            session = GatewaySession(list(self.arena.actors), self.arena, self.settings)
        for endpoint in session.endpoints.values():
            endpoint.key = self.key
        return session

    def __iter__(self) -> Iterator[str]:
        return iter([""])

    def __len__(self) -> int:
        return 1


@asynccontextmanager
async def standing(arena: Arena, settings: GatewaySettings, key: str) -> AsyncIterator[str]:
    """Serve the actors of ``arena`` to holders of ``key`` for the block, and yield the URL, which ends in ``/v1``.

    Raises ``OSError`` for a port that is taken.
    """
    server = GatewayServer(settings, OneCallSessions(arena, settings, key), {}, roots=STANDING_ROOTS)
    await server.start()
    try:
        yield f"{server.url}/v1"
    finally:
        await server.stop()
