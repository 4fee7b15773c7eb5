"""Tiny random models of several families, and the log-probabilities that a plain forward pass gives."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from turnwise.types import ModelResponse

VOCABULARY = 300
CONTEXT = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES),
    # not among SHARED_PREFIX_MODELS, so these go through the library's own cache, with and without a sliding window
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=6),
}
WIDE = SIZES | {"hidden_size": 128, "initializer_range": 0.1}
# What vLLM serves on a CPU too: heads of 32, the narrowest that it has there.
SERVED: dict[str, Callable[[], Any]] = {
    "served": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "served-untied": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "served-qwen2": lambda: Qwen2Config(**WIDE),
    "served-llama": lambda: LlamaConfig(**WIDE, tie_word_embeddings=True),
}


def build(family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config((CONFIGS | SERVED)[family]()).float().eval()


def teacher_forced(model: PreTrainedModel, response: ModelResponse, temperature: float) -> torch.Tensor:
    """Log-probabilities ``[C]`` of the completion's tokens from one forward pass over prompt and completion."""
    ids = torch.tensor([response.prompt_token_ids + response.completion_token_ids])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].double() / (temperature or 1.0)
    start = len(response.prompt_token_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


@pytest.fixture(params=list(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model "served" and a tokenizer: what a server starts from."""
    from turnwise.tasks.tiny import build_tokenizer

    folder = tmp_path_factory.mktemp("served")
    build("served").save_pretrained(folder)
    build_tokenizer(["2 + 2 = 4"], vocab_size=VOCABULARY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_servers(served_folder: Path) -> Iterator[list[Any]]:
    """Two vLLM servers for all tests of the session, the second with a key: one takes half a minute to start.

    Skips where vLLM is missing.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: make test-vllm")
    from turnwise.serve import Server, ServeSettings

    os.environ["TURNWISE_TEST_KEY"] = "sesame"
    shared = {"port": 0, "adapter_slots": 2, "adapter_rank": 8, "kv_cache_gb": 2**-5}
    servers = [
        Server(ServeSettings(str(served_folder), api_key_env=key, **shared), log=print)
        for key in (None, "TURNWISE_TEST_KEY")
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.start, servers))
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def helpers(request: pytest.FixtureRequest) -> Any:
    class Helpers:
        vocabulary, context = VOCABULARY, CONTEXT
        build = staticmethod(build)
        teacher_forced = staticmethod(teacher_forced)
        servers = staticmethod(lambda: request.getfixturevalue("vllm_servers"))

    return Helpers
