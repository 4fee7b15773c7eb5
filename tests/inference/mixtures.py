"""Tiny mixtures of experts with random weights, large enough that the choice of experts matters."""

from __future__ import annotations

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 299, "initializer_range": 0.3,
}  # fmt: skip
FEW: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
LATENT: dict[str, Any] = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**FEW, "norm_topk_prob": True},
    "qwen2_moe": {**FEW, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": LATENT,
    "glm4_moe": {**LATENT, "head_dim": 16, "partial_rotary_factor": 0.5},
    "phimoe": {"num_local_experts": 4, "head_dim": 16},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 16},
}


def build(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Make a model of ``kind`` with random weights, also where the library starts with zeros: the bias of a router."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **options}))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "gate.weight" in name or "router.weight" in name or "e_score_correction_bias" in name:
                tensor.normal_(std=0.3)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the faster one doesn't take float64
    return model.to(dtype).eval()
