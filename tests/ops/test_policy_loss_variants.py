"""Every variant of the policy loss against its definition in Python floats, on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from turnwise.ops import (
    AGGREGATIONS,
    CISPO,
    GMPO,
    GPG,
    GSPO,
    KL,
    SAPO,
    Clip,
    ClipCov,
    ImportanceCorrection,
    KLCov,
    Reinforce,
    policy_loss,
)

SMOOTH = [Clip(0.1, 0.3, 1.5), GSPO(0.05, 0.1), GMPO(0.2, 0.3), SAPO(1.0, 1.05), KLCov(0.2, 0.5)]
VARIANTS = [*SMOOTH, CISPO(), CISPO(0.2, 0.3), GPG(), Reinforce(), ClipCov(0.1, 0.3, 1.0, 0.05, 3.0)]


# ---------------------------------------------------------------------------------------------------------------------
# By the definition, row by row and token by token
# ---------------------------------------------------------------------------------------------------------------------
def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def surrogate(ratio: float, a: float, low: float, high: float) -> tuple[float, float]:
    """Loss and derivative by the log-ratio."""
    plain, clipped = -a * ratio, -a * clamp(ratio, 1 - low, 1 + high)
    return max(plain, clipped), (plain if plain >= clipped else 0.0)


def one_row(v: Any, lp: list[float], old: list[float], a: list[float], chosen: list[bool]) -> list[tuple[float, float]]:
    """(loss, derivative) of every trained token of a row, before weights, KL and aggregation."""
    d = [clamp(x - y, -20, 20) for x, y in zip(lp, old, strict=True)]
    ratio = [math.exp(x) for x in d]
    n = max(len(lp), 1)
    match v:
        case Clip():
            out = []
            for r, adv in zip(ratio, a, strict=True):
                loss, grad = surrogate(r, adv, v.low, v.high)
                if v.dual_clip is not None and adv < 0 and loss > -adv * v.dual_clip:
                    loss, grad = -adv * v.dual_clip, 0.0
                out.append((loss, grad))
            return out
        case GSPO():
            whole = math.exp(clamp(sum(x - y for x, y in zip(lp, old, strict=True)) / n, -20, 20))
            return [surrogate(whole, adv, v.low, v.high) for adv in a]
        case CISPO():
            weights = [clamp(r, 1 - v.low, 1 + v.high) for r in ratio]
            return [(-w * adv * x, -w * adv) for w, adv, x in zip(weights, a, lp, strict=True)]
        case GPG() | Reinforce():
            return [(-adv * x, -adv) for adv, x in zip(a, lp, strict=True)]
        case SAPO():
            out = []
            for r, adv in zip(ratio, a, strict=True):
                tau = v.tau_positive if adv > 0 else v.tau_negative
                gate = 1 / (1 + math.exp(clamp(-tau * (r - 1), -700, 700)))
                out.append((-adv * gate * 4 / tau, -adv * 4 * gate * (1 - gate) * r))
            return out
        case GMPO():
            bounded = [
                min(x, v.high) if adv > 0 else max(x, -v.low) if adv < 0 else 0.0 for x, adv in zip(d, a, strict=True)
            ]
            loss = -sum(a) / n * math.exp(sum(bounded) / n)
            free = [adv != 0 and x == b for x, b, adv in zip(d, bounded, a, strict=True)]
            return [(loss, loss if f else 0.0) for f in free]
        case ClipCov():
            both = [surrogate(r, adv, v.low, v.high) for r, adv in zip(ratio, a, strict=True)]
            return [(0.0, 0.0) if c else pair for c, pair in zip(chosen, both, strict=True)]
    assert isinstance(v, KLCov)
    return [
        (-adv * r + c * v.coef * abs(x), -adv * r + c * v.coef * math.copysign(1, x))
        for r, adv, x, c in zip(ratio, a, d, chosen, strict=True)
    ]


def selection(v: Any, batch: Any) -> torch.Tensor:
    """Which tokens are singled out. ClipCov draws only when there are more candidates than it may take."""
    lp, old, mask = batch.logprobs, batch.old, batch.mask
    a = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None].expand_as(lp)
    covariance = (a - a[mask].mean()) * (lp - lp[mask].mean())
    if isinstance(v, KLCov):
        count = max(1, int(v.share * int(mask.sum())))
        smallest = covariance[mask].sort(descending=True).values[count - 1]
        return mask & (covariance >= smallest)
    ratio = (lp - old).exp()
    free = -a * ratio >= -a * ratio.clamp(1 - v.low, 1 + v.high)
    return mask & free & (covariance > v.lower) & (covariance < v.upper)


def weighted_kl(v: Any, lp: list[float], old: list[float], ref: list[float]) -> list[tuple[float, float]]:
    """(value, derivative) of a row's k2 estimates times the importance ratio, which is the row's in GSPO."""
    estimates = [((y - x) ** 2 / 2, x - y) for x, y in zip(lp, ref, strict=True)]
    d = [clamp(x - y, -20, 20) for x, y in zip(lp, old, strict=True)]
    if not isinstance(v, GSPO):
        return [(math.exp(x) * k, math.exp(x) * (k + slope)) for x, (k, slope) in zip(d, estimates, strict=True)]
    ratio, mean = math.exp(sum(d) / len(d)), sum(k for k, _ in estimates) / len(d)
    return [(ratio * k, ratio * (mean + slope)) for k, slope in estimates]


def expected(
    batch: Any, v: Any, kl_coef: float = 0.0, weight: Callable | None = None, kl_weighted: bool = False
) -> tuple[float, torch.Tensor]:
    """Token mean and its gradient."""
    total, grad = 0.0, torch.zeros_like(batch.logprobs)
    chosen = selection(v, batch) if isinstance(v, ClipCov | KLCov) else torch.zeros_like(batch.mask)
    tokens = int(batch.mask.sum())
    for b, row in enumerate(batch.mask.tolist()):
        at = [t for t, trains in enumerate(row) if trains]
        a = [float(batch.advantages[b] if batch.advantages.dim() == 1 else batch.advantages[b, t]) for t in at]
        lp, old, ref = ([float(x[b, t]) for t in at] for x in (batch.logprobs, batch.old, batch.ref))
        for i, (t, (loss, slope)) in enumerate(
            zip(at, one_row(v, lp, old, a, [bool(chosen[b, t]) for t in at]), strict=True)
        ):
            w = 1.0 if weight is None else weight(b, t)
            d = ref[i] - lp[i]
            value, kl_slope = weighted_kl(v, lp, old, ref)[i] if kl_weighted else (d * d / 2, -d)
            total += (w * loss + kl_coef * value) / tokens
            grad[b, t] = (w * slope + kl_coef * kl_slope) / tokens
    return total, grad


def run(arguments: dict[str, Any], target: Any = None, **changes: Any) -> tuple[Any, torch.Tensor]:
    arguments = {**arguments, **changes}
    device = target.device if target else "cpu"
    if target:
        arguments["backend"] = target.backend
    arguments = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
    logprobs = arguments.pop("logprobs").clone().requires_grad_()
    result = policy_loss(logprobs, **arguments)
    (result.loss * 2).backward()
    return result, logprobs.grad.cpu() / 2


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kl_weighted", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equals_the_definition(make_batch, variant, per_token, kl_weighted) -> None:
    batch = make_batch(17, per_token=per_token, kl=KL("k2", 0.3, kl_weighted))
    loss, want = expected(batch, variant, kl_coef=0.3, kl_weighted=kl_weighted)
    for form in ("padded", "packed"):
        got, grad = run(getattr(batch, form)(variant=variant), backend="torch")
        assert got.loss.item() == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(grad, want if form == "padded" else unpad(batch, want), rtol=1e-10, atol=1e-14)


def unpad(batch: Any, values: torch.Tensor) -> torch.Tensor:
    lengths = batch.packed()["cu_seqlens"].diff()
    return values[torch.arange(values.shape[1])[None] < lengths[:, None]]


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("level", ["token", "sequence", None])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_float32_equals_float64(make_batch, kernel, variant, form, level) -> None:
    if isinstance(variant, GMPO) and level == "token":
        pytest.skip("refused")
    correction = ImportanceCorrection(level, 1.5, bounds=(0.6, 1.4)) if level else None
    for seed, rows, width, aggregation in ((1, 9, 37, "token-mean"), (2, 5, 150, "seq-mean-token-mean")):
        batch = make_batch(seed, rows, width, kl=KL("k3", 0.1), correction=correction, variant=variant)
        batch.options |= {"aggregation": aggregation}
        want, want_grad = run(getattr(batch, form)(entropy=-getattr(batch, form)()["old_logprobs"]), backend="torch")
        arguments = getattr(batch, form)(torch.float32)
        got, grad = run(arguments, kernel, entropy=-arguments["old_logprobs"])
        torch.testing.assert_close(got.loss.cpu().double(), want.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad.double(), want_grad, rtol=2e-5, atol=1e-7)
        for name, value in want.metrics.items():
            assert got.metrics[name].item() == pytest.approx(value.item(), rel=2e-5, abs=1e-6), name
            torch.testing.assert_close(got.actor_metrics[name].cpu(), want.actor_metrics[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_importance_weighted_kl(make_batch, kernel, variant, form) -> None:
    """Long rows, far ones (GSPO: a mean log-ratio beyond its clamp), and rejected ones."""
    correction = ImportanceCorrection("sequence", 1.5, bounds=(0.6, 1.4))
    for seed, rows, width, aggregation in ((1, 9, 37, "token-mean"), (2, 5, 150, "seq-mean-token-mean")):
        kl = KL("k3" if seed == 1 else "k1", 0.1, importance_weighted=True)
        batch = make_batch(seed, rows, width, kl=kl, correction=correction, variant=variant)
        batch.old[3] += 25
        batch.options |= {"aggregation": aggregation}
        want, want_grad = run(getattr(batch, form)(), backend="torch")
        got, grad = run(getattr(batch, form)(torch.float32), kernel)
        torch.testing.assert_close(got.loss.cpu().double(), want.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad.double(), want_grad, rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(got.metrics["kl"].cpu(), want.metrics["kl"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("variant", SMOOTH[:4], ids=str)
def test_gradcheck(make_batch, variant, aggregation) -> None:
    arguments = make_batch(11, 4, 6, variant=variant, kl=KL("k3", 0.3, importance_weighted=True)).padded()
    logprobs = arguments.pop("logprobs").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, **arguments, aggregation=aggregation, backend="torch").loss, logprobs
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_trained_costs_nothing(target, variant) -> None:
    values = torch.full((2, 5), math.nan)
    arguments = {"logprobs": values, "old_logprobs": values, "advantages": torch.ones(2), "mask": torch.zeros(2, 5)}
    result, grad = run(arguments, target, variant=variant, entropy=values)
    assert result.loss.item() == 0
    assert torch.equal(grad, torch.zeros(2, 5))
    assert [m.item() for m in result.metrics.values()] == [0.0] * len(result.metrics)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nan_reaches_the_loss(make_batch, target, variant) -> None:
    batch = make_batch(12)
    row, token = batch.mask.nonzero()[0].tolist()
    arguments = batch.padded(torch.float32)
    arguments["logprobs"] = arguments["logprobs"].masked_fill(~batch.mask, math.nan)
    torch.manual_seed(0)
    assert run(arguments, target, variant=variant)[0].loss.isfinite()
    arguments["logprobs"][row, token] = math.nan
    assert run(arguments, target, variant=variant)[0].loss.isnan()


def test_far_log_ratios(target) -> None:
    logprobs = torch.tensor([[0.0, 19.9, 20.1, 90.0, -19.9, -20.1, -90.0, 1.0]])
    for variant in VARIANTS:
        for advantage in (1.0, -1.0, 0.0):
            arguments = {
                "logprobs": logprobs,
                "old_logprobs": torch.zeros(1, 8),
                "advantages": torch.tensor([advantage]),
            }
            exact = {k: v.double() for k, v in arguments.items()}
            want, want_grad = run(exact, variant=variant, backend="torch")
            got, grad = run(arguments, target, variant=variant)
            torch.testing.assert_close(got.loss.cpu().double(), want.loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(grad.double(), want_grad, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Selection, rejection, entropy
# ---------------------------------------------------------------------------------------------------------------------
def test_clip_cov_draws_a_share_of_the_candidates(make_batch, target) -> None:
    batch = make_batch(5, 20, 60)
    variant = ClipCov(0.2, 0.2, share=0.02, lower=0.0, upper=10.0)
    candidates = int(selection(variant, batch).sum())
    wanted = int(0.02 * int(batch.mask.sum()))
    assert 1 < wanted < candidates
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        result, grad = run(batch.padded(torch.float32), target, variant=variant)
        assert result.metrics["dual_clip_fraction"].item() == pytest.approx(wanted / int(batch.mask.sum()))
        draws.append(grad)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rejection(make_batch, target, level) -> None:
    bounds = (0.8, 1.3) if level == "token" else (0.4, 2.5)
    batch = make_batch(3, correction=ImportanceCorrection(level, 1.2, bounds=bounds))
    mismatch = torch.where(batch.mask, batch.old - batch.rollout, 0.0)
    raw = (mismatch.sum(1, keepdim=True).expand_as(mismatch) if level == "sequence" else mismatch).exp()
    rejected = (raw < bounds[0]) | (raw > bounds[1])
    weights = torch.where(rejected, 0.0, raw.clamp(max=1.2))
    loss, want = expected(batch, Clip(), weight=lambda b, t: weights[b, t].item())
    got, grad = run(batch.padded(torch.float32), target)
    assert got.loss.item() == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-7)
    share = (rejected & batch.mask).sum() / batch.mask.sum()
    assert 0 < share < 1
    assert got.metrics["rejected"].item() == pytest.approx(share.item(), rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [(0.5, 1.0), (1.0, 2.0)])
def test_a_weight_at_a_bound_is_kept(target, level, bounds) -> None:
    """Equal policies weigh exactly 1."""
    lp = torch.tensor([[-1.0, -2.0]])
    arguments = {"logprobs": lp, "old_logprobs": lp, "rollout_logprobs": lp, "advantages": torch.tensor([-1.0])}
    got, _ = run(arguments, target, correction=ImportanceCorrection(level, 2.0, bounds=bounds))
    assert got.metrics["rejected"].item() == 0 and got.loss.item() == 1


def test_entropy_is_a_metric_alone(make_batch, target) -> None:
    arguments = make_batch(4).padded(torch.float32)
    plain, grad = run(arguments, target)
    entropy = torch.rand(9, 37)
    got, got_grad = run(arguments, target, entropy=entropy)
    assert torch.equal(got.loss, plain.loss) and torch.equal(grad, got_grad)
    mask = arguments["mask"]
    assert got.metrics["entropy"].item() == pytest.approx(entropy[mask].mean().item(), rel=1e-5)
    for actor, value in enumerate(got.actor_metrics["entropy"].tolist()):
        rows = arguments["actor_ids"] == actor
        assert value == pytest.approx(entropy[rows][mask[rows]].mean().item(), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Invariances and mistakes
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", [GSPO(0.05, 0.1), GMPO(0.2, 0.3)], ids=str)
@pytest.mark.parametrize("rows", [2, 40])  # fewer rows than parts, and more: whole rows per thread
def test_threads_change_no_bit(make_batch, variant, rows) -> None:
    arguments = make_batch(2, rows, 40_000 // rows, variant=variant).padded(torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(arguments, backend="native"))
    finally:
        torch.set_num_threads(before)
    for result, grad in results[1:]:
        assert torch.equal(grad, results[0][1]) and torch.equal(result.loss, results[0][0].loss)


def test_cispo_without_a_lower_bound(make_batch) -> None:
    """``low=1`` is a ratio capped from above alone."""
    batch = make_batch(8, spread=2.0)
    got, _ = run(batch.padded(variant=CISPO(low=1.0, high=0.5)), backend="torch")
    ratio = (batch.logprobs - batch.old).exp().clamp(max=1.5)
    want = (-ratio * batch.advantages[:, None] * batch.logprobs)[batch.mask].mean()
    assert got.loss.item() == pytest.approx(want.item(), rel=1e-12)
    assert got.metrics["clip_fraction_low"].item() == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"clip": Clip(), "variant": GSPO()}, ValueError, "clip=Clip.*and variant=GSPO.*expected one of them"),
        ({"variant": "gspo"}, TypeError, "variant='gspo'"),
        (
            {"variant": GMPO(), "correction": ImportanceCorrection(), "rollout_logprobs": torch.zeros(2, 3)},
            ValueError,
            "level='sequence', as GMPO",
        ),
        ({"entropy": torch.zeros(2)}, ValueError, r"entropy has shape \(2,\)"),
        ({"entropy": torch.zeros(2, 3).int()}, TypeError, "entropy has dtype torch.int32"),
    ],
)
def test_mistakes_are_named(target, change, error, message) -> None:
    with pytest.raises(error, match=message):
        policy_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), backend=target.backend, **change)


@pytest.mark.parametrize("actors", [3, 100])  # 100: more than shared memory holds tables for
def test_every_run_gives_the_same_bits(make_batch, target, actors) -> None:
    batch = make_batch(23, 40, 190, kl=KL("k3", 0.1), correction=ImportanceCorrection("sequence", 1.5))
    batch.actors = torch.arange(40) % actors
    batch.num_actors = actors
    arguments = batch.packed(torch.float32, aggregation="agent-mean")
    first, first_grad = run(arguments, target)
    again, again_grad = run(arguments, target)
    assert torch.equal(first.loss, again.loss) and torch.equal(first_grad, again_grad)
    assert all(torch.equal(first.actor_metrics[k], v) for k, v in again.actor_metrics.items())
    want, want_grad = run(batch.packed(aggregation="agent-mean"), backend="torch")
    assert first.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
    torch.testing.assert_close(first_grad.double(), want_grad, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(first.actor_metrics["tokens"].cpu(), want.actor_metrics["tokens"])


def test_a_kernel_that_cannot_look_at_values_says_nan(make_batch, target) -> None:
    """An actor id out of range: an error where values are looked at, NaN where that would wait for the device."""
    arguments = make_batch(4).padded(torch.float32)
    arguments["actor_ids"][0] = 7
    if target.emulated or (target.device == "cuda" and target.backend == "native"):
        assert run(arguments, target)[0].loss.isnan()
    elif target.device == "cpu":
        with pytest.raises(ValueError, match=r"actor_ids\[0\]=7"):
            run(arguments, target)
