"""Serves an arena's actors as models outside any episode: each request is an episode of one call."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

from turnwise.arena import Arena
from turnwise.arena.runner import create_context
from turnwise.arena.runtime.context import use_context
from turnwise.integrations.gateway.server import STANDING_ROOTS, Server
from turnwise.integrations.gateway.session import Session
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.types import EpisodeRequest


class OneCallSessions(Mapping[str, Session]):
    """Makes a session for each request that asks for one; all take the same key.

    A request's sampling counts as the client sent it. Without a seed, each request draws its own.
    """

    def __init__(self, arena: Arena, settings: GatewaySettings, key: str) -> None:
        self.arena, self.settings, self.key = arena.evaluation(arena.sampling), settings, key

    def __getitem__(self, name: str) -> Session:
        if name:
            raise KeyError(name)
        episode_type = next(iter(self.arena.episodes))
        request = EpisodeRequest(episode_type, {}, seed=secrets.randbits(62))
        with use_context(create_context(self.arena, request, None, Counter())):
            session = Session(list(self.arena.actors), self.arena, self.settings)
        for seat in session.seats.values():
            seat.key = self.key
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
    server = Server(settings, OneCallSessions(arena, settings, key), {}, roots=STANDING_ROOTS)
    await server.start()
    try:
        yield f"{server.url}/v1"
    finally:
        await server.stop()
