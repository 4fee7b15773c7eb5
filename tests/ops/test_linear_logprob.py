"""The LM head by chunks against all logits at once in float64: trained or frozen, and what it does not compute."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import linear_logprob
from turnwise.ops.logprob import choice, linear_chunks

from .conftest import TARGETS
from .heads import IGNORE, TOLERANCE, assert_close, chunks_of, logits_made, make, run, small_chunks

__all__ = ["logits_made", "small_chunks"]  # fixtures
pytestmark = pytest.mark.usefixtures("small_chunks")
FROZEN = ("weight", "bias")
CPU = TARGETS["native"]


@pytest.fixture(params=["dropped", "in the kernel"])
def ignored_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU drops ignored tokens before the products; a GPU leaves them to its kernels."""
    if request.param == "in the kernel":
        monkeypatch.setattr(linear_chunks.Head, "trained", lambda self, mask=None: (self, None))


def compare(target: Any, given: dict[str, Tensor], tolerance: float, **options: Any) -> dict[str, Tensor]:
    """Compare with float64. A CPU rounds narrow logits, as its processor's product does: the definition takes those."""
    got, dtype = run(given, target, linear=True, **options), given["hidden"].dtype
    rounds = target == TARGETS["native"] and dtype is not torch.float32
    assert_close(got, run(given, linear=True, rounded=dtype if rounds else None, **options), tolerance, target)
    return got


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------
# 1 and 31, 33: less than a vector, and a tail; 24: one whole chunk; 25: a chunk of one token; 1025: several segments.
HOW = [*itertools.product([(), FROZEN], [{}, {"ignore_index": IGNORE}, {"softcap": 5.0, "ignore_index": IGNORE}])]
SIZES = [(0, 9), (1, 1), (1, 31), (33, 33), (24, 256), (25, 257), (49, 1025)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("frozen", "options"), HOW, ids=str)  # together, or a cap meets a frozen weight of one row
def test_equals_float64(target, ignored_rows, size, dtype, options, frozen) -> None:
    given = make(sum(size), *size, dtype=dtype, ignored=0.3 if options else 0.0)
    got = compare(target, given, TOLERANCE[dtype], temperature=0.7, frozen=frozen, entropy=not frozen, **options)
    assert got["logprob"].dtype == torch.float32 and got["hidden"].dtype == dtype
    for name in {"logprob", "entropy", "hidden"} & got.keys():
        assert (got[name][given["targets"] == IGNORE] == 0).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [(), FROZEN], ids=["trained", "frozen"])
def test_positions_gather_and_scatter(target, dtype, frozen) -> None:
    given = make(3, 30, 300, dtype=dtype)
    given |= {"hidden": given["hidden"][:20], "targets": torch.arange(30)}
    positions = torch.tensor([19, 0, 7, 7, 7, 3] * 5)
    got = compare(target, given, TOLERANCE[dtype], positions=positions, frozen=frozen, entropy=False)
    assert (got["hidden"][1] == 0).all()
    narrow = {**given, "targets": given["targets"].int()}
    again = run(narrow, target, linear=True, positions=positions.int(), frozen=frozen, entropy=False)
    assert all(torch.equal(again[name], value) for name, value in got.items())


@pytest.mark.parametrize("positions", [None, torch.arange(7)], ids=["rows", "positions"])
def test_all_ignored(target, ignored_rows, positions) -> None:
    given = make(5, 7, 40) | {"targets": torch.full((7,), IGNORE)}
    got = run(
        given, target, linear=True, ignore_index=IGNORE, **({} if positions is None else {"positions": positions})
    )
    assert all((value == 0).all() for value in got.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_maximum_that_grows_along_the_row(target, dtype) -> None:
    """Sums shrink when later logits are larger by 20 to 60."""
    given = make(3, 60, 700, dtype=dtype)
    bias = 20.0 * (torch.arange(700) // 256)
    for given["bias"] in (bias, bias.flip(0)):
        compare(target, given, 3 * TOLERANCE[dtype], frozen=FROZEN, entropy=False)


def test_logits_far_from_zero(target) -> None:
    given = make(0, 26, 600)
    given["hidden"] *= 40
    given["bias"] += 500
    compare(target, given, 3e-5)


def test_a_banned_token_has_no_probability(target) -> None:
    """Every second one, and the first 300."""
    given = make(5, 9, 520)
    given["bias"][::2] = -torch.inf
    given["targets"] |= 1
    got = run(given, target, linear=True, frozen=("bias",), entropy=False)
    assert (got["weight"][::2] == 0).all()
    kept = {**given, "weight": given["weight"][1::2], "bias": given["bias"][1::2], "targets": given["targets"] // 2}
    want = run(kept, linear=True, frozen=("bias",), entropy=False)
    assert_close({**got, "weight": got["weight"][1::2]}, want, 3e-6)
    given = make(4, 60, 700)
    given["targets"] = given["targets"] % 100 + 600
    given["bias"] = torch.zeros(700).index_fill_(0, torch.arange(300), -torch.inf)
    compare(target, given, 3e-6, frozen=FROZEN, entropy=False)


def test_nan_reaches_the_result_but_for_a_token_that_does_not_train(kernel) -> None:
    given = make(6, 30, 300)
    given["hidden"][27, 3] = torch.nan
    got = run(given, kernel, linear=True)
    assert got["logprob"].isnan().nonzero().tolist() == [[27]]
    assert got["weight"].isnan().all()
    given["grad_logprob"][27] = 0
    got = run(given, kernel, linear=True, frozen=FROZEN, entropy=False)
    assert (got["hidden"][27] == 0).all()
    want = run(given | {"hidden": given["hidden"].nan_to_num(0)}, linear=True, frozen=FROZEN, entropy=False)
    assert_close({"hidden": got["hidden"]}, {"hidden": want["hidden"]}, 2e-6)


def test_a_likely_target_keeps_its_digits(kernel) -> None:
    """At p[t] > 0.997 the gradient is a small difference of weight rows. In bfloat16 it would drown in the rounding of
    p[t], as that of a trained weight does, if the target were one of the softmax weights. It is one in Triton, which
    has no path of its own for frozen weights: there 1 - p[t] is right to the rounding of log-sum-exps up to 32."""
    given = make(5, 60, 700, dtype=torch.bfloat16) | {"targets": torch.zeros(60, dtype=torch.int64)}
    given["bias"] = torch.zeros(700)
    given["bias"][0] = 11.0 + (given["hidden"].double() @ given["weight"].double().T).max()
    got, want = (run(given, where, linear=True, frozen=FROZEN, entropy=False) for where in (kernel, None))
    assert (1 - want["logprob"].exp()).max() < 3e-3
    allowed = 0.25 * want["hidden"].norm(dim=1)  # a CPU rounds logits to bfloat16
    if kernel.backend == "triton":
        allowed += 2**-19 * given["grad_logprob"].abs() * given["weight"][0].double().norm()
    assert ((got["hidden"].double() - want["hidden"]).norm(dim=1) <= allowed).all()


# ---------------------------------------------------------------------------------------------------------------------
# What is computed
# ---------------------------------------------------------------------------------------------------------------------
def test_the_logits_of_a_frozen_weight_are_made_once(monkeypatch, logits_made) -> None:
    """Those of a trained one twice, but for those that the memory holds: two chunks of 24 tokens beside the present."""
    given = make(7, 60, 700)
    for most, twice in ((24, 60), (72, 0), (59, 36)):
        chunks_of(24, monkeypatch, most)
        logits_made.clear()
        run(given, CPU, linear=True)
        assert sum(logits_made) == (60 + twice) * 700
    logits_made.clear()
    monkeypatch.delattr(linear_chunks.Products, "weight_gradient")
    run(given, CPU, linear=True, frozen=FROZEN, entropy=False)
    assert sum(logits_made) == 60 * 700


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("most", [24, 59, 60])
def test_kept_logits_give_the_same_gradients(target, monkeypatch, dtype, most) -> None:
    """In a second backward too, when the first has overwritten them. Ignored tokens are not kept."""
    chunks_of(24, monkeypatch, most)
    given = make(8, 60, 333, dtype=dtype, ignored=0.2)
    compare(target, given, TOLERANCE[dtype], temperature=0.7, ignore_index=IGNORE)
    leaves = [target.on(given[name]).clone().requires_grad_() for name in ("hidden", "weight")]
    out = linear_logprob(*leaves, target.on(given["targets"]), ignore_index=IGNORE, backend=target.backend)
    first, second = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))  # type: ignore[union-attr]
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_memory_of_all_logits_is_never_held(monkeypatch, request) -> None:
    monkeypatch.undo()
    made = request.getfixturevalue("logits_made")
    given = make(10, 4000, 3000, width=8)
    run(given, CPU, linear=True)
    assert max(made) == 256 * 3000
    made.clear()
    run(given, CPU, linear=True, max_memory=1 << 20)
    assert 4 * max(made) == 4 * 87 * 3000 <= 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_have_the_bits_of_a_call_without_gradients(target, dtype) -> None:
    given = make(6, 60, 700, dtype=dtype)
    del given["bias"]
    got = run(given, target, linear=True, frozen=FROZEN, entropy=False)["logprob"]
    with torch.no_grad():
        head = target.on((given["hidden"], given["weight"], given["targets"]))
        sampled = linear_logprob(*head, backend=target.backend)
    assert torch.equal(got, sampled.cpu())


def test_the_gradient_of_an_entropy_behind_a_frozen_weight(target) -> None:
    """It needs the logits again; log-probabilities alone don't, though the entropy was asked for."""
    given = make(9, 60, 700)
    for kept in (("grad_logprob", "grad_entropy"), ("grad_logprob",), ("grad_entropy",)):
        zeros = {k: torch.zeros(60) for k in ("grad_logprob", "grad_entropy") if k not in kept}
        compare(target, given | zeros, 5e-6, frozen=FROZEN)


# ---------------------------------------------------------------------------------------------------------------------
# Choices for a frozen weight
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("capability", "frozen"), [((8, 0), False), ((9, 0), False), ((10, 0), True)])
def test_tf32_must_be_far_ahead_for_a_frozen_weight(monkeypatch: pytest.MonkeyPatch, capability, frozen) -> None:
    """Triton makes three products in TF32 where cuBLAS makes two in float32."""
    monkeypatch.setattr(choice, "device_of", lambda tensor: choice.Device(capability=capability))
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert choice.head_op(on_gpu) == "linear_logprob, float32"
    assert choice.head_op(on_gpu, frozen=True) == ("linear_logprob, float32" if frozen else "linear_logprob")
