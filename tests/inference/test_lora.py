"""Several LoRA adapters over one base: each policy sees its own, the base's memory is there once."""

from __future__ import annotations

import copy
import sys
from typing import Any

import peft
import pytest
import torch

from turnwise.inference import TransformersClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.weights.lora import AdaptedModel, SharedBase, activated, shared_bases
from turnwise.types import ModelRequest, Sampling

from .helpers import build, teacher_forced

IDS = torch.tensor([[5, 3, 9, 250, 7, 1]])


def lora(**options: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    return peft.LoraConfig(**settings, task_type="CAUSAL_LM")


@pytest.fixture
def shared() -> SharedBase:
    base = SharedBase(build())
    base.add_adapter("a", lora(), seed=1)
    return base


def trio() -> tuple[SharedBase, AdaptedModel, AdaptedModel]:
    """A base and two adapters with an effect."""
    shared = SharedBase(build())
    pair = shared.add_adapter("a", lora(), seed=1), shared.add_adapter("b.c", lora(r=2, lora_dropout=0.5), seed=2)
    for seed, model in enumerate(pair):
        shake(model, seed)
    return shared, *pair


def shake(model: AdaptedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_a_new_adapter_has_no_effect_and_others_keep_theirs() -> None:
    plain, (shared, a, _) = build(), trio()
    before = logits(a)
    assert not torch.allclose(before, logits(plain), atol=1e-3)
    fresh = shared.add_adapter("late", lora(target_modules=["q_proj"]), seed=3)
    assert torch.equal(logits(fresh), logits(plain)) and torch.equal(logits(shared.plain()), logits(plain))
    assert torch.equal(logits(a), before)
    assert {name.split(".")[-3] for name in fresh.state_dict()} == {"q_proj"}


def test_adapters_are_drawn_by_their_seed_alone() -> None:
    one, other = SharedBase(build()), SharedBase(build())
    state = torch.get_rng_state()
    first = one.add_adapter("a", lora(), seed=1)
    other.add_adapter("b", lora(), seed=2)
    second = other.add_adapter("a", lora(), seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, mine), (_, theirs) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name


def test_parameters_are_the_adapters_alone() -> None:
    shared, a, b = trio()
    own = {id(parameter) for parameter in a.parameters()}
    assert own and own.isdisjoint(map(id, b.parameters())) and own <= set(map(id, shared.model.parameters()))
    assert not list(shared.plain().parameters())
    assert shared.weights().keys() == build().state_dict().keys()
    a.requires_grad_(True)
    b.requires_grad_(False)
    logits_b, logits_a = b(IDS).logits, a(IDS).logits
    assert not logits_b.requires_grad, "nothing in it is trained"
    logits_a.sum().backward()
    assert all(parameter.grad is not None for parameter in a.parameters())
    frozen = [p for p in shared.model.parameters() if id(p) not in own]
    assert not any(p.requires_grad or p.grad is not None for p in frozen)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_pass_goes_through_the_adapter_of_its_forward_pass(checkpointing: bool) -> None:
    """With gradient checkpointing layers run once more in the backward pass, when another adapter may be active."""

    def gradients(between: bool) -> list[torch.Tensor]:
        shared, a, b = trio()
        if checkpointing:
            shared.enable_gradient_checkpointing()
        for model in (a, b):
            model.requires_grad_(True).train(checkpointing)
        torch.manual_seed(0)
        loss_b = b(IDS).logits.square().sum()
        loss_a = a(IDS).logits.square().sum()
        if not between:
            a.zero_grad()
        else:
            logits(shared.plain().eval())
        loss_b.backward()
        assert all(parameter.grad is None for parameter in a.parameters())
        loss_a.backward()
        return [parameter.grad for model in (a, b) for parameter in model.parameters()]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(one, other) and one.abs().sum() > 0


def test_training_mode_is_each_policys_own() -> None:
    _, a, b = trio()
    expected = logits(b.eval())
    b.train()
    a.eval()
    logits(a)
    torch.manual_seed(0)
    assert not torch.equal(logits(b), expected), "dropout"
    assert torch.equal(logits(b.eval()), expected)


def test_merged_weights_compute_the_same() -> None:
    shared, a, b = trio()
    for model in (a, b, shared.plain()):
        plain = build(seed=5)
        plain.load_state_dict(shared.merged_weights(model))
        torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


def test_the_weights_have_the_names_of_pefts_files(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    theirs = peft.get_peft_model(build(), lora())
    theirs.save_pretrained(tmp_path)
    _, a, _ = trio()
    expected = load_file(tmp_path / "adapter_model.safetensors")
    assert {n: t.shape for n, t in a.state_dict().items()} == {n: t.shape for n, t in expected.items()}


def test_a_bfloat16_base_has_float32_adapters() -> None:
    shared = SharedBase(build().bfloat16())
    adapted = shared.add_adapter("a", lora(), seed=0)
    assert {parameter.dtype for parameter in adapted.parameters()} == {torch.float32}
    shake(adapted, 0)
    assert logits(adapted).dtype == torch.bfloat16
    assert not torch.equal(logits(adapted), logits(shared.plain()))


def test_copies_with_one_memo_share_one_base() -> None:
    shared, a, b = trio()
    memo: dict[int, Any] = {}
    copies = [copy.deepcopy(model, memo) for model in (a, b)]
    (base,) = shared_bases(copies)
    assert base is not shared and shared_bases([a, build(), b]) == [shared]
    expected = logits(a)
    shake(a, 9)
    assert torch.equal(logits(copies[0]), expected) and not torch.equal(logits(a), expected)
    assert copies[0].activate() is base.model and activated(copies[1]) is base.model and base.active == copies[1].key
    copies[0].to(torch.float64)
    assert logits(copies[1]).dtype == torch.float64 and logits(a).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a", {}, r"adapter 'a' exists already; adapters: \['a'\]"),
        ("b", {"target_modules": ["nope"]}, "nope"),
        ("b", {"target_modules": ["embed_tokens"]}, "the model ties its embedding to its head"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_adapters_that_can_not_be(shared: SharedBase, name: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shared.add_adapter(name, lora(**options), seed=0)


def test_peft_is_named_where_it_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"LoRA needs peft: pip install 'turnwise\[peft\]'"):
        SharedBase(build()).add_adapter("a", None, seed=0)


# ---------------------------------------------------------------------------------------------------------------------
# Served
# ---------------------------------------------------------------------------------------------------------------------
def ask(policy: str, seed: int = 0) -> ModelRequest:
    return ModelRequest([1, 2, 3, 40], Sampling(max_tokens=8, seed=seed), policy)


async def test_new_weights_reach_one_adapter_alone() -> None:
    _, a, b = trio()
    async with TransformersClient({"a": a, "b": b}, ByteTokenizer()) as client:
        [base] = shared_bases([client._policies[name].model for name in "ab"])
        assert base is not a.shared
        [before] = await client.generate([ask("b")])
        shake(a, 7)
        client.load_weights("a", a.state_dict().items(), 4)
        [after_a], [after_b] = await client.generate([ask("a")]), await client.generate([ask("b")])
        assert after_b == before and after_a.policy_versions == [(8, 4)]
        expected = teacher_forced(a, after_a)
        assert after_a.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        held = {name: tensor.clone() for name, tensor in client._policies["a"].model.state_dict().items()}
        weights = dict(b.state_dict())
        for wrong, message in (
            (a.shared.weights(), "missing"),
            (dict(list(weights.items())[1:]), "missing"),
            (weights, "has shape"),
        ):
            with pytest.raises(ValueError, match=message):
                client.load_weights("a", wrong.items(), 5)
        assert client.version("a") == 4
        assert all(torch.equal(t, held[n]) for n, t in client._policies["a"].model.state_dict().items())


async def test_a_policys_first_weights_may_bring_the_whole_base() -> None:
    """As after a resume: the trainer's base was read from a checkpoint when the client had copied it already."""
    shared, a, b = trio()
    async with TransformersClient({"a": a, "b": b}, ByteTokenizer()) as client:
        with torch.no_grad():
            shared.model.model.norm.weight.mul_(1.5)
        client.load_weights("a", [*a.state_dict().items(), *shared.weights().items()], 1)
        for name, model in (("a", a), ("b", b)):
            [response] = await client.generate([ask(name)])
            assert response.logprobs == pytest.approx(teacher_forced(model, response).tolist(), abs=1e-5)
