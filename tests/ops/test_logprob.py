"""Log-probabilities from logits against float64, with the gradient beside them or in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import logprob
from turnwise.ops.common import dispatch as backends

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NATIVE = pytest.mark.skipif(backends.interpreted, reason="native backends, in their own process")


def make(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": (4 * torch.randn(*shape, generator=generator)).to(dtype),
        "targets": torch.randint(shape[-1], shape[:-1], generator=generator),
        "grad_logprob": torch.randn(shape[:-1], generator=generator),
        "grad_entropy": torch.randn(shape[:-1], generator=generator),
    }


def run(given: dict[str, Tensor], target: Any = None, entropy: bool = True, **options: Any) -> dict[str, Tensor]:
    """Values and gradient; without a target in float64."""
    device = "cpu" if target is None else target.device
    moved = {k: v.to(device) for k, v in given.items()}
    # The leaf's memory is laid out like the logits', and what the op gets is no leaf.
    leaf = torch.empty_like(moved["logits"], dtype=torch.float64 if target is None else None)
    leaf = leaf.copy_(moved["logits"]).requires_grad_()
    logits = leaf.view_as(leaf)
    backend = "torch" if target is None else target.backend
    out = logprob(logits, moved["targets"], entropy=entropy, backend=backend, **options)
    values, entropies = out if entropy else (out, None)
    loss = (values * moved["grad_logprob"]).sum()
    if entropies is not None:
        loss = loss + (entropies * moved["grad_entropy"]).sum()
    loss.backward()
    return {"logprob": values, "grad": leaf.grad} | ({"entropy": entropies} if entropies is not None else {})


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, expected in want.items():
        largest = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(
            got[name].detach().cpu().double(),
            expected.double(),
            rtol=tolerance,
            atol=tolerance * max(largest, 0.1),
            msg=lambda m, n=name: f"{n}: {m}",
        )


# 1, 31, 33: less than a vector, and a tail; 2048 and 2049: a piece, and one more; 4100: a block's whole step on a GPU
# and a tail; 6152: a whole step, some short ones and a tail; 8193: odd rows, whose addresses are no multiples of 16.
SHAPES = [(1, 1), (3, 31), (2, 3, 33), (3, 2048), (3, 2049), (2, 4100), (1, 6152), (1, 2, 8193)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_equals_float64(target, shape, dtype, entropy) -> None:
    given = make(sum(shape), shape, dtype)
    got = run(given, target, entropy, temperature=0.7)
    assert got["logprob"].shape == shape[:-1]
    assert got["logprob"].dtype == torch.float32
    assert got["grad"].dtype == dtype
    assert_close(got, run(given, None, entropy, temperature=0.7), TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(10))
def test_logits_far_from_zero(target, seed) -> None:
    given = make(seed, (5, 700))
    given["logits"] = given["logits"] * 30 + 1000
    want = run(given)
    got = run(given, target)
    assert_close(
        {"logprob": got["logprob"], "entropy": got["entropy"]}, {k: want[k] for k in ("logprob", "entropy")}, 2e-6
    )
    # lse is kept as float32, whose steps at 1,000 are 6e-5.
    torch.testing.assert_close(got["grad"].cpu().double(), want["grad"], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("inplace", [False, True])
def test_sequences_that_lie_apart(target, inplace) -> None:
    given = make(1, (3, 6, 40))
    whole = given["logits"].detach().to(target.device, copy=True).requires_grad_()
    logits = (whole * 1.0)[:, :-1]
    targets = given["targets"][:, 1:].to(target.device)
    values = logprob(logits, targets, inplace_backward=inplace, backend=target.backend)
    values.backward(given["grad_logprob"][:, 1:].to(target.device))
    cut = {**given, "logits": given["logits"][:, :-1].contiguous()}
    cut |= {k: given[k][:, 1:] for k in ("targets", "grad_logprob", "grad_entropy")}
    want = run(cut, None, entropy=False)
    torch.testing.assert_close(whole.grad[:, :-1].cpu().double(), want["grad"], rtol=2e-6, atol=2e-6)
    assert (whole.grad[:, -1] == 0).all()
    torch.testing.assert_close(values.detach().cpu().double(), want["logprob"].detach(), rtol=2e-6, atol=2e-6)


def test_banned_tokens(target) -> None:
    given = make(3, (4, 90))
    given["logits"][:, ::2] = -torch.inf
    given["targets"] |= 1
    got = run(given, target)
    kept = {**given, "logits": given["logits"][:, 1::2].contiguous(), "targets": given["targets"] // 2}
    want = run(kept)
    assert (got["grad"][:, ::2] == 0).all()
    assert_close({**got, "grad": got["grad"][:, 1::2]}, want, 2e-6)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_and_infinity_reach_the_result(target, wrong) -> None:
    given = make(4, (4, 90))
    given["logits"][2, 7] = wrong
    got = run(given, target)
    assert got["logprob"].isnan().nonzero().tolist() == [[2]]
    assert got["grad"].isnan().any(1).nonzero().tolist() == [[2]]


@NATIVE
def test_a_token_without_weight_has_no_gradient_whatever_its_logits(target) -> None:
    if target.backend == "torch":
        pytest.skip("torch multiplies by 0")
    given = make(5, (4, 90))
    given["logits"][2] = torch.nan
    given["grad_logprob"][2] = 0
    got = run(given, target, entropy=False)
    assert (got["grad"][2] == 0).all()
    assert not got["grad"].isnan().any()


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (3, 0, 5)], ids=str)
def test_no_tokens(target, shape) -> None:
    got = run(make(6, shape), target)
    assert got["logprob"].shape == shape[:-1]
    assert got["grad"].shape == shape


# ---------------------------------------------------------------------------------------------------------------------
# In place
# ---------------------------------------------------------------------------------------------------------------------
@NATIVE
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_gradient_takes_the_logits_memory(target, dtype) -> None:
    given = make(7, (9, 300), dtype)
    want = run(given, target)
    leaf = given["logits"].to(target.device, copy=True).requires_grad_()
    logits = leaf * 1.0
    out = logprob(
        logits, given["targets"].to(target.device), entropy=True, inplace_backward=True, backend=target.backend
    )
    found = []
    logits.register_hook(lambda grad: found.append(grad.data_ptr()))
    upstream = [given[k].to(target.device) for k in ("grad_logprob", "grad_entropy")]
    torch.autograd.backward(out, upstream, retain_graph=True)
    assert torch.equal(leaf.grad, want["grad"])
    if target.backend == "native":
        assert found == [logits.data_ptr()]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(out, upstream)


# ---------------------------------------------------------------------------------------------------------------------
# Invariances, torch
# ---------------------------------------------------------------------------------------------------------------------
