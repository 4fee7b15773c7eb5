"""vLLM's own servers: exact after every update, also while requests run and after a kill, for adapters as well."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from turnwise.inference import VLLMClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import ModelRequest, ModelResponse, Sampling

from .helpers import (
    EXACT,
    adapted,
    build,
    check_adapters,
    check_switch,
    check_updates,
    error_of,
    move,
    refused_weights,
    requests_of,
    sent,
    tokens_of,
    versions_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm_servers")]

Start = Callable[..., VLLMClient]


@pytest.fixture
async def start(lent_servers: None) -> AsyncIterator[Start]:
    """``start(policies)``: a client that ends with the test."""
    clients: list[VLLMClient] = []

    def make(policies: Any, **settings: Any) -> VLLMClient:
        clients.append(VLLMClient(policies, ByteTokenizer(), **{"kv_cache_gb": 2**-5, **settings}))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


class Traffic:
    """Streams of requests without a pause, of one to sixty tokens: whenever weights change, some are under way."""

    def __init__(self, client: Any, streams: int = 16) -> None:
        self.responses: list[list[ModelResponse]] = [[] for _ in range(streams)]
        self._client = client

    async def __aenter__(self) -> Traffic:
        self._running = [asyncio.ensure_future(self._stream(nth)) for nth in range(len(self.responses))]
        await self.go_on()
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._running:
            stream.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _stream(self, nth: int) -> None:
        while True:
            seed = len(self.responses) * len(self.responses[nth]) + nth
            request = ModelRequest([seed % 7, 3, 9], Sampling(max_tokens=1 + 7 * seed % 60, seed=seed))
            self.responses[nth] += await self._client.generate([request])

    async def go_on(self) -> None:
        """Until each stream has had the answer to what it asked before."""
        counts = [len(responses) for responses in self.responses]
        while not all(len(now) > before for now, before in zip(self.responses, counts, strict=True)):
            for stream in self._running:
                if stream.done():
                    stream.result()
            await asyncio.sleep(0.005)

    def all(self) -> list[ModelResponse]:
        return [response for responses in self.responses for response in responses]


async def test_in_flight_each_token_is_of_its_own_weights(start: Start) -> None:
    """The same client then takes weights at rest: exact after each update, and nothing moves for wrong ones."""
    models = [build("served"), build("served", seed=1)]
    client = start(models[0], in_flight=True)
    async with Traffic(client) as traffic:
        for version in range(1, 41):
            await asyncio.to_thread(client.load_weights, "default", sent(models[version % 2]), version)
            await traffic.go_on()
            split = [response for response in traffic.all() if len(response.policy_versions) > 1]
            if len(split) >= 5:
                break
    assert check_switch(models, split[:20]) >= 5, f"too few were under way when the weights changed {version} times"

    model = build("served", seed=2)
    client.load_weights("default", sent(model), 0)
    await check_updates(client, model, 6)
    [once] = await client.generate(requests_of(1))
    [again] = await client.generate(requests_of(1))
    assert again.completion_token_ids == once.completion_token_ids
    assert client.stats()["cached_tokens"] >= 32, "siblings share the keys and values of their prompt"
    for name, (weights, error, message) in refused_weights(build("served", seed=3)).items():
        with pytest.raises(error, match=message):
            client.load_weights("default", weights, 9)
            pytest.fail(name)
    assert client.version("default") == 6
    assert error_of(model, await client.generate(requests_of())) < EXACT


@pytest.mark.slow
async def test_without_in_flight_an_update_waits_for_what_runs(start: Start) -> None:
    models = [build("served"), build("served", seed=1)]
    client = start(models[0])
    async with Traffic(client) as traffic:
        for version in range(1, 5):
            await asyncio.to_thread(client.load_weights, "default", sent(models[version % 2]), version)
            await traffic.go_on()
        await traffic.go_on()  # the answers before may all be to what was asked before the last update
        responses = traffic.all()
    assert {len(response.policy_versions) for response in responses} == {1}
    assert versions_of(responses) == set(range(5))
    for nth, model in enumerate(models):
        of_it = [response for response in responses if response.policy_versions[0][1] % 2 == nth]
        assert error_of(model, of_it[:20]) < EXACT


async def test_adapters_stay_exact(start: Start) -> None:
    """Two adapters and their base in one batch, while one adapter and then the base change, by itself and with it."""
    torch.manual_seed(0)
    shared, adapters = adapted(build("served"))
    policies = adapters | {"base": shared.plain()}
    client = start(policies)
    for version in range(6):
        versions = {"solver": version, "critic": 0, "base": version if version == 5 else 0}
        if version:
            move(adapters["solver"], 0.05)
            client.load_weights("solver", adapters["solver"].state_dict().items(), version)
        if version == 5:
            with torch.no_grad():
                shared.model.model.norm.weight.add_(0.1)
            client.load_weights("base", shared.weights().items(), version)
            for name in adapters:  # a base that changes drops them
                client.load_weights(name, adapters[name].state_dict().items(), versions[name])
        await check_adapters(client, lambda: build("served"), shared, policies, versions)
    # An adapter brings its base.
    second, others = adapted(build("served", seed=1))
    client.load_weights("solver", [*others["solver"].state_dict().items(), *second.weights().items()], 6)
    assert error_of(others["solver"].activate(), await client.generate(requests_of(policy="solver"))) < EXACT
    with pytest.raises(ValueError, match="missing"):
        client.load_weights("solver", list(others["solver"].state_dict().items())[:2], 7)


async def test_a_server_killed_in_the_midst_of_a_batch(start: Start) -> None:
    """Each request is answered once, wholly, by the weights that were last sent, on the server that came after."""
    model = build("served", seed=2)
    many = [ModelRequest([n % 7, 3, 9], Sampling(max_tokens=1 + 7 * n % 60, seed=n)) for n in range(200)]
    client = start(build("served"))
    [server] = client.servers
    restarts, pid = server.restarts, server.pid
    client.load_weights("default", sent(model), 4)
    expected = await client.generate(many[:10])
    running = [asyncio.ensure_future(client.generate([request])) for request in many]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    with pytest.warns(UserWarning, match="its requests are sent again"):
        os.kill(pid, signal.SIGKILL)  # type: ignore[arg-type]
        responses = [response for [response] in await asyncio.gather(*running)]
    stats = client.stats()
    assert server.restarts == restarts + 1
    assert stats["restarts"] == 1
    assert stats["requests"] == 210
    assert tokens_of(responses[:10]) == tokens_of(expected)
    assert versions_of(responses) == {4}
    assert error_of(model, responses[:40]) < EXACT
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_cancelled_request_leaves_the_engine(start: Start) -> None:
    client = start(build("served"))
    await client.generate(requests_of(1))
    waiting = asyncio.ensure_future(client.generate(requests_of(8, tokens=24)))
    while client.peaks()["running"] < 2:
        await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.generate(requests_of(1))
    client.peaks()
    await client.generate(requests_of(1))
    assert client.peaks()["running"] == 1


@pytest.mark.slow
async def test_more_than_the_cache_holds_or_a_step_takes_in(start: Start) -> None:
    """Seven blocks of 32 tokens, and steps of 64: some prompts wait, and some requests lose their second block."""
    model = build("served")
    client = start(model, kv_cache_gb=2**-12, max_num_seqs=16, engine_args={"max_num_batched_tokens": 64})
    requests = [ModelRequest([i + 1] * 20, Sampling(max_tokens=30, seed=i)) for i in range(12)]
    client.peaks()
    assert error_of(model, await client.generate(requests)) < EXACT
    peaks = client.peaks()
    assert peaks["kv_cache_use"] == 1.0 and 1 <= peaks["running"] <= 7 and 5 <= peaks["waiting"] <= 12, peaks
    assert client.stats()["preemptions"] > 0
    assert client.peaks()["running"] == 0
    long = [ModelRequest([i + 1] * 40, Sampling(max_tokens=8, seed=i)) for i in range(8)]
    together = await client.generate(long)
    assert error_of(model, together) < EXACT
    assert tokens_of(together) == [tokens_of(await client.generate([request]))[0] for request in long]
