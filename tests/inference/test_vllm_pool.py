"""A pool of two real vLLM servers: exact after every update, one of them killed on the way, and adapters."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from turnwise.inference import PoolClient, VLLMServerClient, VLLMServerReader
from turnwise.inference.pool.engine import PrefixRouter
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server.reader import ServedWeights
from turnwise.inference.weights.shared_transfer import SharedTransfer
from turnwise.inference.weights.sync import SharedMemoryTransfer

from .helpers import (
    EXACT,
    adapted,
    build,
    check_adapters,
    check_updates,
    error_of,
    move,
    requests_of,
    versions_of,
)

pytestmark = [pytest.mark.xdist_group("vllm_servers"), pytest.mark.slow]


def engines_of(servers: list[Any], model: Any) -> dict[str, VLLMServerClient]:
    shared = SharedTransfer(SharedMemoryTransfer())
    return {
        server.url: VLLMServerClient(server.endpoint(), ByteTokenizer(), model, transfer=shared.lend())
        for server in servers
    }


async def test_a_server_is_killed_and_every_token_stays_exact(vllm_servers: list[Any]) -> None:
    model, killed = build("served"), vllm_servers[0]
    # All these prompts start alike: only a router without affinity shares them out.
    async with PoolClient(engines_of(vllm_servers, model), router=PrefixRouter(imbalance=0), dead_after=5.0) as client:
        await check_updates(client, model, updates=3)
        counts = [client.stats()[f"engines/{server.url}/requests"] for server in vllm_servers]
        assert min(counts) >= 4
        move(model, 0.01)
        client.load_weights("default", model.state_dict().items(), 4)
        running = asyncio.ensure_future(client.generate(requests_of(8, tokens=20)))
        while client.stats()[f"engines/{killed.url}/requests"] == counts[0]:
            await asyncio.sleep(0)
        os.kill(killed.pid, signal.SIGKILL)
        responses = await running
        assert error_of(model, responses) < EXACT and versions_of(responses) == {4}
        assert client.serving() == [vllm_servers[1].url]
        move(model, 0.01)
        client.load_weights("default", model.state_dict().items(), 5)  # nobody waits for the killed one
        while len(client.serving()) < 2:
            await asyncio.sleep(0.2)
        before = client.stats()[f"engines/{killed.url}/requests"]
        responses = await client.generate(requests_of(8))
        assert error_of(model, responses) < EXACT and versions_of(responses) == {5}
        assert client.stats()[f"engines/{killed.url}/requests"] > before


async def test_adapters_and_a_reader(vllm_servers: list[Any]) -> None:
    """The second server joins late, when the base and each adapter were sent once and one of them twice."""
    shared, models = adapted(build("served"))
    engines = engines_of(vllm_servers, models)
    late = engines.pop(vllm_servers[1].url)
    async with PoolClient(engines, router=PrefixRouter(imbalance=0)) as client:
        for name, model in models.items():
            client.load_weights(name, [*model.state_dict().items(), *shared.weights().items()], 1)
        move(models["solver"])
        client.load_weights("solver", models["solver"].state_dict().items(), 2)
        client.join("late", late)
        while len(client.serving()) < 2:
            await asyncio.sleep(0.05)
        versions = {"solver": 2, "critic": 1}
        for _ in range(2):
            await check_adapters(client, lambda: build("served"), shared, models, versions)
        assert client.stats()["engines/late/requests"] >= 2
        await client.leave(vllm_servers[0].url)
        await check_adapters(client, lambda: build("served"), shared, models, versions)
        served = ServedWeights.by(late)
        async with VLLMServerReader(vllm_servers[1].endpoint(), ByteTokenizer(), served) as reader:
            await check_adapters(reader, lambda: build("served"), shared, models, versions)
