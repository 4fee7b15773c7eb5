"""The LM head by tiles against all logits at once in float64, and what a caller may count on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import linear_logprob
from turnwise.ops.common import dispatch as backends
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


# ---------------------------------------------------------------------------------------------------------------------
# torch
# ---------------------------------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------------------
