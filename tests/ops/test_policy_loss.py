"""The compiled policy loss against the float64 reference, and what a caller may count on."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise import _C
from turnwise.ops import AGGREGATIONS, GMPO, KL, Clip, ImportanceCorrection, PolicyLoss, loss_normalizer, policy_loss
from turnwise.ops.common import dispatch as backends
from turnwise.ops.loss.options import KL_ESTIMATORS

FULL = {"kl": KL("k3", 0.1), "clip": Clip(0.2, 0.28, dual_clip=3.0), "correction": ImportanceCorrection("token", 1.5)}


def run(arguments, target=None, **changes):
    """``(PolicyLoss, gradient)`` with a loss scale of 2, so that a gradient that ignores it shows."""
    arguments = {**arguments, **changes}
    if target:
        arguments["backend"] = target.backend
        arguments = {k: v.to(target.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    logprobs = arguments.pop("logprobs").clone(memory_format=torch.preserve_format).requires_grad_()
    result = policy_loss(logprobs, **arguments)
    (result.loss * 2).backward()
    on_cpu = PolicyLoss(result.loss.cpu(), *({k: v.cpu() for k, v in m.items()} for m in result[1:]))
    return on_cpu, logprobs.grad.cpu() / 2


def assert_same(got, want, rtol: float, atol: float) -> None:
    (result, grad), (reference, reference_grad) = got, want
    torch.testing.assert_close(result.loss.double(), reference.loss.double(), rtol=rtol, atol=atol)
    largest = grad.abs().max().item() if grad.numel() else 0.0
    torch.testing.assert_close(grad.double(), reference_grad.double(), rtol=rtol, atol=atol * largest)
    assert list(result.metrics) == list(reference.metrics)
    for name in reference.metrics:
        for mine, theirs in (
            (result.metrics[name], reference.metrics[name]),
            (result.actor_metrics.get(name), reference.actor_metrics.get(name)),
        ):
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=max(rtol, 1e-5), atol=max(atol, 1e-6), msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------
# 1 and 37: less than a vector, and a tail; 64: whole vectors; 1030: beyond a tile; 50000: beyond a piece of 16384.
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (9, 37), (3, 64), (3, 1030), (3, 50000)])
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_float32_equals_float64(make_batch, rows, width, form, aggregation, kernel) -> None:
    if width > 2000 and kernel.device == "cpu" and (kernel.emulated or kernel.backend == "triton"):
        pytest.skip("slow without a GPU")
    batch = make_batch(rows * width, rows, width, **FULL)
    arguments = getattr(batch, form)(torch.float32, aggregation=aggregation)
    exact = {
        k: v.double() if isinstance(v, torch.Tensor) and v.dtype == torch.float32 else v for k, v in arguments.items()
    }
    assert_same(run(arguments, target=kernel), run(exact, backend="torch"), rtol=2e-6, atol=1e-6)


# Rows cut into tiles, the last one whole or not; many rows in a tile, and more than a search looks at in one go.
@pytest.mark.parametrize(("rows", "width"), [(2, 512), (2, 1040), (3, 700), (130, 5), (330, 2)])
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("variant", [Clip(0.2, 0.28, dual_clip=3.0), GMPO(0.2, 0.3)], ids=str)
def test_any_layout(make_batch, rows, width, form, variant, kernel) -> None:
    batch = make_batch(rows + width, rows, width, variant=variant, correction=ImportanceCorrection("sequence", 1.5))
    arguments = getattr(batch, form)(torch.float32, aggregation="agent-mean")
    want = run(getattr(batch, form)(aggregation="agent-mean"), backend="torch")
    assert_same(run(arguments, target=kernel), want, rtol=1e-5, atol=2e-6)
    del arguments["actor_ids"], arguments["num_actors"]
    arguments["aggregation"] = "seq-mean-token-mean"
    exact = {
        k: v.double() if isinstance(v, torch.Tensor) and v.dtype == torch.float32 else v for k, v in arguments.items()
    }
    assert_same(run(arguments, target=kernel), run(exact, backend="torch"), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
@pytest.mark.parametrize("level", ["token", "sequence", None])
@pytest.mark.parametrize("per_token", [False, True])
def test_every_option(make_batch, kind, level, per_token, kernel) -> None:
    correction = ImportanceCorrection(level, 1.5) if level else None
    batch = make_batch(
        5, 9, 70, kl=KL(kind, 0.3), correction=correction, clip=Clip(0.1, 0.3, dual_clip=1.5), per_token=per_token
    )
    for form in ("padded", "packed"):
        arguments = getattr(batch, form)(torch.float32)
        want = run(getattr(batch, form)(), backend="torch")
        assert_same(run(arguments, target=kernel), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize(
    "options", [{}, {"correction": ImportanceCorrection("token", 1.5), "per_token": True}], ids=str
)
def test_importance_weighted_kl(make_batch, kind, options, kernel) -> None:
    """Tokens, rows and a ratio far beyond its clamp; the metric is the estimate without its weight."""
    batch = make_batch(
        5, 7, 70, kl=KL(kind, 0.3, importance_weighted=True), clip=Clip(0.1, 0.3, dual_clip=1.5), **options
    )
    batch.old[0, 0] = batch.logprobs[0, 0] + 30
    batch.old[2, 0] = batch.logprobs[2, 0] - 21
    batch.mask[0, 0] = batch.mask[2, 0] = True
    loss, metrics = batch.expected("token-mean")
    plain = run(batch.padded(kl=KL(kind, 0.3)), backend="torch")[0]
    for form in ("padded", "packed"):
        want = run(getattr(batch, form)(), backend="torch")
        assert want[0].loss.item() == pytest.approx(loss, rel=1e-12)
        assert want[0].metrics["kl"].item() == pytest.approx(metrics["kl"], rel=1e-6)
        assert torch.equal(want[0].metrics["kl"], plain.metrics["kl"]) and want[0].loss != plain.loss
        assert_same(run(getattr(batch, form)(torch.float32), target=kernel), want, rtol=1e-5, atol=2e-6)


def test_importance_weighted_kl_by_hand(target) -> None:
    """Ratio 2, reference half as likely: ``2 * (1/2 + ln 2 - 1)``, and by the log-probability
    ``2 * (1/2 + ln 2 - 1) + 2 * (1 - 1/2)``. On-policy the value is plain k3's, the gradient k1's."""
    lp = torch.tensor([[0.5, 0.25]]).log()
    for old, loss, grad in (
        (lp - math.log(2), 2 * math.log(2) - 1, 2 * math.log(2)),
        (lp, math.log(2) - 0.5, math.log(2)),
    ):
        arguments = {
            "logprobs": lp,
            "old_logprobs": old,
            "advantages": torch.zeros(1),
            "ref_logprobs": lp - math.log(2),
        }
        result, got = run(arguments, target=target, kl=KL("k3", 1.0, importance_weighted=True))
        assert result.loss.item() == pytest.approx(loss, rel=1e-6)
        assert got.tolist() == [pytest.approx([grad / 2, grad / 2], rel=1e-6)]
        assert result.metrics["kl"].item() == pytest.approx(math.log(2) - 0.5, rel=1e-6)


def test_a_reference_without_a_kl_term_is_a_metric_alone(target) -> None:
    """k3 of a reference half as likely: ``1/2 + ln 2 - 1``."""
    lp = torch.tensor([[0.5, 0.25]]).log()
    arguments = {"logprobs": lp, "old_logprobs": lp, "advantages": torch.ones(1)}
    plain, grad = run(arguments, target=target)
    got, got_grad = run(arguments, target=target, ref_logprobs=lp - math.log(2))
    assert "kl" not in plain.metrics
    assert got.metrics["kl"].item() == pytest.approx(math.log(2) - 0.5, rel=1e-6)
    assert torch.equal(got.loss, plain.loss) and torch.equal(got_grad, grad)


def test_importance_weighted_kl_without_bias() -> None:
    """Summed over all tokens with the old policy's probabilities, weighted estimates and their gradients are the KL's
    own, whatever the old policy was; without the weight they are not."""
    new, old, ref = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    exact_leaf = new.clone().requires_grad_()
    lp = exact_leaf.log_softmax(-1)
    exact = (lp.exp() * (lp - ref)).sum()
    exact.backward()
    for weighted in (True, False):
        leaf = new.clone().requires_grad_()
        for kind in ("k1", "k3"):
            leaf.grad = None
            lp = leaf.log_softmax(-1)
            loss = sum(
                old[token].exp()
                * policy_loss(
                    lp[None, token : token + 1],
                    old[None, token : token + 1],
                    torch.zeros(1),
                    kl=KL(kind, 1.0, importance_weighted=weighted),
                    ref_logprobs=ref[None, token : token + 1],
                ).loss
                for token in range(6)
            )
            loss.backward()
            assert (loss.item() == pytest.approx(exact.item(), rel=1e-9)) is weighted
            assert torch.allclose(leaf.grad, exact_leaf.grad, rtol=1e-9) is weighted


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_narrow_floats(make_batch, dtype, tolerance, target) -> None:
    arguments = make_batch(8, 6, 1100, **FULL).padded(dtype)
    exact = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()
    }
    got, want = run(arguments, target=target), run(exact, backend="torch")
    assert got[1].dtype == dtype
    assert_same(got, want, rtol=tolerance, atol=tolerance / 10)


def test_the_clamps_at_their_bounds(target) -> None:
    old = torch.zeros(1, 8)
    logprobs = torch.tensor([[0.0, 19.9, 20.1, 90.0, -19.9, -20.1, -90.0, 1.0]])
    for advantage in (1.0, -1.0, 0.0):
        for kind in KL_ESTIMATORS:
            arguments = {"logprobs": logprobs, "old_logprobs": old, "ref_logprobs": -logprobs, "kl": KL(kind, 0.1)}
            arguments["advantages"] = torch.tensor([advantage])
            exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
            assert_same(run(arguments, target=target), run(exact, backend="torch"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bound", [80.0, 1.0, 1e-3])
def test_exp_is_right_to_two_ulp(bound) -> None:
    values = torch.linspace(-bound, bound, 100_003)
    got = torch.empty_like(values)
    _C.exp(values, got)
    exact = values.double().exp()
    ulp = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    assert ((got.double() - exact).abs() / ulp).max() <= 2


@pytest.mark.parametrize("bound", [20.0, 1.0, 1e-3])
def test_the_ratio_is_right_to_two_ulp(bound) -> None:
    """Seen as the gradient of tokens that nothing clips, in a loss that is their sum."""
    log_ratios = torch.linspace(0, bound, 100_003) * torch.tensor([[1.0], [-1.0]])
    logprobs = log_ratios.clone().requires_grad_()
    advantages, whole_sum = torch.tensor([-1.0, 1.0]), {"aggregation": "seq-mean-token-sum-norm", "max_length": 1}
    policy_loss(logprobs, torch.zeros(2, 100_003), advantages, **whole_sum).loss.backward()
    exact = log_ratios.double().exp()
    ulp = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    assert ((logprobs.grad.double() + advantages[:, None] * exact).abs() / ulp).max() <= 2


# ---------------------------------------------------------------------------------------------------------------------
# Invariances
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("sizes", [[1] * 9, [4, 5], [2, 0, 6, 1]], ids=str)
def test_any_split_into_micro_batches_gives_the_same_gradient(make_batch, form, aggregation, sizes, target) -> None:
    if len(sizes) > 4 and target.backend == "triton" and target.device == "cpu":
        pytest.skip("slow in the interpreter")
    batch = make_batch(21, **FULL)
    dtype = torch.float64 if target.backend == "torch" else torch.float32
    whole = getattr(batch, form)(dtype, aggregation=aggregation)
    shared = {k: whole.get(k) for k in ("mask", "cu_seqlens", "actor_ids", "num_actors", "max_length")}
    normalizer = loss_normalizer(aggregation, **shared)
    loss, grad = run(whole, target)
    parts, total = [], 0.0
    for last, size in zip(np.cumsum(sizes), sizes, strict=True):
        rows = slice(last - size, last)
        part = {**whole, "actor_ids": whole["actor_ids"][rows], "advantages": whole["advantages"][rows]}
        cut = rows
        if form == "packed":
            cu = whole["cu_seqlens"][rows.start : rows.stop + 1]
            part["cu_seqlens"], cut = cu - cu[0], slice(int(cu[0]), int(cu[-1]))
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "mask"):
            part[name] = whole[name][cut]
        result, part_grad = run(part, target, normalizer=normalizer)
        total += result.loss.item()
        parts.append(part_grad)
    torch.testing.assert_close(torch.cat(parts), grad, rtol=1e-6, atol=0)
    assert total == pytest.approx(loss.loss.item(), rel=1e-5, abs=1e-7)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_any_dtype(make_batch, dtype, target) -> None:
    arguments = make_batch(6, **FULL).padded(torch.float32)
    want, grad = run(arguments, target=target)
    arguments["mask"] = arguments["mask"].to(dtype)
    for normalizer in (None, want.metrics["tokens"]):
        got, got_grad = run(arguments, target=target, normalizer=normalizer)
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got_grad, grad)


@pytest.mark.parametrize("aggregation", ["agent-mean", "token-mean"])
def test_actors_of_either_integer(make_batch, aggregation, target) -> None:
    arguments = make_batch(6, **FULL).padded(torch.float32, aggregation=aggregation)
    assert arguments["actor_ids"].dtype == torch.int64
    want, grad = run(arguments, target=target)
    got, got_grad = run(arguments, target=target, actor_ids=arguments["actor_ids"].int())
    assert torch.equal(got.loss, want.loss) and torch.equal(got_grad, grad)
    assert all(torch.equal(got.actor_metrics[name], value) for name, value in want.actor_metrics.items())


def test_advantages_per_sequence_are_those_per_token(make_batch, target) -> None:
    arguments = make_batch(10).padded(torch.float32)
    want, grad = run(arguments, target=target)
    for advantages in (arguments["advantages"][:, None], arguments["advantages"][:, None].expand(-1, 37)):
        got, got_grad = run(arguments, advantages=advantages, target=target)
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got_grad, grad)


# ---------------------------------------------------------------------------------------------------------------------
# Odd input
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 4)])
def test_no_tokens_cost_nothing(aggregation, shape, target) -> None:
    values = torch.full(shape, math.nan)
    actors = torch.zeros(shape[0], dtype=torch.int64)
    arguments = {
        "logprobs": values,
        "old_logprobs": values,
        "advantages": torch.zeros(shape[0]),
        "aggregation": aggregation,
    }
    result, grad = run(
        arguments,
        mask=torch.zeros(shape),
        actor_ids=actors,
        num_actors=2,
        max_length=4,
        target=target,
        ref_logprobs=values,
        rollout_logprobs=values,
    )
    assert result.loss.item() == 0
    assert torch.equal(grad, torch.zeros(shape))
    assert [m.item() for m in result.metrics.values()] == [0.0] * len(result.metrics)
    empty = torch.zeros(0)
    packed, _ = run(
        {"logprobs": empty, "old_logprobs": empty, "advantages": empty, "cu_seqlens": torch.tensor([0])},
        target=target,
    )
    assert packed.loss.item() == 0


def test_masked_tokens_may_hold_anything_and_others_must_not_hide_nan(make_batch, target) -> None:
    batch = make_batch(12, **FULL)
    want, grad = run(batch.padded(torch.float32), target=target)
    arguments = batch.padded(torch.float32)
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"):
        arguments[name] = arguments[name].masked_fill(~batch.mask, math.nan)
    got, got_grad = run(arguments, target=target)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got_grad, grad)
    row, token = batch.mask.nonzero()[0].tolist()
    arguments["logprobs"][row, token] = math.nan
    broken, broken_grad = run(arguments, target=target)
    assert broken.loss.isnan()
    assert broken.metrics["ratio_max"].isnan()
    if target.backend == "native":  # torch's clamp has gradient 0 at NaN
        assert broken_grad[row, token].isnan()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"])
def test_nan_of_any_stream_reaches_the_loss(make_batch, level, name, target) -> None:
    batch = make_batch(12, kl=KL("k3", 0.1), correction=ImportanceCorrection(level, 1.5))
    arguments = batch.padded(torch.float32)
    row, token = batch.mask.nonzero()[0].tolist()
    arguments[name][row, token] = math.nan
    assert run(arguments, target=target)[0].loss.isnan()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logprobs": torch.zeros(6)}, ValueError, r"logprobs has shape \(6,\): expected \[B, T\]"),
        ({"logprobs": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "logprobs has dtype torch.int64"),
        ({"old_logprobs": torch.zeros(2, 4)}, ValueError, r"old_logprobs has shape \(2, 4\): expected \(2, 3\)"),
        ({"old_logprobs": torch.zeros(2, 3).int()}, TypeError, "old_logprobs has dtype torch.int32"),
        ({"advantages": torch.zeros(3)}, ValueError, r"advantages has shape \(3,\)"),
        ({"mask": torch.ones(2)}, ValueError, r"mask has shape \(2,\)"),
        ({"mask": torch.full((2, 3), 0.5)}, ValueError, r"mask\[0, 0\]=0\.5: expected 0 or 1"),
        ({"kl": KL()}, ValueError, "ref_logprobs=None"),
        ({"kl": KL(), "ref_logprobs": torch.zeros(2)}, ValueError, r"ref_logprobs has shape"),
        ({"ref_logprobs": torch.tensor(-1.0)}, ValueError, r"ref_logprobs has shape \(\)"),
        ({"old_logprobs": None}, TypeError, "old_logprobs: expected a tensor, got NoneType"),
        ({"mask": [[1, 1, 1], [1, 1, 0]]}, TypeError, "mask: expected a tensor, got list"),
        ({"correction": ImportanceCorrection()}, ValueError, "rollout_logprobs=None"),
        ({"aggregation": "mean"}, ValueError, "aggregation='mean': expected one of token-mean"),
        ({"aggregation": "agent-mean"}, ValueError, "actor_ids=None"),
        ({"aggregation": "seq-mean-token-sum-norm"}, ValueError, "max_length=None"),
        ({"actor_ids": torch.zeros(2, dtype=torch.int64)}, ValueError, "num_actors=None"),
        ({"actor_ids": torch.tensor([0, 2]), "num_actors": 2}, ValueError, r"actor_ids\[1\]=2: expected an id"),
        ({"actor_ids": torch.tensor([0]), "num_actors": 2}, ValueError, r"actor_ids has shape \(1,\)"),
        ({"normalizer": torch.tensor(-1.0)}, ValueError, r"normalizer.*expected counts >= 0"),
        ({"normalizer": torch.tensor(float("nan"))}, ValueError, r"normalizer.*expected counts >= 0"),
        ({"normalizer": torch.ones(2)}, ValueError, r"normalizer has shape \(2,\): expected \(\)"),
        ({"logprobs": torch.zeros(6), "cu_seqlens": torch.tensor([0, 4, 3, 6])}, ValueError, r"cu_seqlens\[2\]=3"),
        ({"logprobs": torch.zeros(6), "cu_seqlens": torch.tensor([1, 6])}, ValueError, r"cu_seqlens\[0\]=1"),
        ({"logprobs": torch.zeros(6), "cu_seqlens": torch.tensor([0, 5])}, ValueError, r"cu_seqlens\[-1\]=5"),
        ({"logprobs": torch.zeros(6), "cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens has dtype"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"expected \[N\], as cu_seqlens is given"),
    ],
)
def test_mistakes_are_named(change, error, message, target) -> None:
    arguments = {"logprobs": torch.zeros(2, 3), **change}
    logprobs = arguments.pop("logprobs")
    rows = 2 if "cu_seqlens" not in change else len(change["cu_seqlens"]) - 1
    defaults = {"old_logprobs": torch.zeros(logprobs.shape), "advantages": torch.zeros(rows)}
    with pytest.raises(error, match=message):
        policy_loss(logprobs, **{**defaults, **arguments}, backend=target.backend, check=True)


# ---------------------------------------------------------------------------------------------------------------------
# Autograd, torch.library, threads
# ---------------------------------------------------------------------------------------------------------------------
def test_a_second_derivative_raises(make_batch) -> None:
    arguments = make_batch(1).padded(torch.float32)
    logprobs = arguments.pop("logprobs").requires_grad_()
    (grad,) = torch.autograd.grad(policy_loss(logprobs, **arguments).loss, logprobs, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use backend='torch'"):
        grad.sum().backward()
    streams = (logprobs, *(arguments[k] for k in ("old_logprobs", "advantages", "mask")), *[None] * 7)
    loss, *_ = torch.ops.turnwise.policy_loss(*streams, (0.8, 1.2, 3.0, 0.0, 0.0, 0.0, 9.0, 0.0), (0, 0, 0, 0, 0, 0))
    (grad,) = torch.autograd.grad(loss, logprobs, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use backend='torch'"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(policy_loss(logprobs, **arguments, backend="torch").loss, logprobs, create_graph=True)
    grad.sum().backward()


def test_backward_twice_through_one_graph(make_batch, target) -> None:
    arguments = {
        k: v.to(target.device) if isinstance(v, torch.Tensor) else v
        for k, v in make_batch(1).padded(torch.float32, backend=target.backend).items()
    }
    logprobs = arguments.pop("logprobs").requires_grad_()
    result = policy_loss(logprobs, **arguments)
    result.loss.backward(retain_graph=True)
    first = logprobs.grad.clone()
    (result.loss * 3).backward(retain_graph=True)
    torch.testing.assert_close(logprobs.grad, 4 * first)
    logprobs.grad = None
    result.loss.backward()
    assert torch.equal(logprobs.grad, first)


def test_the_loss_may_be_changed_in_place(make_batch, target) -> None:
    arguments = to(target, make_batch(1).padded(torch.float32, backend=target.backend))
    logprobs = arguments.pop("logprobs").requires_grad_()
    policy_loss(logprobs, **arguments).loss.backward()
    once = logprobs.grad.clone()
    loss = policy_loss(logprobs, **arguments).loss
    loss += 1
    loss *= 3
    loss.backward()
    torch.testing.assert_close(logprobs.grad, 4 * once)


def test_without_grad_mode_there_is_no_graph(make_batch) -> None:
    arguments = make_batch(1).padded(torch.float32)
    arguments["logprobs"].requires_grad_()
    with torch.no_grad():
        assert not policy_loss(**arguments).loss.requires_grad
    assert not any(m.requires_grad for m in policy_loss(**arguments).metrics.values())


def to(target, arguments):
    return {k: v.to(target.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def test_opcheck(make_batch, target) -> None:
    a = to(target, make_batch(14, **FULL).padded(torch.float32))
    streams = (a["logprobs"].requires_grad_(), a["old_logprobs"], a["advantages"], a["mask"], None)
    rest = (a["ref_logprobs"], a["rollout_logprobs"], a["actor_ids"], a["ref_logprobs"], None, None)
    options = ((0.8, 1.28, 3.0, 0.1, 1.5, 0.2, 9.0, 0.0), (0, 4, 1, 0, 3, 1))
    ops = torch.ops.turnwise
    op = ops.policy_loss_triton if target.backend == "triton" else ops.policy_loss
    torch.library.opcheck(op.default, (*streams, *rest, *options))
    scale = (torch.randn(3, 4), torch.tensor(2.0), torch.randn(3, 4))
    torch.library.opcheck(ops.policy_loss_backward.default, scale)


def test_works_in_a_forked_child() -> None:
    code = (
        "import os, torch; torch.set_num_threads(2); from turnwise import ops\n"
        "x = torch.randn(64, 2048); call = lambda: ops.policy_loss(x, x, torch.ones(64)).loss.item()\n"
        "want = call(); child = os.fork()\n"
        "if child == 0: os._exit(0 if call() == want else 1)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "0", result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernels have threads of their own")
def test_shares_the_threads_of_torch() -> None:
    """Threads of our own would compete with torch's, which go on spinning."""
    code = (
        "import os, torch; torch.set_num_threads(3); from turnwise import ops\n"
        "x = torch.randn(512, 2048); threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "x.exp_(); before = threads(); ops.policy_loss(x, x, torch.ones(512)); print(threads() - before)\n"
        "x.exp_(); print(threads() - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == ["0", "0"], result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_other_instruction_sets(isa) -> None:
    """A part of this suite in a process whose kernels are those of an older processor."""
    here = Path(__file__)
    files = [str(here.with_name(f"test_{name}.py")) for name in ("policy_loss", "policy_loss_variants", "invariances")]
    chosen = "(float32_equals_float64 or every_option or threads or two_ulp or past) and not emulated and not torch"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *files],
        env={**os.environ, "TURNWISE_ISA": isa},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]


@pytest.mark.skipif(backends.interpreted, reason="the kernels of CUDA")
@pytest.mark.parametrize("width", [3, 512, 700, 2600])
def test_a_gpu_counts_masks_of_bytes_and_floats_alike(make_batch, emulator, monkeypatch, width) -> None:
    """Rows shorter and longer than what a warp counts at once, cut anywhere; -0 hides a token as 0 does."""
    monkeypatch.setattr(backends, "emulator", emulator)
    batch = make_batch(width, 3, width)
    arguments = batch.padded(torch.float32, aggregation="seq-mean-token-mean")
    want = run(arguments, backend="native")
    floats = torch.where(arguments["mask"], 1.0, -0.0)
    got = run({**arguments, "mask": floats}, backend="native")
    assert want[0].metrics["tokens"] == arguments["mask"].sum()
    assert torch.equal(got[0].loss, want[0].loss) and torch.equal(got[1], want[1])
