"""New weights in each of the vLLM clients: exact after every update, also while requests run, for adapters as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from turnwise.inference import VLLMClient, VLLMProcessClient, VLLMServerClient
from turnwise.inference.common.http import Endpoint
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
    versions_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm_servers")]

KINDS = ["vllm", "vllm-process", "vllm-server"]

Start = Callable[..., Any]


@pytest.fixture(params=KINDS)
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    """``start(policies)``: a client that ends with the test."""
    clients: list[Any] = []

    def make(policies: Any, in_flight: bool = False) -> Any:
        if request.param == "vllm-server":
            endpoint = Endpoint(request.getfixturevalue("vllm_servers")[0].url, retries=3, timeout=300.0)
            clients.append(VLLMServerClient(endpoint, ByteTokenizer(), policies, in_flight=in_flight))
        else:
            kind = {"vllm": VLLMClient, "vllm-process": VLLMProcessClient}[request.param]
            clients.append(kind(policies, ByteTokenizer(), in_flight=in_flight, kv_cache_bytes=2**25))
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
