"""Common parts of the clients' tests: tiny random models, requests, weights as a trainer sends them, and checks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from turnwise.inference.weights.lora import SharedBase
from turnwise.inference.weights.sync import open_weights
from turnwise.types import ModelRequest, ModelResponse, Sampling

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
    # These are not in SHARED_PREFIX_MODELS, so they use the library's own cache, with and without a sliding window.
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=6),
}
WIDE = SIZES | {"hidden_size": 128, "initializer_range": 0.1}
# A model that vLLM also serves on a CPU: heads of 32, the narrowest that it supports there.
SERVED: dict[str, Callable[[], Any]] = {
    "served": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "served-untied": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "served-qwen2": lambda: Qwen2Config(**WIDE),
    "served-llama": lambda: LlamaConfig(**WIDE, tie_word_embeddings=True),
}


def build(family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config((CONFIGS | SERVED)[family]()).float().eval()


# -- waiting -----------------------------------------------------------------------------------------------------------
async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


def gone(pid: int) -> bool:
    """Whether ``pid`` has ended: it may stay a zombie for long under an idle init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until_gone(pids: Iterable[int], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


# -- requests and checks -----------------------------------------------------------------------------------------------
EXACT = 1e-5
"""Tolerance of float32 log-probabilities between two programs that add in different orders."""

PROMPT = [5, 6, 7, 8] * 10


def requests_of(count: int = 4, tokens: int = 8, policy: str = "default", **sampling: Any) -> list[ModelRequest]:
    """Make requests with prompts of 40, 37, 34, ... tokens and seeds 0, 1, 2, ..."""
    return [
        ModelRequest(PROMPT[: 40 - 3 * i], Sampling(max_tokens=tokens, seed=i, **sampling), policy=policy)
        for i in range(count)
    ]


def teacher_forced(model: Any, response: ModelResponse, temperature: float = 1.0) -> torch.Tensor:
    """Compute log-probabilities ``[C]`` of the completion's tokens in one forward pass over prompt and completion."""
    ids = torch.tensor([response.prompt_token_ids + response.completion_token_ids])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].double() / (temperature or 1.0)
    start = len(response.prompt_token_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


def error_of(model: Any, responses: Iterable[ModelResponse], temperature: float = 1.0) -> float:
    """Return the largest difference between a sampler's log-probabilities and a plain forward pass of ``model``."""
    return max(float((teacher_forced(model, r, temperature) - torch.tensor(r.logprobs)).abs().max()) for r in responses)


def versions_of(responses: Iterable[ModelResponse]) -> set[int]:
    return {version for response in responses for _, version in response.policy_versions}


def tokens_of(responses: Iterable[ModelResponse]) -> list[list[int]]:
    return [response.completion_token_ids for response in responses]


def sent(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the weights as the trainer sends them: tied ones once."""
    once = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())}
    return list(once.values())


def weights_at(handle: Any) -> dict[str, torch.Tensor]:
    """Copy the weights that ``handle`` refers to."""
    with open_weights(handle) as weights:
        return {name: tensor.clone() for name, tensor in weights.items()}


def move(model: Any, scale: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)


def adapted(base: Any) -> tuple[SharedBase, dict[str, Any]]:
    """Add two adapters to ``base``, named solver and critic, that change its outputs."""
    import peft

    shared = SharedBase(base)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    models = {
        name: shared.add_adapter(name, peft.LoraConfig(**config), i) for i, name in enumerate(("solver", "critic"))
    }
    for model in models.values():
        move(model)
    return shared, models


async def check_updates(client: Any, model: Any, updates: int) -> None:
    """Train ``model`` for ``updates`` steps, send it after each, and check the samples of ``client`` against it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for version in range(updates + 1):
        if version:
            model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            client.load_weights("default", sent(model), version)
        temperature = (1.0, 0.7)[version % 2]
        responses = await client.generate(requests_of(temperature=temperature))
        assert error_of(model, responses, temperature) < EXACT, f"after update {version}"
        assert all(r.policy_versions == [(len(r.completion_token_ids), version)] for r in responses)


async def check_adapters(
    client: Any, build: Callable[[], Any], shared: SharedBase, policies: dict[str, Any], versions: dict[str, int]
) -> None:
    """Sample one batch over all ``policies``, and check that each token comes from its own adapter and version."""
    responses = await client.generate([request for name in policies for request in requests_of(2, policy=name)])
    for number, (name, model) in enumerate(policies.items()):
        mine = responses[2 * number : 2 * number + 2]
        merged = build()
        merged.load_state_dict(shared.merged_weights(model) if model.key else shared.weights())
        assert error_of(merged, mine) < EXACT, f"{name} at {versions}"
        assert versions_of(mine) == {versions[name]}


def check_switch(models: list[Any], responses: Iterable[ModelResponse]) -> int:
    """Check that each token has the log-probability of its own weights. Returns how many responses have several."""
    split = [response for response in responses if len(response.policy_versions) > 1]
    for response in split:
        by_model = [teacher_forced(model, response).tolist() for model in models]
        expected, start = [], 0
        for count, version in response.policy_versions:
            expected += by_model[version % len(models)][start : start + count]
            start += count
        assert start == len(response.completion_token_ids)
        assert response.logprobs == pytest.approx(expected, abs=EXACT)
    return len(split)


def refused_weights(model: Any) -> dict[str, tuple[Any, type[Exception], str]]:
    """Weights that every client refuses: the weights, the error and its message."""
    weights, one = dict(sent(model)), "model.layers.0.self_attn.q_proj.weight"
    return {
        "part of a fused weight": ({one: weights[one]}.items(), ValueError, r"self_attn.k_proj.weight'.*missing"),
        "unknown": ([*weights.items(), ("nothing", weights[one])], ValueError, "'nothing' is unknown"),
        "shape": ((weights | {one: torch.zeros(3, 3)}).items(), ValueError, r"q_proj.*shape \(3, 3\)"),
        "no tensor": ([(one, [1.0])], TypeError, "expected a tensor"),
    }  # fmt: skip
