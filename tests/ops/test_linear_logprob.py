"""The LM head by tiles against all logits at once in float64, and what a caller may count on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import linear_logprob
from turnwise.ops.common import dispatch as backends
from turnwise.ops.common.dispatch import BackendUnavailable
from turnwise.ops.logprob import choice
from turnwise.ops.logprob import linear_native as linear_logprob_native
from turnwise.ops.logprob.choice import Tiles

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NATIVE = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="native backends, in their own process")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of tokens and tiles of 256 columns, on a GPU groups and spans too, also at small sizes."""
    for name, size in (("_CPU_ROWS", 24), ("_CPU_FORWARD", 1), ("_CPU_BACKWARD", 1)):
        monkeypatch.setattr(choice, name, size)
    tiles = {2: Tiles(24, 256, 48, 96), 4: Tiles(24, 256, 24, 96)}
    monkeypatch.setattr(linear_logprob_native, "choose", lambda sizes, *_: tiles[sizes.size])


def make(
    seed: int, tokens: int = 33, vocabulary: int = 700, width: int = 40, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden": noise(tokens, width).to(dtype),
        "weight": (0.4 * noise(vocabulary, width)).to(dtype),
        "targets": torch.randint(vocabulary, (tokens,), generator=generator),
        "bias": noise(vocabulary),
        "grad_logprob": noise(tokens),
        "grad_entropy": noise(tokens),
    }


def run(given: dict[str, Tensor], backend: str, device: str = "cpu", **options: Any) -> dict[str, Tensor]:
    """Values and gradients, by name; float64 of the same numbers for the reference."""
    exact = backend == "exact"
    leaves = {
        name: given[name].detach().to(device, torch.float64 if exact else None, copy=True).requires_grad_()
        for name in ("hidden", "weight", "bias")
        if name in given
    }
    positions = None if "positions" not in given else given["positions"].to(device)
    logprob, entropy = linear_logprob(
        leaves["hidden"],
        leaves["weight"],
        given["targets"].to(device),
        bias=leaves.get("bias"),
        positions=positions,
        entropy=True,
        backend="torch" if exact else backend,
        **options,
    )
    loss = (logprob * given["grad_logprob"].to(device)).sum() + (entropy * given["grad_entropy"].to(device)).sum()
    loss.backward()
    return {"logprob": logprob, "entropy": entropy, **{f"grad of {k}": v.grad for k, v in leaves.items()}}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, expected in want.items():
        largest = expected.abs().max().item() if expected.numel() else 0.0
        actual = got[name].detach().cpu().double()
        torch.testing.assert_close(
            actual,
            expected.double(),
            rtol=tolerance,
            atol=tolerance * max(largest, 0.1),
            msg=lambda m, n=name: f"{n}: {m}",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------
# 1 and 31, 33: less than a vector, and a tail; 256: one whole tile; 257: a tile of one column; 1025: several.
@pytest.mark.parametrize(
    ("tokens", "vocabulary"), [(1, 1), (1, 31), (33, 33), (24, 256), (25, 257), (49, 1025)], ids=str
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_equals_float64(target, tokens, vocabulary, dtype) -> None:
    given = make(tokens * vocabulary, tokens, vocabulary, dtype=dtype)
    got = run(given, target.backend, target.device, temperature=0.7)
    assert got["logprob"].dtype == torch.float32
    assert got["grad of weight"].dtype == dtype
    assert_close(got, run(given, "exact", temperature=0.7), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positions_gather_and_scatter(target, dtype) -> None:
    given = make(3, 20, 300, dtype=dtype)
    positions = torch.tensor([19, 0, 7, 7, 7, 3] * 5)
    upstream = torch.randn(30, generator=torch.Generator().manual_seed(3))
    given |= {"positions": positions, "targets": torch.arange(30), "grad_logprob": upstream}
    given["grad_entropy"] = torch.zeros(30)
    got = run(given, target.backend, target.device)
    assert_close(got, run(given, "exact"), TOLERANCE[dtype])
    assert (got["grad of hidden"][1] == 0).all()
    narrow = {**given, "positions": positions.int(), "targets": given["targets"].int()}
    for name, value in run(narrow, target.backend, target.device).items():
        assert torch.equal(value, got[name]), name


@NATIVE
@pytest.mark.parametrize(("dtype", "products"), [(torch.bfloat16, 3), (torch.float32, 6)], ids=str)
def test_a_gpu_takes_narrow_gradients_of_several_blocks_into_the_weight_at_once(
    emulator, monkeypatch, dtype, products
) -> None:
    """Six blocks of 24 tokens, in groups of two that end with a span of 96 and with the tokens. Each product reads and
    writes the sums of the weight's gradient."""
    monkeypatch.setattr(backends, "emulator", emulator)
    given = make(20, 130, 200, dtype=dtype)
    given |= {"positions": torch.randint(130, (130,), generator=torch.Generator().manual_seed(0))}
    taken, plain = [], linear_logprob_native.Products.weight_gradient
    monkeypatch.setattr(
        linear_logprob_native.Products,
        "weight_gradient",
        lambda self, out, d, *rest, **named: taken.append(len(d)) or plain(self, out, d, *rest, **named),
    )
    assert_close(run(given, "native"), run(given, "exact"), TOLERANCE[dtype])
    assert len(taken) == products and sum(taken) == 130


@pytest.mark.parametrize("seed", range(5))
def test_logits_far_from_zero(target, seed) -> None:
    given = make(seed, 26, 600)
    given["hidden"] *= 40
    given["bias"] += 500
    assert_close(run(given, target.backend, target.device), run(given, "exact"), 3e-5)


def test_a_banned_token_has_no_probability(target) -> None:
    given = make(5, 9, 520)
    given["bias"][::2] = -torch.inf
    given["targets"] |= 1
    leaves = {k: given[k].to(target.device).requires_grad_() for k in ("hidden", "weight")}
    others = {k: given[k].to(target.device) for k in ("targets", "bias")}
    logprob = linear_logprob(**leaves, **others, backend=target.backend)
    logprob.sum().backward()
    assert (leaves["weight"].grad[::2] == 0).all()
    kept = {**given, "weight": given["weight"][1::2], "bias": given["bias"][1::2], "targets": given["targets"] // 2}
    want = run({**kept, "grad_logprob": torch.ones(9), "grad_entropy": torch.zeros(9)}, "exact")
    got = {"logprob": logprob, "grad of hidden": leaves["hidden"].grad, "grad of weight": leaves["weight"].grad[1::2]}
    assert_close(got, {name: want[name] for name in got}, 3e-6)


def test_nan_reaches_the_result(target) -> None:
    given = make(6, 30, 300)
    given["hidden"][27, 3] = torch.nan
    got = run(given, target.backend, target.device)
    assert got["logprob"].isnan().nonzero().tolist() == [[27]]
    assert got["grad of weight"].isnan().all()


def test_no_tokens(target) -> None:
    got = run(make(8, 0, 300), target.backend, target.device)
    assert got["logprob"].shape == (0,)
    assert (got["grad of weight"] == 0).all()
    assert got["grad of hidden"].shape == (0, 40)


# ---------------------------------------------------------------------------------------------------------------------
# What is not computed
# ---------------------------------------------------------------------------------------------------------------------
def test_a_frozen_weight_costs_no_product(target, monkeypatch) -> None:
    given = make(9)
    hidden = given["hidden"].to(target.device).requires_grad_()
    weight = given["weight"].to(target.device)
    if target.backend == "native":
        monkeypatch.delattr(linear_logprob_native.Products, "weight_gradient")
    linear_logprob(hidden, weight, given["targets"].to(target.device), backend=target.backend).sum().backward()
    assert weight.grad is None
    want = run(
        {**given, "grad_logprob": torch.ones(33), "grad_entropy": torch.zeros(33), "bias": torch.zeros(700)}, "exact"
    )
    torch.testing.assert_close(hidden.grad.cpu().double(), want["grad of hidden"], rtol=1e-5, atol=1e-5)


def test_without_grad_mode_there_is_no_graph(target) -> None:
    given = {k: v.to(target.device) for k, v in make(9).items()}
    weight = given["weight"].requires_grad_()
    with torch.no_grad():
        assert not linear_logprob(given["hidden"], weight, given["targets"], backend=target.backend).requires_grad


@NATIVE
def test_the_memory_of_the_logits_is_never_held(monkeypatch) -> None:
    """The largest tensor that a forward or backward makes is a tile, or a gradient."""
    monkeypatch.undo()
    largest = []
    product = linear_logprob_native.Products.logits

    def watched(self: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = product(self, hidden, weight)
        largest.append(logits.numel())
        return logits

    monkeypatch.setattr(linear_logprob_native.Products, "logits", watched)
    given = make(10, 4000, 3000, 8)
    run(given, "native")
    assert max(largest) <= 1 << 21 < 4000 * 3000


# ---------------------------------------------------------------------------------------------------------------------
# Invariances
# ---------------------------------------------------------------------------------------------------------------------
@NATIVE
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_equal_bits_run_to_run_and_in_eight_threads(in_threads, dtype) -> None:
    given = make(11, 60, 700, dtype=dtype)
    want = run(given, "native")

    def work(_: int) -> bool:
        results = [run(given, "native") for _ in range(3)]
        return all(torch.equal(got[name], want[name]) for got in results for name in want)

    assert all(in_threads(work))


# ---------------------------------------------------------------------------------------------------------------------
# torch
# ---------------------------------------------------------------------------------------------------------------------
@NATIVE
def test_opcheck() -> None:
    given = make(12, 9, 300)
    hidden, weight, bias = (given[k].requires_grad_() for k in ("hidden", "weight", "bias"))
    for arguments in (
        (hidden, weight, given["targets"], bias, None, 0.7, None, None, True, "native"),
        (hidden, weight, given["targets"][:4], None, torch.tensor([3, 3, 0, 8]), 1.0, 5.0, -100, False, "native"),
    ):
        torch.library.opcheck(torch.ops.turnwise.linear_logprob.default, arguments)
    ones = torch.ones(9)
    backward = (
        ones,
        ones,
        *(given[k].detach() for k in ("hidden", "weight", "targets", "bias")),
        None,
        ones,
        ones,
        *(1.0, 5.0, -100),
    )
    for needs in ((True, True, True), (True, False, False)):
        torch.library.opcheck(torch.ops.turnwise.linear_logprob_backward.default, (*backward, *needs, "native"))


def test_compiles_whole(target) -> None:
    given = {k: v.to(target.device) for k, v in make(13).items()}

    def scaled(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_logprob(hidden * 1.5, weight, given["targets"], backend=target.backend).exp().sum()

    results = []
    for function in (scaled, torch.compile(scaled, fullgraph=True, backend="aot_eager")):
        leaves = [given[name].clone().requires_grad_() for name in ("hidden", "weight")]
        value = function(*leaves)
        value.backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


def test_autocast_casts_as_linear_does(target) -> None:
    given = {k: v.to(target.device) for k, v in make(14).items()}
    weight = given["weight"].requires_grad_()
    with torch.autocast(target.device, dtype=torch.bfloat16):
        got = linear_logprob(given["hidden"], weight, given["targets"], backend=target.backend)
    got.sum().backward()
    want = linear_logprob(
        given["hidden"].bfloat16(), weight.detach().bfloat16(), given["targets"], backend=target.backend
    )
    assert torch.equal(got, want)
    assert weight.grad.dtype == torch.float32


def test_gradcheck_of_the_reference() -> None:
    given = make(15, 4, 7, 5, torch.float64)
    leaves = [given[name].double().requires_grad_() for name in ("hidden", "weight", "bias")]

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return linear_logprob(
            hidden, weight, given["targets"], bias=bias, entropy=True, temperature=0.7, backend="torch"
        )

    assert torch.autograd.gradcheck(call, leaves)


@NATIVE
def test_a_second_derivative_raises() -> None:
    given = make(16)
    hidden = given["hidden"].requires_grad_()
    logprob = linear_logprob(hidden, given["weight"], given["targets"])
    (grad,) = torch.autograd.grad(logprob.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use backend='torch'"):
        grad.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(3)}, ValueError, r"hidden has shape \(3,\): expected \[N, H\]"),
        ({"hidden": [[1.0]]}, TypeError, "hidden: expected a tensor, got list"),
        ({"weight": torch.zeros(5, 3)}, ValueError, r"weight has shape \(5, 3\): expected \[V, 4\]"),
        ({"weight": torch.zeros(0, 4)}, ValueError, "expected at least one row"),
        (
            {"weight": torch.zeros(5, 4).bfloat16()},
            TypeError,
            "weight has dtype torch.bfloat16: expected torch.float32",
        ),
        ({"hidden": torch.zeros(3, 4).int()}, TypeError, "hidden has dtype torch.int32"),
        ({"targets": torch.zeros(2).long()}, ValueError, r"targets has shape \(2,\): expected \(3,\), as hidden"),
        ({"targets": torch.zeros(3)}, TypeError, "targets has dtype torch.float32: expected int64"),
        ({"targets": torch.tensor([0, 5, 1])}, ValueError, r"targets\[1\]=5: expected an id in \[0, 5\)"),
        ({"targets": torch.tensor([0, 1, -100])}, ValueError, r"targets\[2\]=-100"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\): expected \(5,\)"),
        ({"bias": torch.zeros(5).long()}, TypeError, "bias: expected a tensor of floats"),
        ({"positions": torch.tensor([0, 3, 1])}, ValueError, r"positions\[1\]=3: expected an id in \[0, 3\)"),
        ({"positions": torch.tensor([0])}, ValueError, r"targets has shape \(3,\): expected \(1,\), as positions"),
        ({"positions": torch.tensor([[0, 1, 2]])}, ValueError, r"positions has shape \(1, 3\): expected \[M\]"),
        ({"temperature": 0.0}, ValueError, r"temperature=0\.0: expected a finite number > 0"),
        ({"temperature": float("nan")}, ValueError, "temperature=nan"),
    ],
)
def test_mistakes_are_named(change, error, message) -> None:
    arguments = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "targets": torch.tensor([0, 1, 2])}
    with pytest.raises(error, match=message):
        linear_logprob(**{**arguments, **change})


def test_float64_is_for_the_reference() -> None:
    given = {k: v.double() for k, v in make(17).items() if k in ("hidden", "weight")}
    targets = torch.zeros(33, dtype=torch.int64)
    with pytest.raises(BackendUnavailable, match="float64"):
        linear_logprob(**given, targets=targets, backend="native")
    assert linear_logprob(**given, targets=targets).dtype == torch.float64
