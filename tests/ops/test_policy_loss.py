"""The policy loss on its kernels against the float64 reference, worked numbers, and what a caller may count on.

`test_policy_loss_reference.py` holds the reference to its definition, `test_contracts.py` the kernels to any layout.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from turnwise import _C, ops
from turnwise.ops.loss.arguments import Metrics
from turnwise.ops.loss.options import KL_ESTIMATORS

CORRECTION = ops.ImportanceCorrection("token", 1.5)
FULL = {"kl": ops.KL("k3", 0.1), "clip": ops.Clip(0.2, 0.28, dual_clip=3.0), "correction": CORRECTION}
VARIANTS = [ops.Clip(0.1, 0.3, 1.5), ops.GSPO(0.05, 0.1), ops.GMPO(0.2, 0.3), ops.SAPO(1.0, 1.05), ops.KLCov(0.2, 0.5)]
VARIANTS += [ops.CISPO(), ops.GPG(), ops.CISPO(0.2, 0.3), ops.Reinforce(), ops.ClipCov(0.1, 0.3, 1.0, 0.05, 3.0)]


def run(arguments: dict[str, Any], target: Any = None, **changes: Any) -> tuple[ops.PolicyLoss, torch.Tensor]:
    """``(PolicyLoss, gradient)`` on the CPU, with a loss scale of 2, so that a gradient that ignores it shows. Without
    a target by the reference in float64."""
    arguments = {**arguments, **changes}
    if target:
        arguments = target.on({**arguments, "backend": target.backend})
    else:
        floats = {k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        arguments = {k: v.double() if k in floats else v for k, v in arguments.items()} | {"backend": "torch"}
    logprobs = arguments.pop("logprobs").clone().requires_grad_()
    result = ops.policy_loss(logprobs, **arguments)
    (result.loss * 2).backward()
    on_cpu = ops.PolicyLoss(result.loss.detach().cpu(), *({k: v.cpu() for k, v in m.items()} for m in result[1:]))
    return on_cpu, logprobs.grad.cpu() / 2


def assert_same(got: Any, want: Any, rtol: float = 1e-5, atol: float = 2e-6) -> None:
    (result, grad), (reference, reference_grad) = got, want
    torch.testing.assert_close(result.loss.double(), reference.loss.double(), rtol=rtol, atol=atol)
    largest = grad.abs().max().item() if grad.numel() else 0.0
    torch.testing.assert_close(grad.double(), reference_grad.double(), rtol=2 * rtol, atol=atol * largest)
    for mine, theirs in ((result.metrics, reference.metrics), (result.actor_metrics, reference.actor_metrics)):
        assert list(mine) == list(theirs)
        for name, value in theirs.items():
            close = {"rtol": max(2 * rtol, 1e-5), "atol": max(atol, 1e-6)}
            torch.testing.assert_close(mine[name], value, **close, msg=lambda text, n=name: f"{n}: {text}")


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------
# 1 and 37: less than a vector, and a tail; 64: whole vectors; 1030: beyond a tile; 50000: beyond a piece of 16384.
SIZES = [(1, 1), (9, 37), (3, 64), (3, 1030), (3, 50000)]
# Rows cut into tiles, the last one whole or not; many rows in a tile, and more than a search looks at in one go.
SIZES += [(2, 512), (2, 1040), (3, 700), (130, 5), (330, 2)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("aggregation", ops.AGGREGATIONS)
@pytest.mark.parametrize("variant", [None, ops.GMPO(0.2, 0.3)], ids=str)
def test_float32_equals_float64(make_batch, kernel, size, form, aggregation, variant) -> None:
    if size[1] > 2000 and kernel.simulated:
        size = (3, 2060)
    options = {"variant": variant, "correction": ops.ImportanceCorrection("sequence", 1.5)} if variant else FULL
    batch = make_batch(sum(size), *size, **options)
    arguments = getattr(batch, form)(torch.float32, aggregation=aggregation)
    assert_same(run(arguments, kernel), run(arguments), *((1e-5, 2e-6) if variant else (2e-6, 1e-6)))
    if aggregation != "agent-mean":  # without actors the kernels count nothing of theirs
        for name in ("actor_ids", "num_actors"):
            del arguments[name]
        assert_same(run(arguments, kernel), run(arguments))


KLS = [*(ops.KL(kind, 0.3) for kind in KL_ESTIMATORS), *(ops.KL(k, 0.3, True) for k in ("k1", "abs", "k2", "k3"))]


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("level", ["token", "sequence", None])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kl", KLS, ids=str)
@pytest.mark.parametrize("per_token", [False, True])
def test_every_option(make_batch, kernel, variant, form, level, kl, per_token) -> None:
    """With rejected tokens, entropies, and a row beyond the clamp of a mean log-ratio."""
    if isinstance(variant, ops.GMPO) and level == "token":
        level = "sequence"  # the other is rejected
    correction = ops.ImportanceCorrection(level, 1.5, bounds=(0.6, 1.4)) if level else None
    batch = make_batch(5, 9, 70, kl=kl, correction=correction, variant=variant, per_token=per_token)
    batch.old[3] += 25
    arguments = getattr(batch, form)(torch.float32, aggregation="seq-mean-token-mean")
    arguments["entropy"] = -arguments["old_logprobs"]
    assert_same(run(arguments, kernel), run(arguments))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_clamps_at_their_bounds(target, variant) -> None:
    """Those of a token, and of a row's mean, whose ratio an importance-weighted KL has."""
    bounds = [0.0, 19.9, 20.1, 90.0, -19.9, -20.1, -90.0, 1.0]
    cases = [*itertools.product([bounds], (1.0, -1.0, 0.0), KLS), *(([30.0] * 8, 1.0, kl) for kl in KLS[-4:])]
    for row, advantage, kl in cases:
        logprobs = torch.tensor([row])
        arguments = {"logprobs": logprobs, "old_logprobs": torch.zeros(1, 8), "variant": variant, "kl": kl}
        arguments |= {"advantages": torch.tensor([advantage]), "ref_logprobs": -logprobs}
        assert_same(run(arguments, target), run(arguments), 1e-5, 1e-6)


@pytest.mark.parametrize("bound", [80.0, 20.0, 1.0, 1e-3])
def test_exp_and_the_ratio_are_right_to_two_ulp(bound) -> None:
    """The ratio is the gradient of tokens that nothing clips, in a loss that is their sum."""
    values = torch.linspace(-bound, bound, 100_003)
    found = [torch.empty_like(values)]
    _C.exp(values, found[0])
    if bound <= 20:
        logprobs = values.clone().requires_grad_()
        # Advantages that clip at no side: -1 above a ratio of 1, 1 below.
        advantages, whole_sum = -values.sign()[None], {"aggregation": "seq-mean-token-sum-norm", "max_length": 1}
        ops.policy_loss(logprobs[None], torch.zeros(1, 100_003), advantages, **whole_sum).loss.backward()
        found.append(torch.where(values == 0, 1.0, logprobs.grad * values.sign()))
    exact = values.double().exp()
    ulp = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    for got in found:
        assert ((got.double() - exact).abs() / ulp).max() <= 2


# ---------------------------------------------------------------------------------------------------------------------
# KL
# ---------------------------------------------------------------------------------------------------------------------
def test_importance_weighted_kl_by_hand(target) -> None:
    """Ratio 2, reference half as likely: ``2 * (1/2 + ln 2 - 1)``, and by the log-probability
    ``2 * (1/2 + ln 2 - 1) + 2 * (1 - 1/2)``. On-policy the value is plain k3's, the gradient k1's. The metric is the
    estimate without its weight."""
    lp = torch.tensor([[0.5, 0.25]]).log()
    for old, loss, grad in (
        (lp - math.log(2), 2 * math.log(2) - 1, 2 * math.log(2)),
        (lp, math.log(2) - 0.5, math.log(2)),
    ):
        streams = {"logprobs": lp, "old_logprobs": old, "advantages": torch.zeros(1), "ref_logprobs": lp - math.log(2)}
        result, got = run(streams, target, kl=ops.KL("k3", 1.0, importance_weighted=True))
        assert result.loss.item() == pytest.approx(loss, rel=1e-6)
        assert got.tolist() == [pytest.approx([grad / 2, grad / 2], rel=1e-6)]
        assert result.metrics["kl"].item() == pytest.approx(math.log(2) - 0.5, rel=1e-6)


def test_what_is_a_metric_alone(make_batch, target) -> None:
    """A reference without a KL term: k3 of one half as likely is ``1/2 + ln 2 - 1``. And the entropy, by actor too."""
    arguments = make_batch(4).padded(torch.float32)
    mask, entropy = arguments["mask"], torch.rand(9, 37)
    plain, grad = run(arguments, target)
    got, got_grad = run(arguments, target, ref_logprobs=arguments["logprobs"] - math.log(2), entropy=entropy)
    assert torch.equal(got.loss, plain.loss) and torch.equal(got_grad, grad)
    assert got.metrics.keys() - plain.metrics.keys() == {"kl", "entropy"}
    assert got.metrics["kl"].item() == pytest.approx(math.log(2) - 0.5, rel=1e-5)
    assert got.metrics["entropy"].item() == pytest.approx(entropy[mask].mean().item(), rel=1e-5)
    for actor, value in enumerate(got.actor_metrics["entropy"].tolist()):
        rows = arguments["actor_ids"] == actor
        assert value == pytest.approx(entropy[rows][mask[rows]].mean().item(), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Selection, rejection, forms of an argument
# ---------------------------------------------------------------------------------------------------------------------
def test_clip_cov_draws_a_share_of_the_candidates(make_batch, target) -> None:
    batch = make_batch(5, 20, 60)
    variant = ops.ClipCov(0.2, 0.2, share=0.02, lower=0.0, upper=10.0)
    wanted = int(0.02 * int(batch.mask.sum()))
    assert 1 < wanted < int(batch.selection(variant).sum())
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        result, grad = run(batch.padded(torch.float32), target, variant=variant)
        assert result.metrics["dual_clip_fraction"].item() == pytest.approx(wanted / int(batch.mask.sum()))
        draws.append(grad)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [(0.5, 1.0), (1.0, 2.0)])
def test_a_weight_at_a_bound_is_kept(target, level, bounds) -> None:
    """Equal policies weigh exactly 1."""
    lp = torch.tensor([[-1.0, -2.0]])
    arguments = {"logprobs": lp, "old_logprobs": lp, "rollout_logprobs": lp, "advantages": torch.tensor([-1.0])}
    got, _ = run(arguments, target, correction=ops.ImportanceCorrection(level, 2.0, bounds=bounds))
    assert got.metrics["rejected"].item() == 0 and got.loss.item() == 1


def test_forms_of_an_argument(make_batch, target) -> None:
    """Advantages by sequence and by token, and actors of either integer."""
    arguments = make_batch(10).padded(torch.float32)
    by_row, by_actor = arguments["advantages"][:, None], {"aggregation": "agent-mean"}
    for usual, change in (
        ({}, {"advantages": by_row}),
        ({}, {"advantages": by_row.expand(-1, 37)}),
        ({}, {"actor_ids": arguments["actor_ids"].int()}),
        (by_actor, {"actor_ids": arguments["actor_ids"].int()}),
    ):
        (want, grad), (got, got_grad) = run(arguments, target, **usual), run(arguments, target, **usual, **change)
        assert torch.equal(got.loss, want.loss) and torch.equal(got_grad, grad)
        assert list(got.actor_metrics) == list(want.actor_metrics)


def test_metrics_read_like_a_dict() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    metrics, by_actor = Metrics(("a", "b"), table, 0), Metrics(("a", "b"), table, slice(1, None))
    assert list(metrics) == ["a", "b"] and len(metrics) == 2 and "a" in metrics and "c" not in metrics
    assert {name: value.item() for name, value in metrics.items()} == {"a": 1.0, "b": 2.0}
    assert metrics["b"].shape == () and metrics["b"] is metrics["b"]
    assert by_actor["a"].tolist() == [3.0, 5.0]
    assert dict(metrics).keys() == {"a", "b"}
    assert metrics.get("c") is None
    assert metrics | {"a": 7} == {"a": 7, "b": metrics["b"]} and {"a": 7, "c": 8} | metrics == {**metrics, "c": 8}
    with pytest.raises(TypeError):
        metrics | 3
    for same in (copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics))):
        assert dict(same) == dict(metrics)
    assert "tensor(1.)" in repr(metrics)
    with pytest.raises(KeyError, match="c"):
        metrics["c"]


# ---------------------------------------------------------------------------------------------------------------------
# Threads
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernels have threads of their own")
def test_shares_the_threads_of_torch_and_works_in_a_forked_child() -> None:
    """Threads of our own would compete with torch's, which go on spinning."""
    code = (
        "import os, torch; torch.set_num_threads(3); from turnwise import ops\n"
        "x = torch.randn(512, 2048); threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "call = lambda: ops.policy_loss(x, x, torch.ones(512)).loss.item()\n"
        "x.sigmoid_(); before = threads(); want = call(); print(threads() - before)\n"
        "x.sigmoid_(); print(threads() - before); want = call(); child = os.fork()\n"
        "if child == 0: os._exit(0 if call() == want else 1)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["0", "0", "0"], result.stdout + result.stderr
