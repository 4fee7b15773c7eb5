"""Sizes of models and their adapters, from configurations alone."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import nn

from turnwise.run.models import ModelSize, model_of, size_of
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict


def test_bytes_of_a_rank_and_of_an_engine():
    """A model of 7 billion weights in bfloat16: 16 bytes each for float32 states, 2 for a copy."""
    model = ModelSize(7e9, 57_344, 28, 4)
    assert model.rank_bytes(4) == 16 * 7e9 / 4 and model.rank_bytes(4, reference=True) == 18 * 7e9 / 4
    assert model.rank_bytes(1) == 18 * 7e9, "one process has a bfloat16 copy"
    adapter = replace(model, adapter_parameters=2e8)
    assert adapter.rank_bytes(2, reference=True) == (14e9 + 16 * 2e8) / 2, "the base is the reference"
    assert adapter.engine_bytes(2) == 14.4e9 / 2 and adapter.sent_bytes == 4e8 and model.sent_bytes == 14e9
    with pytest.raises(ValueError, match="parameters=0: expected a number > 0"):
        ModelSize(0, 1, 1, 1)


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer(["a few words"])
    return tokenizer, build_model(tokenizer)


def test_sizes_of_a_model_and_its_adapter(tiny):
    import peft

    _, model = tiny
    config = config_from_dict({"policies": {"default": {"lora": {"rank": 4}}}})
    size = size_of(model, config.policies)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    text = model.config
    cached = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * size.weight_bytes
    assert (size.kv_bytes, size.train_bytes) == (cached, 4)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(build_model(tiny[0]), lora)
    assert size.adapter_parameters == sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert size.sent_bytes == size.adapter_parameters * size.weight_bytes


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"a": {}, "b": {}}, r"2 bases \(a; b\): expected one"),
        ({"default": {"path": "./nowhere"}}, r"'policies.default.path' = './nowhere': expected a folder"),
    ],
)
def test_models_without_a_size_are_rejected(tiny, policies, message):
    with pytest.raises(ConfigError, match=message):
        model_of(config_from_dict({"policies": policies}), lambda: tiny)
    experts = nn.Linear(2, 2)
    experts.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_experts=8))
    with pytest.raises(ConfigError, match="num_experts = 8: expected a dense model"):
        size_of(experts, {})
    experts.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="mamba"))
    with pytest.raises(ConfigError, match="a mamba has no attention: expected a transformer"):
        size_of(experts, {})


def test_the_size_reads_no_weights(tiny, tmp_path):
    """A folder with config.json alone is enough, and the engine's weights have the dtype of the files."""
    model = tiny[1]
    config = model.config.to_dict() | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = config_from_dict({"policies": {"default": {"path": str(tmp_path), "dtype": "float32"}}})
    size = model_of(settings, lambda: None)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (size.weight_bytes, size.train_bytes) == (2, 4)
