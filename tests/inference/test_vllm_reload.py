"""New weights in a live vLLM model: the short way gives what vLLM's own gives, and is not taken where it can't."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from turnwise.inference import VLLMClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.vllm.reload import _ROUTE, reload
from turnwise.inference.weights.lora import SharedBase
from turnwise.types import ModelRequest, Sampling

from .helpers import EXACT, build, teacher_forced

pytestmark = pytest.mark.vllm
FAMILIES = ["served", "served-untied", "served-qwen2", "served-llama"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def client(family: str) -> Iterator[VLLMClient]:
    """One client for the tests of a family: an engine takes seconds to start."""
    client = VLLMClient(build(family), ByteTokenizer(), kv_cache_bytes=2**25)
    yield client
    asyncio.run(client.close())


def other(family: str, seed: int) -> Any:
    """A model whose every weight differs from its initial one: biases and norms, which start out constant, as well."""
    model = build(family, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def served_model(client: VLLMClient) -> Any:
    [engine] = client._thread.engines
    [model] = engine.llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    return model


async def error_of(client: VLLMClient, model: Any) -> float:
    requests = [ModelRequest([5, 6, 7, 8] * 8, Sampling(max_tokens=8, seed=seed)) for seed in range(3)]
    answers = await client.generate(requests)
    return max(float((teacher_forced(model, a) - torch.tensor(a.logprobs)).abs().max()) for a in answers)


async def test_the_short_way_is_exact(client: VLLMClient, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layerwise: list[Any] = []
    monkeypatch.setattr("turnwise.inference.vllm.reload._reload_layerwise", lambda *call: layerwise.append(call))
    for seed in (1, 2):
        model = other(family, seed)
        client.load_weights("default", weights_of(model).items(), seed)
        assert await error_of(client, model) < EXACT
    assert not layerwise


@pytest.mark.parametrize("family", ["served"], indirect=True)
async def test_it_keeps_no_weights_alive(client: VLLMClient, family: str) -> None:
    [engine] = client._thread.engines
    for seed in (1, 2):
        weights = weights_of(other(family, seed))
        reload(engine.llm, weights)
        watched = {name: weakref.ref(tensor) for name, tensor in weights.items()}
        del weights
        assert not [name for name, tensor in watched.items() if tensor() is not None], f"after update {seed}"


@pytest.mark.parametrize("family", ["served"], indirect=True)
async def test_a_tied_head_may_be_named_or_not(client: VLLMClient, family: str) -> None:
    for seed, named in enumerate((True, False, False, True), 1):
        model = other(family, seed)
        weights = weights_of(model)
        assert weights.keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
        if not named:
            del weights["lm_head.weight"]
        reload(client._thread.engines[0].llm, weights)
        client._thread.engines[0]._clear_cache()
        assert await error_of(client, model) < EXACT


@pytest.mark.parametrize("family", ["served-untied"], indirect=True)
async def test_a_failure_on_the_way_is_made_good_by_the_next_update(client: VLLMClient, family: str) -> None:
    [engine] = client._thread.engines
    for _ in range(2):  # the short way, and vLLM's after a failure
        broken = weights_of(other(family, 9)) | {"model.layers.1.mlp.down_proj.weight": torch.zeros(3, 3)}
        with pytest.raises(Exception):  # noqa: B017 - what vLLM's loaders raise
            reload(engine.llm, broken)
        assert _ROUTE not in vars(served_model(client))
    model = other(family, 3)
    client.load_weights("default", weights_of(model).items(), 3)
    assert await error_of(client, model) < EXACT


@pytest.mark.parametrize("family", ["served"], indirect=True)
async def test_a_model_that_changes_weights_before_it_loads_them_takes_the_long_way(
    client: VLLMClient, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = served_model(client)
    plain = served.load_weights
    del vars(served)[_ROUTE]  # found when the client put in its model's weights
    monkeypatch.setattr(served, "load_weights", lambda weights: plain((name, w.clone()) for name, w in weights))
    for seed in (1, 2):
        model = other(family, seed)
        client.load_weights("default", weights_of(model).items(), seed)
        assert vars(served)[_ROUTE] is None
        assert await error_of(client, model) < EXACT
    monkeypatch.setattr(
        served, "load_weights", lambda weights: plain(pair for pair in weights if pair[0] != "model.norm.weight")
    )
    client.load_weights("default", weights_of(model).items(), 3)
    assert vars(served)[_ROUTE] is None, "a weight that no loader took"


async def test_with_adapters_the_base_takes_the_short_way() -> None:
    import peft

    shared = SharedBase(build("served"))
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    policies = {"base": shared.plain(), "adapted": shared.add_adapter("adapted", config, 0)}
    client = VLLMClient(policies, ByteTokenizer(), kv_cache_bytes=2**25)
    try:
        [engine] = client._thread.engines
        for seed in (1, 2):
            reload(engine.llm, weights_of(other("served", seed)))
            assert vars(served_model(client))[_ROUTE] is not None
    finally:
        await client.close()
