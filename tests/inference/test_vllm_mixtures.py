"""Mixtures of experts in vLLM's own servers: their log-probs are those of the model, also after an update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from turnwise.inference import VLLMClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.vllm.reload import split_by_expert
from turnwise.types import ModelRequest, Sampling

from .mixtures import build

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "moe_intermediate_size": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
        "v_head_dim": 128, "head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True,
    },
}  # fmt: skip
"""Sizes that vLLM's CPU kernels take. The last settings of DeepSeek-V3 are in its own config, not in the library's."""


@pytest.mark.vllm
@pytest.mark.xdist_group("vllm_servers")
@pytest.mark.parametrize("kind", list(SIZES))
async def test_log_probs_are_those_of_the_model(kind: str, lent_servers: None) -> None:
    model, rng = build(kind, initializer_range=0.08, **SIZES[kind]), np.random.default_rng(0)
    requests = [
        ModelRequest(rng.integers(1, 250, length).tolist(), Sampling(max_tokens=12, seed=length))
        for length in (1, 6, 6, 19)
    ]
    async with VLLMClient(model, ByteTokenizer(), kv_cache_gb=2**-4, max_num_seqs=8) as client:
        for version in (0, 1, 2):
            if version:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.05)
                client.load_weights("default", model.state_dict().items(), version)
            for response in await client.generate(requests):
                prompt, completion = response.prompt_token_ids, response.completion_token_ids
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
                expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=1e-4, atol=1e-4)
                assert response.policy_versions == [(len(completion), version)]


def test_experts_are_named_as_in_a_checkpoint(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    for kind in ("qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "qwen3"):
        model = build(kind)
        model.save_pretrained(tmp_path / kind)
        saved, split = load_file(tmp_path / kind / "model.safetensors"), split_by_expert(model.state_dict(), kind)
        assert saved.keys() == split.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in split.items())
