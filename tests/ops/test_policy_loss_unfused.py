"""The variants that plain PyTorch computes, and LUSPO: worked numbers, then their definition in Python floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from turnwise.ops import (
    AGGREGATIONS,
    DPPO,
    DRO,
    GSPO,
    KL,
    LUSPO,
    VESPO,
    BackendUnavailable,
    Clip,
    ImportanceCorrection,
    grouped_policy_loss,
    linear_logprob,
    linear_policy_loss,
    policy_loss,
)

VARIANTS = [DPPO(), DPPO("kl", 0.1, 0.02, cap=1.5), DRO(0.3), VESPO(), VESPO(1.0, 0.5, 0.0, 1.0)]


def run(arguments: dict[str, Any], **changes: Any) -> tuple[Any, torch.Tensor]:
    arguments = {**arguments, **changes}
    logprobs = arguments.pop("logprobs").clone().requires_grad_()
    result = policy_loss(logprobs, **arguments)
    (result.loss * 2).backward()
    return result, logprobs.grad / 2


# ---------------------------------------------------------------------------------------------------------------------
# Worked numbers
# ---------------------------------------------------------------------------------------------------------------------
def one_token(p: float, q: float, advantage: float, variant: Any, **options: Any) -> tuple[float, float, Any]:
    """Loss, derivative by the log-probability, and metrics of a token whose probability went from q to p."""
    lp, old = torch.tensor([[p]], dtype=torch.float64).log(), torch.tensor([[q]], dtype=torch.float64).log()
    arguments = {"logprobs": lp, "old_logprobs": old, "advantages": torch.tensor([advantage]).double()}
    result, grad = run(arguments, variant=variant, **options)
    return result.loss.item(), grad.item(), {name: value.item() for name, value in result.metrics.items()}


def test_dppo_by_total_variation() -> None:
    """From 0.5 to 0.6 the coin moves by 0.1, and the ratio is 1.2. From 0.01 to 0.03 it is 3, but the coin moves by
    only 0.02: PPO would clip this token, DPPO trains it."""
    loss, slope, _ = one_token(0.6, 0.5, 2.0, DPPO())
    assert loss == pytest.approx(-2 * 1.2 * math.log(0.6)) and slope == pytest.approx(-2.4)
    loss, slope, metrics = one_token(0.7, 0.5, 2.0, DPPO())
    assert (loss, slope) == (0, 0) and metrics["clip_fraction_high"] == 1
    assert one_token(0.7, 0.5, -2.0, DPPO())[1] == pytest.approx(2 * 1.4), "a step back is never too far"
    loss, slope, metrics = one_token(0.3, 0.5, -2.0, DPPO())
    assert (loss, slope) == (0, 0) and metrics["clip_fraction_low"] == 1
    assert one_token(0.03, 0.01, 1.0, DPPO())[1] == pytest.approx(-3.0)
    _, slope, metrics = one_token(0.03, 0.01, 1.0, DPPO(cap=2.0))
    assert slope == pytest.approx(-2.0) and metrics["dual_clip_fraction"] == 1


def test_dppo_by_kl() -> None:
    """KL(coin 0.5 || coin 0.7) = 0.5 log(0.5 / 0.7) + 0.5 log(0.5 / 0.3) = 0.0872, above the limit of 0.05."""
    assert one_token(0.7, 0.5, 1.0, DPPO("kl"))[1] == 0
    assert one_token(0.7, 0.5, 1.0, DPPO("kl", high=0.0873))[1] == pytest.approx(-1.4)
    assert one_token(0.7, 0.5, 1.0, DPPO("kl", high=0.0871))[1] == 0
    assert one_token(0.7, 0.5, -1.0, DPPO("kl", low=0.01))[1] == pytest.approx(1.4)


def test_dro() -> None:
    """A = 2, log-ratio log 1.2 = 0.18232, beta 0.5: -2 log 0.6 + 0.25 * 0.18232**2 = 1.02996."""
    loss, slope, _ = one_token(0.6, 0.5, 2.0, DRO(0.5))
    assert loss == pytest.approx(1.02996, abs=1e-5) and slope == pytest.approx(-2 + 0.5 * 0.18232, abs=1e-5)


def test_vespo() -> None:
    """phi(1) = 1. For w = 2 and A > 0, phi = e^3 2^2 e^-6 = 4 e^-3 = 0.19915; for A < 0, e^2 2^3 e^-4 = 1.08268."""
    assert one_token(0.5, 0.5, 1.0, VESPO())[1] == pytest.approx(-1.0)
    assert one_token(0.8, 0.4, 1.0, VESPO())[1] == pytest.approx(-0.19915, abs=1e-5)
    assert one_token(0.8, 0.4, -1.0, VESPO())[1] == pytest.approx(1.08268, abs=1e-5)


def test_vespo_takes_the_weights_into_its_ratio() -> None:
    """Two tokens with ratios 2 and 1, sampled at weights 0.5 and 3, the second capped at 1.5: w = 2 * 0.5 * 1.5."""
    lp = torch.tensor([[0.8, 0.5]], dtype=torch.float64).log()
    old = torch.tensor([[0.4, 0.5]], dtype=torch.float64).log()
    rollout = old - torch.tensor([[0.5, 3.0]], dtype=torch.float64).log()
    arguments = {"logprobs": lp, "old_logprobs": old, "rollout_logprobs": rollout, "advantages": torch.ones(1)}
    _, grad = run(arguments, variant=VESPO(), correction=ImportanceCorrection("token", 1.5))
    phi = math.exp(3) * 1.5**2 * math.exp(-4.5)
    assert grad.tolist() == [pytest.approx([-phi / 2] * 2)]
    # A rejected token has weight 0, so the sequence's ratio is 1e-8: it trains nothing.
    _, grad = run(arguments, variant=VESPO(), correction=ImportanceCorrection("token", 1.5, bounds=(0.1, 2.0)))
    assert grad.abs().max() < 1e-14


def test_luspo_weighs_a_sequence_by_its_length() -> None:
    """On-policy each token has gradient -A / rows: the long row counts four times, with GSPO's aggregation once."""
    lp = torch.zeros(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    arguments = {"logprobs": lp, "old_logprobs": lp, "advantages": torch.tensor([1.0, 1.0]), "mask": mask}
    _, grad = run(arguments, variant=LUSPO(), aggregation="seq-mean-token-sum")
    assert grad.tolist() == [[-0.5] * 4, [-0.5, 0, 0, 0]]
    _, grad = run(arguments, variant=GSPO(), aggregation="seq-mean-token-mean")
    assert grad.tolist() == [[-0.125] * 4, [-0.5, 0, 0, 0]]


def test_luspo_is_served_by_the_kernels_of_gspo(make_batch, target) -> None:
    batch = make_batch(4, kl=KL("k3", 0.1, importance_weighted=True)).padded(torch.float32)
    batch = {k: x.to(target.device) if isinstance(x, torch.Tensor) else x for k, x in batch.items()}
    how = {"aggregation": "seq-mean-token-sum", "backend": target.backend}
    got, grad = run(batch, variant=LUSPO(0.05, 0.1), **how)
    want, want_grad = run(batch, variant=GSPO(0.05, 0.1), **how)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad) and grad.abs().max() > 0


# ---------------------------------------------------------------------------------------------------------------------
# By the definition
# ---------------------------------------------------------------------------------------------------------------------
def one_row(v: Any, lp: list[float], old: list[float], a: list[float], w: list[float]) -> list[tuple[float, float]]:
    """(loss, derivative) of each trained token of a row; ``w`` are its importance weights."""
    if isinstance(v, VESPO):
        total = sum(max(-20, min(20, x - y)) for x, y in zip(lp, old, strict=True))
        total += sum(max(math.log(1e-8), min(20, math.log(y) if y else -math.inf)) for y in w)
        total = max(math.log(1e-8), min(20, total))
        out = []
        for x, adv in zip(lp, a, strict=True):
            k, lam = (v.k_positive, v.lam_positive) if adv >= 0 else (v.k_negative, v.lam_negative)
            phi = math.exp(lam + k * total - lam * math.exp(total))
            out.append((-phi * adv * x, -phi * adv))
        return out
    if isinstance(v, DRO):
        pairs = [
            (-adv * x + v.beta / 2 * (x - y) ** 2, -adv + v.beta * (x - y))
            for x, y, adv in zip(lp, old, a, strict=True)
        ]
    else:
        low, high, cap = v.bounds
        pairs = []
        for x, y, adv in zip(lp, old, a, strict=True):
            p, q = math.exp(x), math.exp(y)
            moved = abs(p - q) if v.divergence == "tv" else q * (y - x) + (1 - q) * math.log((1 - q) / (1 - p))
            too_far = (adv > 0 and p > q and moved > high) or (adv < 0 and p < q and moved > low)
            weight = 0.0 if too_far else min(math.exp(max(-20, min(20, x - y))), cap)
            pairs.append((-adv * weight * x, -adv * weight))
    return [(loss * y, slope * y) for (loss, slope), y in zip(pairs, w, strict=True)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equals_the_definition(make_batch, variant, per_token, aggregation) -> None:
    """With weights that reject, a KL term, rows that are empty, and holes; each token's weight is its aggregation's."""
    correction = ImportanceCorrection("token", 1.3, bounds=(0.6, 1.6))
    batch = make_batch(29, spread=0.3, per_token=per_token, kl=KL("k2", 0.3), correction=correction)
    batch.logprobs -= 0.01
    batch.old = batch.old.clamp(max=-0.01)
    # The weights of the aggregation are the gradient of a loss with derivative 1 per token.
    arguments = batch.padded(aggregation=aggregation)
    flat = {**arguments, "kl": None, "correction": None, "advantages": -torch.ones(len(batch.mask))}
    _, share = run({**flat, "old_logprobs": flat["logprobs"]}, clip=Clip(), backend="torch")
    loss, want = 0.0, torch.zeros_like(batch.logprobs)
    trained = 0
    for b, row in enumerate(batch.mask.tolist()):
        at = [t for t, trains in enumerate(row) if trains]
        a = [float(batch.advantages[b, t] if per_token else batch.advantages[b]) for t in at]
        raw = [math.exp(batch.old[b, t] - batch.rollout[b, t]) for t in at]
        w = [0.0 if not 0.6 <= x <= 1.6 else min(x, 1.3) for x in raw]
        lp, old = ([float(x[b, t]) for t in at] for x in (batch.logprobs, batch.old))
        for t, (value, slope) in zip(at, one_row(variant, lp, old, a, w), strict=True):
            d = float(batch.ref[b, t] - batch.logprobs[b, t])
            loss += float(share[b, t]) * (value + 0.3 * d * d / 2)
            want[b, t] = share[b, t] * (slope - 0.3 * d)
            trained += slope != 0
    assert trained > 20
    lengths = batch.packed()["cu_seqlens"].diff()
    kept = torch.arange(want.shape[1])[None] < lengths[:, None]
    for form, grad in (("padded", want), ("packed", want[kept])):
        result, got = run(getattr(batch, form)(aggregation=aggregation, variant=variant), backend="torch")
        assert result.loss.item() == pytest.approx(loss, rel=1e-6)  # DPPO adds 1e-8 inside a logarithm
        torch.testing.assert_close(got, grad, rtol=1e-9, atol=1e-14)
        result, got = run(getattr(batch, form)(torch.float32, aggregation=aggregation, variant=variant))
        assert result.loss.item() == pytest.approx(loss, rel=1e-4)
        torch.testing.assert_close(got.double(), grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_masked_values_and_nan(make_batch, variant) -> None:
    arguments = make_batch(12).padded(torch.float32)
    arguments["logprobs"] = arguments["logprobs"].masked_fill(~arguments["mask"], math.nan)
    result, grad = run(arguments, variant=variant)
    assert result.loss.isfinite() and grad.isfinite().all()
    row, token = arguments["mask"].nonzero()[0].tolist()
    arguments["logprobs"][row, token] = math.nan
    assert run(arguments, variant=variant)[0].loss.isnan()
    assert run(arguments, variant=variant, mask=torch.zeros(9, 37))[0].loss == 0


@pytest.mark.parametrize("variant", [*VARIANTS, LUSPO(0.01, 0.02)], ids=str)
def test_from_hidden_states_and_token_rewards(variant) -> None:
    """Head and loss in one, and rewards to loss in one, equal the ops in turn."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(40, 8)
    targets, advantages, cu = torch.randint(40, (12,)), torch.randn(3), torch.tensor([0, 5, 6, 12])
    how = {"cu_seqlens": cu, "variant": variant, "aggregation": "seq-mean-token-sum"}
    logprobs = linear_logprob(hidden, weight, targets)
    old = (logprobs + 0.1 * torch.randn(12)).detach().clamp(max=-0.01)
    losses = [policy_loss(logprobs, old, advantages, **how).loss]
    losses.append(linear_policy_loss(hidden, weight, targets, old, advantages, **how).loss)
    grads = [torch.autograd.grad(loss, hidden)[0] for loss in losses]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)
    assert grads[0].abs().max() > 1e-3
    rewards, ids = torch.zeros(12).index_fill(0, torch.tensor([4]), 1.0), torch.zeros(3, dtype=torch.int64)
    result = grouped_policy_loss(logprobs.detach(), old, rewards, ids, **how)
    want = policy_loss(logprobs.detach(), old, result.advantages, **how).loss
    torch.testing.assert_close(result.loss, want)
    assert result.advantages[0] > 1


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DPPO("js"), r"DPPO\.divergence='js': expected one of tv, kl"),
        (lambda: DPPO(low=-1), r"DPPO\.low=-1"),
        (lambda: DPPO(cap=0.5), r"DPPO\.cap=0\.5"),
        (lambda: DRO(0), r"DRO\.beta=0: expected a finite number > 0"),
        (lambda: VESPO(k_negative=-1), r"VESPO\.k_negative=-1"),
        (lambda: VESPO(lam_positive=0), r"VESPO\.lam_positive=0"),
        (lambda: LUSPO(high=math.nan), r"LUSPO\.high=nan"),
    ],
)
def test_nonsense_raises_when_built(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_what_makes_no_sense_together_raises() -> None:
    streams = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2)
    with pytest.raises(ValueError, match=r"aggregation='token-mean': expected 'seq-mean-token-sum' or .*LUSPO"):
        policy_loss(*streams, variant=LUSPO())
    policy_loss(*streams, variant=LUSPO(), aggregation="seq-mean-token-sum-norm", max_length=3)
    with pytest.raises(ValueError, match="expected level='token', as VESPO"):
        policy_loss(
            *streams, variant=VESPO(), correction=ImportanceCorrection("sequence"), rollout_logprobs=torch.zeros(2, 3)
        )
    for variant in VARIANTS:
        with pytest.raises(BackendUnavailable, match=f"variant is a {type(variant).__name__}, which only the ref"):
            policy_loss(*streams, variant=variant, backend="native")
