from __future__ import annotations

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.inference.weights.lora import SharedBase
from turnwise.train.config.optimization import UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model.export import export_model, export_policies
from turnwise.train.model.loading import peft_config
from turnwise.train.model.policy import Policy

IDS = torch.tensor([[5, 3, 9, 250, 7, 1]])


@pytest.fixture
def team(small_model):
    """Two adapters with an effect, their plain base and a model of its own; and the tokenizer."""
    model, tokenizer = small_model()
    shared = SharedBase(model, path="where/it/came/from")
    models = {name: shared.add_adapter(name, peft_config(LoraConfig(rank=2)), seed=1) for name in ("a", "b")}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*models["a"].parameters(), *models["b"].parameters()]:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    models |= {"plain": shared.plain(), "full": small_model(seed=1)[0]}
    policies = {
        name: Policy(name, model, UpdateConfig(), total_steps=1, trainable=name != "plain")
        for name, model in models.items()
    }
    return policies, tokenizer


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def same(model, policy):
    return torch.testing.assert_close(logits(model), logits(policy.model), rtol=1e-5, atol=1e-5)


def test_an_adapter_loads_with_peft_and_merged_with_transformers(team, tmp_path):
    policies, tokenizer = team
    export_policies(policies, tokenizer, tmp_path, own_bases=True)
    (base,) = (tmp_path / "bases").iterdir()
    for name in ("a", "b"):
        folder = tmp_path / "policies" / name
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
        same(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder), policies[name])
        same(peft.AutoPeftModelForCausalLM.from_pretrained(folder), policies[name])
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
        same(merged, policies[name])
        assert type(merged) is type(policies["full"].model)
        assert AutoTokenizer.from_pretrained(folder / "merged").chat_template == tokenizer.chat_template
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert not torch.allclose(logits(policies["a"].model), logits(policies["b"].model), atol=1e-2)


def test_merging_leaves_the_live_policy_alone_and_is_written_over(team, tmp_path):
    policies, tokenizer = team
    before = logits(policies["a"].model)
    weights = {name: tensor.clone() for name, tensor in policies["a"].all_weights()}
    export_model(policies["a"].model, tokenizer, tmp_path / "both")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in policies["a"].all_weights())
    assert torch.equal(logits(policies["a"].model), before)
    with torch.no_grad():
        next(policies["a"].model.parameters()).mul_(2)
    export_model(policies["a"].model, tokenizer, tmp_path / "both")
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "both" / "merged"), policies["a"])
