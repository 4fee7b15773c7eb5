"""LM head and loss in one against the two ops in float64: every option, any chunks, masks, what is left out."""

from __future__ import annotations

import itertools
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


def test_micro_batches_add_up(target) -> None:
    given = make(3, aggregation="agent-mean", **FULL)
    _, want = run(given)
    counts = torch.zeros(4).index_add(0, given["actor_ids"], segments(given["mask"], given["cu_seqlens"]))
    total: dict[str, Tensor] = {}
    for rows in (slice(0, 3), slice(3, 5)):
        cu = given["cu_seqlens"][rows.start : rows.stop + 1]
        cut = slice(int(cu[0]), int(cu[-1]))
        part = {
            **given,
            **{k: given[k][cut] for k in given if isinstance(given[k], Tensor) and len(given[k]) == sum(LENGTHS)},
            "cu_seqlens": cu - cu[0],
            "advantages": given["advantages"][rows],
            "actor_ids": given["actor_ids"][rows],
        }
        _, grads = run(part, target, normalizer=counts)
        for name, value in grads.items():
            before = total.get(name)
            joined = torch.cat([before, value]) if name == "hidden" and before is not None else value
            total[name] = joined if before is None or name == "hidden" else before + value
    for name, value in want.items():
        torch.testing.assert_close(total[name].cpu().double(), value, rtol=1e-5, atol=1e-6)


def segments(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.stack([mask[a:b].sum() for a, b in itertools.pairwise(cu_seqlens)]).float()


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


@pytest.mark.parametrize("rows", [0, 3])
def test_no_tokens_cost_nothing(target, rows) -> None:
    given = make(8)
    cut = {k: v[:0] for k, v in given.items() if isinstance(v, Tensor) and len(v) == sum(LENGTHS)}
    cut |= {"cu_seqlens": torch.zeros(rows + 1).long(), "advantages": torch.zeros(rows)}
    cut["actor_ids"] = torch.zeros(rows).long()
    for arguments in ({**given, **cut}, {**given, "mask": torch.zeros(sum(LENGTHS))}):
        result, grads = run(arguments, target)
        assert result.loss.item() == 0
        assert result.metrics["tokens"].item() == 0
        assert all((grad == 0).all() for grad in grads.values())


@NATIVE
def test_masked_tokens_may_hold_anything(target) -> None:
    given = make(9, **FULL)
    _, want = run(given, target)
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        given[name] = given[name].masked_fill(~given["mask"], torch.nan)
    _, got = run(given, target)
    for name in want:
        assert torch.equal(got[name], want[name])


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------
def test_backward_twice_through_one_graph(target) -> None:
    given = {k: v.to(target.device) if isinstance(v, Tensor) else v for k, v in make(10).items()}
    leaves = {k: given.pop(k).requires_grad_() for k in ("hidden", "weight", "bias")}
    result = linear_policy_loss(**leaves, **given, backend=target.backend)
    (result.loss * 2).backward(retain_graph=True)
    first = {k: v.grad.clone() for k, v in leaves.items()}
    (result.loss * 3).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, 2.5 * first[name])


def test_the_loss_may_be_changed_in_place(target) -> None:
    given = {k: v.to(target.device) if isinstance(v, Tensor) else v for k, v in make(10).items()}
    hidden = given.pop("hidden").requires_grad_()
    linear_policy_loss(hidden, **given, backend=target.backend).loss.backward()
    once = hidden.grad.clone()
    loss = linear_policy_loss(hidden, **given, backend=target.backend).loss
    loss += 1
    loss *= 3
    loss.backward()
    torch.testing.assert_close(hidden.grad, 4 * once)


@NATIVE
def test_a_second_derivative_raises() -> None:
    given = make(11)
    hidden = given.pop("hidden").requires_grad_()
    given["weight"].requires_grad_()
    loss = linear_policy_loss(hidden, **given).loss
    with pytest.raises(RuntimeError, match="differentiated again; use backend='torch'"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    given["weight"].requires_grad_(False)
    (grad,) = torch.autograd.grad(linear_policy_loss(hidden, **given).loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use backend='torch'"):
        grad.sum().backward()


def test_without_grad_mode_there_is_no_graph(target) -> None:
    given = {k: v.to(target.device) if isinstance(v, Tensor) else v for k, v in make(12, **FULL).items()}
    want, _ = run(make(12, **FULL))
    given["hidden"].requires_grad_()
    with torch.no_grad():
        result = linear_policy_loss(**given, backend=target.backend)
    assert not result.loss.requires_grad
    torch.testing.assert_close(result.loss.cpu().double(), want.loss, rtol=5e-6, atol=5e-6)


@NATIVE
@pytest.mark.parametrize("entropy", [False, True])
def test_opcheck(target, opcheck_calls, entropy) -> None:
    if target.backend == "torch":
        pytest.skip("no registered op")
    called = opcheck_calls(lambda: run(make(17, **FULL, entropy=entropy), target))
    policy = {"policy_loss", "policy_loss_backward"}
    assert called - {f"{name}_triton" for name in policy} == policy | {"linear_logprob", "linear_logprob_backward"}


def test_autocast(target) -> None:
    given = make(14)
    narrow = {k: given[k].bfloat16() for k in ("hidden", "weight")}
    want, want_grads = run({**given, **narrow}, target)
    moved = {k: v.to(target.device) if isinstance(v, Tensor) else v for k, v in given.items()}
    leaves = {k: moved.pop(k).requires_grad_() for k in ("hidden", "weight", "bias")}
    with torch.autocast(target.device, dtype=torch.bfloat16):
        result = linear_policy_loss(**leaves, **moved, backend=target.backend)
    (result.loss * 2).backward()
    assert torch.equal(result.loss, want.loss)
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad, want_grads[name].float())


@NATIVE
def test_equal_bits_run_to_run_and_in_eight_threads(target, in_threads) -> None:
    given = make(15, **FULL)
    _, want = run(given, target)

    def work(_: int) -> bool:
        _, got = run(given, target)
        return all(torch.equal(got[name], want[name]) for name in want)

    assert work(0) and all(in_threads(work, 1 if target.emulated else 8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"old_logprobs": torch.zeros(3)}, ValueError, r"old_logprobs has shape \(3,\): expected \(50,\)"),
        ({"advantages": torch.zeros(3)}, ValueError, r"advantages has shape \(3,\)"),
        ({"cu_seqlens": torch.tensor([0, 1, 2, 3, 4, 49])}, ValueError, r"cu_seqlens\[-1\]=49: expected 50"),
        ({"targets": torch.full((50,), 300)}, ValueError, r"targets\[0\]=300: expected an id in \[0, 300\)"),
        ({"targets": torch.zeros(49).long()}, ValueError, r"targets has shape \(49,\): expected \(50,\), as hidden"),
        ({"kl": KL()}, ValueError, "ref_logprobs=None"),
        ({"aggregation": "mean"}, ValueError, "aggregation='mean': expected one of"),
        ({"temperature": -1.0}, ValueError, r"temperature=-1\.0"),
        ({"clip": Clip(), "variant": GPG()}, ValueError, "variant"),
        ({"weight": torch.zeros(300, 23)}, ValueError, r"weight has shape \(300, 23\)"),
    ],
)
def test_mistakes_are_named_before_anything_is_computed(monkeypatch, change, error, message) -> None:
    monkeypatch.delattr(linear_logprob_native.Products, "logits")
    given = {**make(16, mask=None), **change}
    given["hidden"] = given["hidden"].requires_grad_()
    with pytest.raises(error, match=message):
        linear_policy_loss(**given)
