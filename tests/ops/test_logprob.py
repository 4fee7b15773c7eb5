"""Log-probabilities from logits against float64, with the gradient beside them or in their place."""

from __future__ import annotations

import pytest
import torch

from turnwise.ops import logprob

from .heads import IGNORE, TOLERANCE, assert_close, make, run


def test_a_worked_example(target) -> None:
    """Logits 0 and 2 with cap 1: 0 and tanh(2) = 0.9640276; the temperature 0.5 doubles the difference afterwards."""
    logits, targets = target.on((torch.tensor([[0.0, 2.0], [torch.nan, torch.nan]]), torch.tensor([1, IGNORE])))
    options = {"softcap": 1.0, "temperature": 0.5, "ignore_index": IGNORE, "backend": target.backend}
    found = logprob(logits, targets, **options).tolist()
    assert found == pytest.approx([-0.13578, 0.0], abs=1e-5)  # -log(1 + exp(-2 * 0.9640276))


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------
# 1, 31, 33: less than a vector, and a tail; 2048 and 2049: a piece, and one more; 4100: a block's whole step on a GPU
# and a tail; 6152: a whole step, some short ones and a tail; 8193: odd rows, whose addresses are no multiples of 16.
SHAPES = [(1, 1), (3, 31), (2, 3, 33), (3, 2048), (6, 2049), (2, 4100), (1, 6152), (1, 2, 8193)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("options", [{}, {"ignore_index": IGNORE}, {"softcap": 5.0, "ignore_index": IGNORE}], ids=str)
def test_equals_float64(target, shape, dtype, entropy, options) -> None:
    given = make(sum(shape), *shape, dtype=dtype, ignored=0.3 if options else 0.0)
    options = {**options, "entropy": entropy, "temperature": 0.7}
    got = run(given, target, linear=False, **options)
    assert got["logprob"].shape == shape[:-1] and got["logprob"].dtype == torch.float32
    assert got["logits"].dtype == dtype
    assert_close(got, run(given, linear=False, **options), TOLERANCE[dtype], target)
    assert all((value[given["targets"] == IGNORE] == 0).all() for value in got.values())


@pytest.mark.parametrize("cap", [1e-3, 1.0, 1e4])
def test_caps_of_any_size(target, cap) -> None:
    """Logits from far below the cap to far above it; a cap of 1e4 changes logits of 8 by 2e-6 of themselves."""
    given = make(3, 20, 90)
    assert_close(run(given, target, linear=False, softcap=cap), run(given, linear=False, softcap=cap), 3e-6)


@pytest.mark.parametrize("seed", range(4))
def test_logits_far_from_zero(target, seed) -> None:
    given = make(seed, 5, 700)
    given["logits"] = given["logits"] * 30 + 1000
    got, want = run(given, target, linear=False), run(given, linear=False)
    # lse is kept as float32, whose steps at 1,000 are 6e-5.
    torch.testing.assert_close(got.pop("logits").double(), want.pop("logits"), rtol=2e-4, atol=2e-4)
    assert_close(got, want, 2e-6)


def test_banned_tokens(target) -> None:
    given = make(3, 4, 90)
    given["logits"][:, ::2] = -torch.inf
    given["targets"] |= 1
    got = run(given, target, linear=False)
    kept = {**given, "logits": given["logits"][:, 1::2].contiguous(), "targets": given["targets"] // 2}
    assert (got["logits"][:, ::2] == 0).all()
    assert_close({**got, "logits": got["logits"][:, 1::2]}, run(kept, linear=False), 2e-6)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_and_infinity_reach_the_result(target, wrong) -> None:
    given = make(4, 4, 90)
    given["logits"][2, 7] = wrong
    got = run(given, target, linear=False)
    assert got["logprob"].isnan().nonzero().tolist() == [[2]]
    assert got["logits"].isnan().any(1).nonzero().tolist() == [[2]]


def test_capped_logits_that_are_infinite_or_nan(target) -> None:
    logits = torch.zeros(3, 40)
    logits[0, 1], logits[1, 2], logits[2, 3] = torch.inf, -torch.inf, torch.nan
    values = logprob(*target.on((logits, torch.tensor([5, 6, 7]))), softcap=2.0, backend=target.backend).cpu()
    others = 39 + torch.tensor([2.0, -2.0]).exp()
    assert values[:2].tolist() == pytest.approx((-others.log()).tolist(), abs=1e-5)
    assert values[2].isnan()


def test_a_token_without_weight_has_no_gradient_whatever_its_logits(kernel) -> None:
    given = make(5, 4, 90)
    given["logits"][2] = torch.nan
    given["grad_logprob"][2] = 0
    grad = run(given, kernel, linear=False, entropy=False)["logits"]
    assert (grad[2] == 0).all() and not grad.isnan().any()


# ---------------------------------------------------------------------------------------------------------------------
# In place
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_gradient_takes_the_logits_memory(target, dtype, softcap) -> None:
    given = make(7, 9, 300, dtype=dtype)
    want = run(given, target, linear=False, softcap=softcap)
    leaf = target.on(given["logits"]).clone().requires_grad_()
    logits = leaf * 1.0
    options = {"entropy": True, "inplace_backward": True, "softcap": softcap, "backend": target.backend}
    out = logprob(logits, target.on(given["targets"]), **options)
    found: list[int] = []
    logits.register_hook(lambda grad: found.append(grad.data_ptr()))
    upstream = target.on([given["grad_logprob"], given["grad_entropy"]])
    torch.autograd.backward(out, upstream, retain_graph=True)
    assert torch.equal(leaf.grad.cpu(), want["logits"])
    if target.backend == "native":
        assert found == [logits.data_ptr()]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(out, upstream)
