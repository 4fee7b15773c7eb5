"""Many sessions: all are answered, and an ended one leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

import aiohttp
import pytest

from turnwise.integrations.gateway import AgentEpisode, Gateway, GatewaySession
from turnwise.integrations.gateway import gateway as gateway_module
from turnwise.types import EpisodeRequest

from .helpers import arena_of


class Agents:
    """Agents that make ``calls`` calls each, in a growing chat, over one HTTP client."""

    def __init__(self, calls):
        self.calls, self.http = calls, None

    async def agent(self, question, models):
        model, messages = models["solver"], [{"role": "user", "content": "x" * 20}]
        headers = {"Authorization": f"Bearer {model.api_key}"}
        for _ in range(self.calls):
            body = {"model": model.name, "messages": messages}
            async with self.http.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as response:
                answer = await response.json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "y"}]
        return 1.0

    async def play(self, arena, count):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self.http:
            results = await arena.generate_rollouts([EpisodeRequest("agent", "x")] * count)
        arena.client.calls.clear()
        return results


def arena_with(agents, **settings):
    arena, gateway = arena_of(lambda request: "4"), Gateway(renderer="template", **settings)
    arena.add_episode(AgentEpisode(agents.agent, gateway, actors=["solver"]))
    return arena, gateway


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_many_sessions_at_once_leave_nothing_behind(count, monkeypatch):
    monkeypatch.setattr(gateway_module, "REMEMBERED", 3)
    kept, begun = weakref.WeakSet(), GatewaySession.__init__

    def noted(self, *arguments):
        begun(self, *arguments)
        kept.add(self.endpoints["solver"].chats)

    monkeypatch.setattr(GatewaySession, "__init__", noted)
    agents = Agents(calls=3)
    arena, gateway = arena_with(agents)
    most = []

    async def run():
        playing = asyncio.ensure_future(agents.play(arena, count))
        while not playing.done():
            most.append((len(gateway.sessions), len(kept)))
            await asyncio.sleep(0.005)
        return await playing

    results = asyncio.run(run())
    assert max(most) == (count, count)
    assert [result.rollout.error for result in results] == [None] * count
    for result in results:
        assert [step.turn for step in result.rollout.steps] == [0, 1, 2]
        assert result.rollout.metrics["gateway/extended_rows/solver"] == 2
    gc.collect()
    assert not gateway.sessions and len(kept) == 0
    assert len(gateway.ended) == 3
