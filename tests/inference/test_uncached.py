"""Models whose cache the embedded client can't use: the trial finds them, and whole passes sample the same."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from turnwise.inference import TransformersClient
from turnwise.inference.common.hf_model import context_length, shortest_context
from turnwise.inference.local.decode import cache_unsupported_reason
from turnwise.types import ModelRequest, Sampling

from .helpers import CONTEXT, SIZES, build, teacher_forced

OTHERS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "qwen3_next": {
        "num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8,
        "shared_expert_intermediate_size": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "bloom": {"n_layer": 2, "n_head": 4},
}  # fmt: skip
UNCACHED = {"mamba": "has no attribute 'past_key_values'", "qwen3_next": "batch_select_indices"}


def other(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | OTHERS[kind])).float().eval()


def client_of(model: Any, *, share: bool = False) -> TransformersClient:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return TransformersClient(model, SimpleNamespace(eos_token_id=None, decode=lambda ids, **_: ""), share=share)


@pytest.mark.parametrize("kind", OTHERS)
def test_the_trial_finds_what_has_no_cache(kind: str) -> None:
    model = other(kind)
    state = torch.get_rng_state()
    with torch.no_grad():
        told = cache_unsupported_reason(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert UNCACHED[kind] in told if kind in UNCACHED else not told


def test_a_cache_that_changes_results_is_found_out() -> None:
    model = build("mistral-window")
    with torch.no_grad():
        assert cache_unsupported_reason(model) == ""
        layer = model.model.layers[1]
        layer.register_forward_hook(lambda _, __, out: out + 1 if out.shape[1] == 1 else out)
        assert "passes with a cache come out otherwise" in cache_unsupported_reason(model)


@pytest.mark.parametrize("kind", OTHERS)
async def test_samples_have_the_log_probs_of_the_model(kind: str) -> None:
    model = other(kind)
    requests = [
        ModelRequest([1 + row % 3, 5, 9, *range(row % 3)], Sampling(max_tokens=4 + row, seed=row)) for row in range(6)
    ]
    client = client_of(model, share=True)
    responses = await client.generate(requests)
    assert [len(response.completion_token_ids) for response in responses] == [4, 5, 6, 7, 8, 9]
    for response in responses:
        assert response.logprobs == pytest.approx(teacher_forced(model, response).tolist(), abs=2e-5)
    again = await client.score(requests, [response.completion_token_ids for response in responses])
    for scores, response in zip(again, responses, strict=True):
        assert scores == pytest.approx(response.logprobs, abs=2e-5)
    await client.close()


def test_a_client_says_that_it_has_no_cache() -> None:
    with pytest.warns(RuntimeWarning, match="MambaForCausalLM: each token passes the whole sequence through"):
        TransformersClient(other("mamba"), SimpleNamespace(eos_token_id=None))


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        ("llama", {}, CONTEXT),
        ("gpt2", {}, CONTEXT),
        ("mpt", {"max_seq_len": 48}, 48),
        ("gemma3", {"text_config": {"max_position_embeddings": 128}}, 128),
        ("mamba", {}, None),
        ("bloom", {}, None),
    ],
)
def test_the_context_of_a_config(kind: str, sizes: dict[str, Any], expected: int | None) -> None:
    named = {} if kind in ("mpt", "mamba", "bloom") else {"max_position_embeddings": CONTEXT}
    config = AutoConfig.for_model(kind, **(sizes if kind == "gemma3" else named | sizes))
    assert context_length(config) == expected
    both = [config, AutoConfig.for_model("llama", max_position_embeddings=96)]
    assert shortest_context(both) == min(expected or 96, 96) and shortest_context([]) is None
