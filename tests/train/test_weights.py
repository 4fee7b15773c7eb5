"""A model that computes in bfloat16 trains float32 masters: small steps add up, and nothing else changes its bits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from turnwise.inference import TransformersClient
from turnwise.inference.weights.lora import SharedBase
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.checkpoint.checkpoint import load_checkpoint, load_weights, save_checkpoint
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig, PolicyConfig, WarmStartConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.model.export import export_model
from turnwise.train.model.loading import attach_adapters, load_model, peft_config, take_dtype
from turnwise.train.model.policy import Policy
from turnwise.train.model.weights import MasterWeights
from turnwise.train.update.sft import Demonstration, warm_start
from turnwise.train.update.update import update_policy
from turnwise.train.validate import config_from_dict

from .test_forward import SIZES, build

TINY = {"max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 2}


def make(dtype: str, lr: float = 1e-6, seed: int = 0, **options) -> Policy:
    model = take_dtype(build("llama"), getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():  # the same values in both types
            parameter.copy_(parameter.bfloat16())
            parameter.mul_(1 + seed)
    return Policy("default", model, UpdateConfig(lr=lr, **options), total_steps=20)


def train(policy: Policy, batch, updates: int = 5, **options) -> None:
    settings = UpdateConfig(**options)
    for _ in range(updates):
        update_policy(policy, batch, settings, LossConfig(), np.random.default_rng(0))


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def test_small_updates_move_bfloat16_weights_as_far_as_float32_ones(random_batch):
    moves = {}
    for dtype in ("float32", "bfloat16"):
        policy = make(dtype)
        before = flat(policy.trained_parameters())
        train(policy, random_batch(0, rows=6))
        moves[dtype] = flat(policy.trained_parameters()) - before
        rounded = [master.to(policy.model.dtype) for master in policy.trained_parameters()]
        assert torch.equal(flat(policy.model.parameters()), flat(rounded))
    wide, narrow = moves["float32"], moves["bfloat16"]
    assert (narrow != 0).float().mean() > 0.95 * (wide != 0).float().mean() > 0.7
    assert torch.dot(wide, narrow) / (wide.norm() * narrow.norm()) > 0.8
    # Enough of them move what computes.
    policy = make("bfloat16", lr=1e-4)
    before = flat(policy.model.parameters())
    train(policy, random_batch(0, rows=6), updates=10)
    assert (flat(policy.model.parameters()) != before).float().mean() > 0.2


def test_micro_batches_add_up_in_float32():
    """3 gradients of bfloat16, worked by hand."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    masters = MasterWeights([weight])
    for part in (256.0, 1.0, 1.0):
        (weight * torch.tensor([part, 0.0], dtype=torch.bfloat16)).sum().backward()
    assert masters.trained[0].grad.tolist() == [258.0, 0.0] and weight.grad is None
    assert torch.tensor(257.0).bfloat16().item() == 256.0, "bfloat16 would lose it"
    masters.drop()
    weight.sum().backward()
    assert weight.grad is not None


def test_a_later_policy_takes_the_weights(random_batch):
    """As after a warm start, or in a notebook: each gradient has one master, and the earlier policy can't step."""
    first = make("bfloat16")
    later = Policy("later", first.model, UpdateConfig(lr=1e-3), total_steps=20)
    train(later, random_batch(0, rows=6))
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in first.model.parameters())
    with pytest.raises(RuntimeError, match="a newer policy trains these weights"):
        first.masters.write()
    # Masters without a policy hold nothing, and take no gradient.
    weight = next(iter(later.model.parameters()))
    del first
    later.release()
    assert later.masters.trained == [] and not weight._post_accumulate_grad_hooks
    forgotten = MasterWeights([weight])
    del forgotten
    assert not weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("lora", [False, True])
def test_a_warm_start_leaves_no_masters(lora):
    """Those of a frozen base would stay for the whole run."""
    model = take_dtype(build_model(build_tokenizer(["0123456789"]), **TINY), torch.bfloat16)
    warm_start(model, [Demonstration([1, 10], [20, 2])], WarmStartConfig(steps=2, batch_size=1), seed=0)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    adapted = SharedBase(model).add_adapter("default", peft_config(LoraConfig(rank=2)), seed=0) if lora else model
    policy = Policy("default", adapted, UpdateConfig(lr=1e-3), total_steps=2)
    assert len(policy.masters.named()) == (0 if lora else len(list(model.parameters())))


def test_a_checkpoint_holds_the_masters_and_goes_on_bit_for_bit(tmp_path, random_batch):
    one = make("bfloat16")
    train(one, random_batch(0, rows=6), 3)
    save_checkpoint(tmp_path, 3, {"default": one}, {})
    [saved] = list_checkpoints(tmp_path)
    other, evaluated = make("bfloat16", seed=1), make("bfloat16", seed=1)
    load_checkpoint(saved, {"default": other})
    load_weights(saved, {"default": evaluated})
    assert other.fingerprint() == one.fingerprint()
    for policy in (other, evaluated):
        assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(policy).values(), strict=True))
    train(one, random_batch(1, rows=6), 3)
    train(other, random_batch(1, rows=6), 3)
    assert other.fingerprint() == one.fingerprint() != evaluated.fingerprint()
    assert torch.equal(flat(one.masters.trained), flat(other.masters.trained))


def test_clients_and_files_get_what_computes(tmp_path, random_batch):
    tokenizer = build_tokenizer(["0123456789"])
    model = take_dtype(build_model(tokenizer, **TINY), torch.bfloat16)
    client = TransformersClient(copy.deepcopy(model), tokenizer)
    policy = Policy("default", model, UpdateConfig(lr=1e-2), total_steps=20)
    train(policy, random_batch(0, rows=6))
    assert {tensor.dtype for tensor in weights(policy).values()} == {torch.bfloat16}
    client.load_weights("default", policy.weights(), 1)
    held = client._policies["default"].model
    assert all(torch.equal(a, b) for a, b in zip(held.parameters(), model.parameters(), strict=True))
    export_model(policy.model, tokenizer, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert read.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), model.parameters(), strict=True))


def test_adapters_over_bfloat16_and_frozen_models_need_no_masters():
    policies = {"default": PolicyConfig(dtype="bfloat16", lora=LoraConfig(rank=2))}
    tokenizer = build_tokenizer(["0123456789"])
    model = take_dtype(build_model(tokenizer, **TINY), torch.bfloat16)
    adapted = attach_adapters({"default": model}, policies, 0)["default"]
    policy = Policy("default", adapted, UpdateConfig(), total_steps=1)
    assert policy.trained_parameters() == list(adapted.parameters())
    assert {parameter.dtype for parameter in policy.trained_parameters()} == {torch.float32}
    still = Policy("still", build("llama").bfloat16(), UpdateConfig(), total_steps=1, trainable=False)
    assert {parameter.dtype for parameter in still.trained_parameters()} == {torch.bfloat16}


def test_float16_trains_nothing():
    with pytest.raises(ValueError, match="policy 'default': float16 is too narrow to train in; expected bfloat16"):
        make("float16")
    config = {"policies": {"a": {"dtype": "float16"}, "b": {"dtype": "float16", "lora": {}}}}
    with pytest.raises(
        ValueError, match=r"policies.a.dtype' = 'float16': .*expected 'bfloat16'[\s\S]*policies.b.dtype"
    ):
        config_from_dict(config)
    frozen = {"a": {"dtype": "float16", "trainable": False}, "b": {}}
    assert isinstance(config_from_dict({"policies": frozen}), TrainConfig)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_loading_rounds_what_transformers_rounds_and_nothing_else(tmp_path, kind):
    if kind == "llama":
        model = build(kind)
    else:
        sizes = {**SIZES, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        sizes |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes))
    model.save_pretrained(tmp_path)

    def types(model) -> dict[str, torch.dtype]:
        return {name: x.dtype for name, x in [*model.named_buffers(), *model.named_parameters()]}

    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    read = load_model(str(tmp_path), "bfloat16", lambda: (None, model))
    assert torch.float32 in types(expected).values(), "rotary frequencies"
    for found in (
        read,
        load_model(str(tmp_path), "bfloat16", lambda: (None, model), empty=True),
        load_model("tiny", "bfloat16", lambda: (None, copy.deepcopy(model))),
    ):
        assert types(found) == types(expected)
    for (name, one), (_, other) in zip(read.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(one, other), name
