"""Experts of a mixture that travel over HTTP, as vLLM sends them, and engines that can't send them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from turnwise.inference import TransformersClient, VLLMServerClient
from turnwise.inference.common.experts import experts_to_text
from turnwise.inference.common.http import EndpointError
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server import settings as server_settings
from turnwise.inference.server.answers import read_experts
from turnwise.inference.server.reader import ServedWeights, VLLMServerReader
from turnwise.inference.server.settings import ServeSettings, server_command
from turnwise.run import clients
from turnwise.run.clients import check_client
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict
from turnwise.types import ModelError, ModelRequest, Sampling

from .engine_server import engine_here
from .mixtures import build

REQUESTS = [ModelRequest([1, 2, 3, length], Sampling(max_tokens=length, seed=length)) for length in (1, 4, 9)]


async def test_they_are_those_of_the_engine() -> None:
    model = build("qwen3_moe")
    async with TransformersClient(model, ByteTokenizer(), routed_experts=True) as client:
        expected = await client.generate(REQUESTS)
    with engine_here(model, routed_experts=True) as (endpoint, _):
        async with VLLMServerClient(endpoint, ByteTokenizer(), model, routed_experts=True) as client:
            got = await client.generate(REQUESTS)
            [[score, _]] = await client.score(REQUESTS[:1], [[5, 6]])
            async with VLLMServerReader(endpoint, ByteTokenizer(), ServedWeights.by(client), routed_experts=True) as r:
                got += await r.generate(REQUESTS)
    assert score < 0
    for one, other in zip(expected * 2, got, strict=True):
        assert one.completion_token_ids == other.completion_token_ids
        assert one.routed_experts is not None and other.routed_experts is not None
        assert (one.routed_experts.ids == other.routed_experts.ids).all()


async def test_a_server_that_returns_none_is_an_error() -> None:
    model = build("qwen3_moe")
    with engine_here(model) as (endpoint, _):
        async with VLLMServerClient(endpoint, ByteTokenizer(), model, routed_experts=True) as client:
            with pytest.raises(
                ModelError, match="without routed_experts: start the server with --engine-arg enable_ret"
            ):
                await client.generate(REQUESTS)


def test_answers_that_are_malformed() -> None:
    def answer(text: object) -> dict[str, object]:
        return {"choices": [{"routed_experts": text}]}

    ids = np.zeros((5, 2, 2), dtype=np.uint16)
    assert (read_experts(answer(experts_to_text(ids)), "here", 5).ids == ids).all()
    for text, said in (
        (experts_to_text(ids), "those of 4: all but the last"),
        ("%", "an array of experts as vLLM writes it"),
        (7, "an array of experts as vLLM writes it"),
        (experts_to_text(ids.astype(np.float64)), r"no array \[tokens, layers, experts\]"),
    ):
        with pytest.raises(EndpointError, match=rf"here answered choices\[0\].routed_experts=.*{said}"):
            read_experts(answer(text), "here", 4)


def test_vllm_on_a_cpu_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    said = re.escape(server_settings.NO_EXPERTS_ON_CPU)
    for module in (server_settings, clients):
        monkeypatch.setattr(module, "computes_on_cpu", lambda: True)
    monkeypatch.setattr(clients, "vllm_or_raise", lambda: None)
    with pytest.raises(ValueError, match=rf"engine_args\['enable_return_routed_experts'\]: expected False, as {said}"):
        ServeSettings("m", engine_args={"enable-return-routed-experts": True})
    ServeSettings("m", engine_args={"enable_return_routed_experts": False})
    ServeSettings("m", engine="transformers", engine_args={"enable_return_routed_experts": True})
    asked = {"run_dir": str(tmp_path), "rollout": {"client": "vllm", "routing_replay": True}}
    with pytest.raises(ConfigError, match=f"'rollout.routing_replay' = true: expected false, as {said}"):
        check_client(config_from_dict(asked))
    monkeypatch.setattr(clients, "computes_on_cpu", lambda: False)
    check_client(config_from_dict(asked))


def test_vllm_on_a_gpu_is_asked_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    build("deepseek_v3").config.save_pretrained(tmp_path)
    monkeypatch.setattr(server_settings, "computes_on_cpu", lambda: False)
    words = server_command(ServeSettings(str(tmp_path), engine_args={"enable_return_routed_experts": True}), 1)
    assert "--enable-return-routed-experts" in words and not any("compilation" in word for word in words)
    # On a CPU, PyTorch rotates the queries of latent attention, and those of other models stay with vLLM's kernel.
    monkeypatch.setattr(server_settings, "computes_on_cpu", lambda: True)
    for dtype, reference in (("float32", True), ("bfloat16", False)):
        words = server_command(ServeSettings(str(tmp_path), engine_args={"dtype": dtype}), 1)
        assert '--compilation-config={"custom_ops": ["-rotary_embedding"]}' in words
        assert ("--attention-backend=CPU_MLA" in words) == reference
    build("qwen3_moe").config.save_pretrained(tmp_path)
    assert not any("compilation" in word for word in server_command(ServeSettings(str(tmp_path)), 1))
