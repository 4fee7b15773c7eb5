"""Updates run as the sampler does: without dropout, layer drop, jitter or batch statistics, unless a policy asks."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from turnwise.inference.common.hf_model import recompute_layers, recomputes
from turnwise.inference.weights.lora import SharedBase
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model.loading import peft_config
from turnwise.train.model.policy import Policy
from turnwise.train.model.support import drops_out
from turnwise.train.update.update import old_logprobs, update_policy

from .test_forward import build

STOCK = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},  # 0.1 everywhere
    "opt": {"ffn_dim": 64, "dropout": 0.2, "attention_dropout": 0.2, "layerdrop": 0.5, "word_embed_proj_dim": 32},
    "llama": {"attention_dropout": 0.3},
    "falcon": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "mixtral": {"router_jitter_noise": 0.3, "num_local_experts": 4},
    "stablelm": {"hidden_dropout": 0.3},
}


class Unsteady(nn.Module):
    """A layer's MLP with batch statistics and dropout of channels, which no config names."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.norm, self.drop = mlp, nn.BatchNorm1d(32), nn.Dropout1d(0.4)

    def forward(self, x):
        return self.drop(self.norm(self.mlp(x).transpose(1, 2)).transpose(1, 2))


def unsteady(kind: str) -> nn.Module:
    if kind in STOCK:
        return build(kind, **STOCK[kind]).train()
    model = build("llama")
    if kind == "modules":
        model.model.layers[0].mlp = Unsteady(model.model.layers[0].mlp)
    if kind == "lora":
        lora = peft_config(LoraConfig(rank=2, dropout=0.5))
        lora.init_lora_weights = False
        return SharedBase(model).add_adapter("solver", lora, 0).train()
    return model.train()


def measured(model: nn.Module, batch, *, dropout: bool = False, layout: str = "auto", seed: int = 0):
    """The metrics of one update on log-probs of the same weights, and the weights after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        update = UpdateConfig(lr=1e-3, micro_batch_tokens=4096)
        policy = Policy("solver", model, update, total_steps=9, dropout=dropout, layout=layout)
    batch = replace(batch, policies=["solver"])
    own = old_logprobs(policy, batch, np.arange(len(batch)), update).numpy()
    batch = replace(batch, target_logprobs=own.astype(np.float32))
    torch.manual_seed(seed)
    metrics = update_policy(policy, batch, update, LossConfig(), np.random.default_rng(0))
    return metrics, torch.cat([tensor.flatten() for _, tensor in policy.weights()])


@pytest.mark.parametrize("layout", ["auto", "padded"])
@pytest.mark.parametrize("kind", [*STOCK, "modules", "lora"])
def test_the_first_ratio_is_1_whatever_the_model_drops(kind, layout, random_batch):
    batch, model = random_batch(0, rows=6), unsteady(kind)
    first, weights = measured(copy.deepcopy(model), batch, layout=layout)
    assert first["sampler_trainer_logprob_max_diff"] < 1e-5 and first["grad_norm"] > 0
    _, again = measured(model, batch, layout=layout, seed=1)
    assert torch.equal(weights, again), "nothing was drawn"


@pytest.mark.parametrize("kind", [*STOCK, "modules", "lora"])
def test_a_policy_that_asks_for_dropout_has_it_and_is_warned(kind, random_batch):
    batch, model = random_batch(0, rows=6), unsteady(kind)
    with pytest.warns(RuntimeWarning, match=r"policy .solver.: updates use dropout .*first update is not 1"):
        Policy("solver", copy.deepcopy(model), UpdateConfig(), total_steps=9, dropout=True)
    assert measured(model, batch, dropout=True)[0]["sampler_trainer_logprob_max_diff"] > 1e-3


def test_what_a_model_drops_is_named():
    assert drops_out(unsteady("gpt2")) == {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    assert drops_out(unsteady("modules")) == {"batch_norm": 1.0, "drop": 0.4}
    assert drops_out(unsteady("mixtral")) == {"router_jitter_noise": 0.3}
    assert drops_out(unsteady("lora")) == {"lora_dropout": 0.5}
    with pytest.warns(RuntimeWarning, match=r"lora.dropout = 0.5 has no effect, as updates run without dropout"):
        Policy("solver", unsteady("lora"), UpdateConfig(), total_steps=1)
    shared = SharedBase(build("llama"))
    shared.add_adapter("a", peft_config(LoraConfig(dropout=0.5)), 0)
    assert drops_out(shared.add_adapter("b", peft_config(LoraConfig()), 0)) == {}


def test_attention_dropout_takes_no_trie(tree_batch):
    with pytest.warns(RuntimeWarning, match="updates use dropout"):
        policy = Policy("solver", unsteady("llama"), UpdateConfig(), total_steps=9, dropout=True)
    assert policy.forward.packed and policy.trie_share == 0.0
    with pytest.raises(ValueError, match="layout='trie': LlamaForCausalLM doesn't support it, as its attention drops"):
        Policy("solver", unsteady("llama"), UpdateConfig(), total_steps=9, dropout=True, layout="trie")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "lora"])
@pytest.mark.parametrize("dropout", [False, True])
def test_recomputed_layers_give_the_same_update_in_either_mode(kind, dropout, random_batch):
    """Each layer runs once more in the backward pass, and draws the same there."""
    batch, model = random_batch(0, rows=6), unsteady(kind)
    how = {"dropout": dropout, "layout": "padded"}  # in a stream fewer tokens of the last MLP draw
    plain = measured(copy.deepcopy(model), batch, **how)[1]
    lm = model.shared.model if kind == "lora" else model
    lm.gradient_checkpointing_enable()  # the library's own, which only works in training mode
    runs = []
    layer = (lm.transformer.h if kind == "gpt2" else lm.model.layers)[0]
    counted = layer.mlp if kind != "mixtral" else layer.self_attn
    counted.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    got = measured(model, batch, **how)[1]
    assert recomputes(lm) and not lm.is_gradient_checkpointing
    torch.testing.assert_close(got, plain, rtol=1e-6, atol=1e-6)
    assert sum(runs) == 2, "forward, and again in the backward pass"


def test_layers_that_recompute_survive_copies_and_caches():
    model = build("llama")
    recompute_layers(model)
    other = copy.deepcopy(model)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.equal(other(ids).logits, model(ids).logits)
        assert model(ids, use_cache=True).past_key_values.get_seq_length() == 5
    with pytest.raises(ValueError, match="gradient_checkpointing=True: Linear has no layers that support it"):
        recompute_layers(nn.Linear(2, 2))
