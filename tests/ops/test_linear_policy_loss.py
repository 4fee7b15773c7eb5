"""LM head and loss in one against the two ops in float64: every option, any chunks, masks, what is left out."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import (
    AGGREGATIONS,
    CISPO,
    GMPO,
    GPG,
    GSPO,
    KL,
    SAPO,
    Clip,
    ImportanceCorrection,
    Reinforce,
    linear_logprob,
    linear_policy_loss,
    policy_loss,
)
from turnwise.ops.common import dispatch as backends
from turnwise.ops.logprob import linear_native as linear_logprob_native
from turnwise.ops.logprob.choice import Chunks

CHUNKS = sys.modules["turnwise.ops.loss.linear_policy_loss"]  # the package has a function of that name
NATIVE = pytest.mark.skipif(backends.interpreted, reason="native backends, in their own process")
LENGTHS = [7, 0, 1, 30, 12]
FULL = {"clip": Clip(0.2, 0.28, dual_clip=3.0), "kl": KL("k3", 0.1), "correction": ImportanceCorrection("token", 1.5)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 tokens, so that rows are cut, and two products for each."""
    chunks_of(8, monkeypatch)
    monkeypatch.setattr(CHUNKS, "_COLUMNS", 200)
    monkeypatch.setattr(CHUNKS, "one_pass", lambda *_: True)  # on a GPU; so small a head takes two


def chunks_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHUNKS, "_LEAST", {2: tokens, 4: tokens})
    monkeypatch.setattr(CHUNKS, "choose_chunks", lambda *_: Chunks(tokens, 256))


def make(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """The arguments of a call, in float32 but for hidden and weight."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tokens, vocabulary, width = sum(LENGTHS), 300, 24
    given: dict[str, Any] = {
        "hidden": noise(tokens, width).to(dtype),
        "weight": (0.4 * noise(vocabulary, width)).to(dtype),
        "targets": torch.randint(vocabulary, (tokens,), generator=generator),
        "bias": noise(vocabulary),
        "advantages": noise(len(LENGTHS)),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
        "mask": torch.rand(tokens, generator=generator) < 0.8,
        "temperature": 0.7,
        "actor_ids": torch.tensor([0, 1, 1, 2, 0]),
        "num_actors": 4,
        "max_length": 40,
        **options,
    }
    exact = linear_logprob(
        given["hidden"].double(), given["weight"].double(), given["targets"], bias=given["bias"], temperature=0.7
    ).float()
    given["old_logprobs"] = exact + 0.4 * noise(tokens)
    if "kl" in options:
        given["ref_logprobs"] = exact + 0.4 * noise(tokens)
    if "correction" in options:
        given["rollout_logprobs"] = exact + 0.3 * noise(tokens)
    return given


def run(given: dict[str, Any], target: Any = None, **changes: Any) -> tuple[Any, dict[str, Tensor]]:
    """The result and the gradients of twice the loss; without a target by the two ops in float64."""
    given = {**given, **changes}
    leaves = {name: given.pop(name) for name in ("hidden", "weight", "bias") if name in given}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    frozen = given.pop("frozen", ())
    if target is None:
        leaves = {k: v.double() for k, v in leaves.items()}
        given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    else:
        leaves = {k: v.to(target.device) for k, v in leaves.items()}
        given = {k: v.to(target.device) if isinstance(v, Tensor) else v for k, v in given.items()}
    leaves = {k: v.detach().clone().requires_grad_(k not in frozen) for k, v in leaves.items()}
    if target is None:
        head = {k: given.pop(k) for k in ("targets", "temperature", "positions") if k in given}
        with_entropy = given.pop("entropy", False)
        logprob, entropy = linear_logprob(**leaves, **head, entropy=True, backend="torch")
        entropy = entropy.detach() if with_entropy else None
        result = policy_loss(logprob, **given, entropy=entropy, backend="torch")
    else:
        result = linear_policy_loss(**leaves, **given, backend=target.backend)
    (result.loss * 2).backward()
    return result, {k: v.grad for k, v in leaves.items() if k not in frozen}


def assert_same(got: tuple[Any, dict[str, Tensor]], want: tuple[Any, dict[str, Tensor]], tolerance: float) -> None:
    (result, grads), (expected, expected_grads) = got, want
    torch.testing.assert_close(result.loss.cpu().double(), expected.loss.double(), rtol=tolerance, atol=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, value in expected_grads.items():
        largest = value.abs().max().item()
        actual = grads[name].cpu().double()
        torch.testing.assert_close(actual, value.double(), rtol=tolerance, atol=tolerance * largest, msg=name)
    for mine, theirs in ((result.metrics, expected.metrics), (result.actor_metrics, expected.actor_metrics)):
        assert list(mine) == list(theirs)
        for name in theirs:
            torch.testing.assert_close(
                mine[name].cpu(), theirs[name].float(), rtol=4 * tolerance, atol=4 * tolerance, msg=name
            )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_equals_the_two_ops(target, aggregation) -> None:
    given = make(1, **FULL, aggregation=aggregation, entropy=True)
    assert_same(run(given, target), run(given), 5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_floats(target, dtype) -> None:
    # SAPO is smooth: where a loss clips, a rounded logit may take a token from one side to the other.
    given = make(1, dtype, variant=SAPO(), kl=KL("k2", 0.1), entropy=True)
    got = run(given, target)
    assert got[1]["weight"].dtype == dtype
    assert_same(got, run(given), 2e-2 if dtype is torch.bfloat16 else 4e-3)


@pytest.mark.parametrize(
    "variant", [Clip(), CISPO(), GPG(), Reinforce(), SAPO(), GSPO(0.2, 0.2), GMPO()], ids=lambda v: type(v).__name__
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_variant(target, variant, level) -> None:
    correction = ImportanceCorrection(level, 1.5) if not isinstance(variant, GMPO) else None
    options = {"correction": correction} if correction else {}
    options["kl"] = KL("k3", 0.1, importance_weighted=level == "token")
    given = make(2, variant=variant, aggregation="seq-mean-token-mean", **options)
    assert_same(run(given, target), run(given), 5e-6)


@pytest.mark.parametrize("seed", range(6))
def test_any_chunks_give_the_same(target, monkeypatch, seed) -> None:
    if target.backend != "native":
        pytest.skip("works without chunks")
    given = make(seed, **FULL)
    want = run(given)
    for least, few in ((1, 1000), (8, 2), (1000, 16)):
        chunks_of(least, monkeypatch)
        monkeypatch.setattr(CHUNKS, "FEW", few)
        assert_same(run(given, target), want, 5e-6)


def test_positions(target) -> None:
    given = make(4, **FULL)
    positions = torch.randint(20, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    given = {**given, "hidden": given["hidden"][:20], "positions": positions}
    assert_same(run(given, target), run(given), 5e-6)


def test_without_bias_or_mask_and_per_token_advantages(target) -> None:
    given = make(5) | {"bias": None, "mask": None, "advantages": torch.randn(sum(LENGTHS))}
    assert_same(run(given, target), run(given), 5e-6)


@pytest.mark.parametrize("frozen", [("weight",), ("hidden", "bias"), ("hidden", "weight")], ids=str)
def test_what_is_frozen_costs_nothing(target, monkeypatch, frozen) -> None:
    given = make(6, **FULL)
    want = run(given, frozen=frozen)
    if target.backend == "native":
        forbidden = {"weight": "weight_gradient", "hidden": "add_hidden"}
        for name in frozen:
            if name in forbidden:
                monkeypatch.delattr(linear_logprob_native.Products, forbidden[name])
    assert_same(run(given, target, frozen=frozen), want, 5e-6)


@NATIVE
def test_the_logits_are_made_once(monkeypatch) -> None:
    products = linear_logprob_native.Products
    made = []
    original = products.logits

    def watched(self: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        made.append(hidden.shape[0] * weight.shape[0])
        return original(self, hidden, weight)

    monkeypatch.setattr(products, "logits", watched)
    given = make(7)
    leaves = {k: given.pop(k).requires_grad_() for k in ("hidden", "weight")}
    linear_policy_loss(**leaves, **given).loss.backward()
    assert sum(made) == int(given["mask"].sum()) * 300  # of the trained tokens alone


@NATIVE
@pytest.mark.slow
def test_a_gpu_makes_the_logits_twice_where_that_is_faster(emulator, monkeypatch) -> None:
    """The choice is asked on a GPU alone, with the call's sizes and whether the weight is trained."""
    monkeypatch.setattr(backends, "emulator", emulator)
    products, made, asked = linear_logprob_native.Products, [], []
    original = products.logits
    monkeypatch.setattr(products, "logits", lambda self, *pair: made.append(len(pair[0])) or original(self, *pair))
    given = make(9, **FULL)
    want = run(given)
    trained = int(given["mask"].sum())  # emulated, one pass skips the others, as on a CPU; it has two tiles of columns
    for once, rows in ((True, 2 * trained), (False, 2 * sum(LENGTHS))):
        made.clear()
        monkeypatch.setattr(CHUNKS, "one_pass", lambda *call, found=once: asked.append(call) or found)
        assert_same(run(given, Native()), want, 5e-6)
        assert sum(made) == rows
    (sizes, _, _, weight, triton), _ = asked
    assert (sizes.tokens, sizes.width, sizes.vocabulary, sizes.copied) == (sum(LENGTHS), 24, 300, False)
    assert weight is True and triton is False
    monkeypatch.setattr(backends, "emulator", None)
    run(given, Native())
    assert len(asked) == 2


class Native:
    """The target of a test that sets the emulator itself."""

    backend, device = "native", "cpu"


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------
