from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from turnwise.inference.weights.lora import SharedBase
from turnwise.train.checkpoint.files import read_tensors, write_tensors
from turnwise.train.config.optimization import KLConfig, LossConfig, UpdateConfig
from turnwise.train.config.policies import LoraConfig
from turnwise.train.model.loading import peft_config
from turnwise.train.model.micro_batch import micro_batches
from turnwise.train.model.policy import Policy, fingerprints
from turnwise.train.model.weights import bit_sum, count_not_finite, named_weights
from turnwise.train.update.update import update_policy

from ..trained import equal


def move(policy):
    for parameter in policy.trained_parameters():
        parameter.grad = torch.ones_like(parameter)
    return policy.step()


def rate_of(policy):
    return policy.learning_rate / 1e-3


def rates_of(policy, updates):
    rates = []
    for _ in range(updates):
        rates.append(rate_of(policy))
        move(policy)
    return rates


def test_the_schedules_and_the_clip(small_model):
    config = UpdateConfig(lr=1e-3, warmup=2, min_lr_ratio=0.1)
    policy = Policy("default", small_model()[0], config, total_steps=10)
    rates = rates_of(policy, 12)
    falling = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(9)]
    assert rates == pytest.approx([0.5, 1.0, *falling, 0.1])
    # The linear schedule.
    config = UpdateConfig(lr=1e-3, warmup=1, min_lr_ratio=0.2, schedule="linear")
    policy = Policy("default", small_model()[0], config, total_steps=5)
    assert rates_of(policy, 6) == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    # The gradient is clipped and cleared.
    policy = Policy("default", small_model()[0], UpdateConfig(max_grad_norm=0.5), total_steps=1)
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    assert move(policy) == pytest.approx(math.sqrt(count), rel=1e-4)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_tied_weights_are_named_once(small_model):
    names = [name for name, _ in named_weights(small_model()[0])]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_a_view_of_a_weight_is_a_weight_of_its_own(tmp_path):
    """It begins where the whole begins: named by that alone, the one that comes second would be lost."""
    model = torch.nn.Module()
    whole = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    model.register_buffer("rows", whole.data[:2])
    model.whole = whole
    assert [name for name, _ in named_weights(model)] == ["whole", "rows"]
    write_tensors(dict(named_weights(model)), tmp_path / "file")
    read = read_tensors(tmp_path / "file")
    assert torch.equal(read["whole"], whole) and torch.equal(read["rows"], whole[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named_when_a_policy_is_made(small_model, bad, dtype):
    """Of its own model, of a reference, and of the base below an adapter; weights whose sum overflows are fine."""
    assert not count_not_finite(torch.full((4,), 3e38, dtype=dtype))
    model, _ = small_model()
    model.to(dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, :2] = bad
    name = r"'model.layers.1.mlp.up_proj.weight' is not finite at the start: 2 of 2048 elements are NaN or infinite"
    with pytest.raises(FloatingPointError, match=f"policy 'solver': weight {name}"):
        Policy("solver", model, UpdateConfig(), total_steps=1)
    sound, _ = small_model()
    with pytest.raises(FloatingPointError, match=f"policy 'solver': its reference's weight {name}"):
        Policy("solver", sound, UpdateConfig(), total_steps=1, reference=model)
    adapted = SharedBase(model, "tiny").add_adapter("solver", peft_config(LoraConfig(rank=2)), 0)
    with pytest.raises(FloatingPointError, match=f"policy 'solver': its base's weight {name}"):
        Policy("solver", adapted, UpdateConfig(), total_steps=1)


def test_the_rate_follows_the_share_of_the_run(small_model):
    config = UpdateConfig(lr=1e-3, warmup=1, min_lr_ratio=0.2, schedule="linear")
    policy = Policy("default", small_model()[0], config, total_steps=101)
    move(policy)
    rates = []
    for share in (0.0, 26 / 101, 51 / 101, 1.0, 1.1):
        policy.follow_run(share)
        rates += rates_of(policy, 2)
    # A step begins at the share of the run, and each of its updates advances by one of 101. One of them is the warm-up.
    assert rates == pytest.approx([1.0, 1.0, 0.8, 0.792, 0.6, 0.592, 0.2, 0.2, 0.2, 0.2])
    # The number of updates so far does not count: here many were made by the middle of the run.
    config = UpdateConfig(lr=1e-3, min_lr_ratio=0.0, schedule="linear")
    policy = Policy("default", small_model()[0], config, total_steps=4)
    rates_of(policy, 3)
    policy.follow_run(0.5)
    assert rate_of(policy) == pytest.approx(0.5)
    # A warm-up counts updates. If steps had none, it ends later, on the falling rate.
    config = UpdateConfig(lr=1e-3, min_lr_ratio=0.0, schedule="linear", warmup=2)
    policy = Policy("default", small_model()[0], config, total_steps=10)
    rates = []
    for share in (0.0, 0.6, 0.8):
        policy.follow_run(share)
        rates += rates_of(policy, 1)
    assert rates == pytest.approx([0.5, 0.5, 0.25])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_fingerprint_sees_the_last_bit(small_model, dtype):
    model = small_model()[0].to(dtype)
    policy = Policy("default", model, UpdateConfig(), total_steps=1, trainable=dtype != torch.float16)
    before = policy.fingerprint()
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[2, 3] = torch.nextafter(weight[2, 3], torch.tensor(10.0, dtype=dtype))
    assert sum(one != other for one, other in zip(before, policy.fingerprint(), strict=True)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_large_weights(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 301, dtype=dtype)
    bits = weight.numpy() if dtype != torch.bfloat16 else weight.view(torch.int16).numpy()
    wanted = sum(bits.view(f"i{bits.itemsize}").ravel().tolist())
    assert (bit_sum(weight) - wanted) % 2**64 == 0 and bit_sum(weight.t()) == bit_sum(weight)
    assert count_not_finite(weight) == 0
    weight[299, 300], weight[0, 0] = float("nan"), float("inf")
    assert count_not_finite(weight) == 2


@pytest.fixture
def adapters(small_model):
    def build(**options):
        shared = SharedBase(small_model()[0])
        models = {name: shared.add_adapter(name, peft_config(LoraConfig(rank=2)), seed=7) for name in ("a", "b")}
        config = UpdateConfig(lr=1e-2)
        return {name: Policy(name, model, config, total_steps=4, **options) for name, model in models.items()}

    return build


def test_an_adapters_optimizer_holds_the_adapter_alone(adapters):
    policies = adapters()
    before = fingerprints(policies)
    assert list(before) == ["a", "b", "the base of a"]
    for name in policies:
        held = {id(p) for group in policies[name].optimizer.param_groups for p in group["params"]}
        assert held == {id(parameter) for parameter in policies[name].model.parameters()}
    move(policies["a"])
    after = fingerprints(policies)
    assert {name for name in before if before[name] != after[name]} == {"a"}
    with torch.no_grad():
        policies["b"].base.model.model.norm.weight[0] += 1e-6
    assert fingerprints(policies)["the base of a"] != after["the base of a"]


def test_adapters_trained_in_turns_equal_adapters_trained_alone(adapters, random_batch):
    """Two over one base and one optimizer each: what one does leaves no trace in the other's gradient or moments."""
    loss, update = LossConfig(kl=KLConfig(coef=0.1)), UpdateConfig(lr=1e-2, micro_batch_tokens=64, num_minibatches=2)

    def train(policy, seed):
        batch = random_batch(seed, rows=12, policies=("a", "b"))
        update_policy(policy, batch, update, loss, np.random.default_rng(seed))

    together = adapters(with_reference=True)
    for seed in range(3):
        for policy in together.values():
            train(policy, seed)
    for name, policy in together.items():
        alone = adapters(with_reference=True)[name]
        for seed in range(3):
            train(alone, seed)
        assert alone.updates == policy.updates > 3
        assert equal(dict(alone.weights()), dict(policy.weights()))


def test_an_adapters_reference_is_the_base_with_adapters_off(adapters, small_model, random_batch):
    policies = adapters(with_reference=True)
    policy = policies["a"]
    plain = Policy("plain", small_model()[0], UpdateConfig(), total_steps=1)
    (micro,) = micro_batches(random_batch(0, rows=4), np.arange(4), 10_000)
    for _ in range(2):
        move(policy)
    with torch.no_grad():
        expected = plain.logprobs(micro)
        assert torch.allclose(policy.reference_logprobs(micro), expected, atol=1e-6)
        assert not torch.allclose(policy.logprobs(micro), expected, atol=1e-3)


def test_the_first_weights_bring_the_base(adapters, small_model):
    policy = adapters()["a"]
    own, every = dict(policy.weights()), dict(policy.all_weights())
    assert all("lora_" in name for name in own) and own.keys() <= every.keys()
    assert every.keys() - own.keys() == {name for name, _ in named_weights(small_model()[0])}
