"""The plain PyTorch reference against the definition in Python floats: every variant, every option, worked numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from turnwise import ops

from .definition import CLIPPED, run

TOKEN, SEQUENCE = ops.ImportanceCorrection("token", 1.5), ops.ImportanceCorrection("sequence", 3.0)
REJECTING = ops.ImportanceCorrection("token", 1.3, bounds=(0.6, 1.6))
UNFUSED = [ops.DPPO(), ops.DPPO("kl", 0.1, 0.02, cap=1.5), ops.DRO(0.3), ops.VESPO(), ops.VESPO(1.0, 0.5, 0.0, 1.0)]
KERNELS = [ops.GSPO(0.05, 0.1), ops.GMPO(0.2, 0.3), ops.SAPO(1.0, 1.05), ops.KLCov(0.2, 0.5), ops.CISPO(), ops.GPG()]
KERNELS += [ops.CISPO(0.2, 0.3), ops.Reinforce(), ops.ClipCov(0.1, 0.3, 1.0, 0.05, 3.0), ops.Clip(0.1, 0.3, 1.5)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip": ops.Clip(0.1, 0.3, dual_clip=1.5)},
    {"kl": ops.KL("k1", 0.1)},
    {"kl": ops.KL("abs", 0.1)},
    {"kl": ops.KL("k2", 0.1), "correction": TOKEN},
    {"kl": ops.KL("k3", 0.1), "clip": ops.Clip(dual_clip=3.0)},
    {"kl": ops.KL("k3+", 0.1), "correction": SEQUENCE},
    {"kl": ops.KL("k1+", 0.1), "correction": REJECTING},
    *({"kl": ops.KL(kind, 0.3, importance_weighted=True), "correction": TOKEN} for kind in ("k1", "abs", "k3")),
    *({"variant": v, "kl": ops.KL("k2", 0.3, w)} for v in KERNELS for w in (False, True)),
    *({"variant": v, "kl": ops.KL("k2", 0.3), "correction": REJECTING} for v in UNFUSED),
]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("aggregation", ops.AGGREGATIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_definition(make_batch, aggregation, options, per_token) -> None:
    """Rows that are empty, and holes; a ratio beyond its clamp on either side. In float32 for what no kernel serves."""
    v = options.get("variant")
    near = {"spread": 0.3} if v in UNFUSED else {}
    batch = make_batch(29, per_token=per_token, **near, **options)
    if v in UNFUSED:  # probabilities, as 1 - p is read
        batch.logprobs, batch.old = batch.logprobs - 0.01, batch.old.clamp(max=-0.01)
    elif not v:
        batch.old[0, 0], batch.old[2, 0] = batch.logprobs[0, 0] + 30, batch.logprobs[2, 0] - 21
        batch.mask[0, 0] = batch.mask[2, 0] = True
    loss, grad, metrics = batch.expected(aggregation)
    assert (grad != 0).sum() > 20
    rel = 1e-6 if isinstance(v, ops.DPPO) else 1e-12  # it adds 1e-8 inside a logarithm
    for form, want in (("padded", grad), ("packed", grad[batch.kept])):
        arguments = getattr(batch, form)(aggregation=aggregation)
        result, got = run(arguments, backend="torch")
        assert result.loss.item() == pytest.approx(loss, rel=rel, abs=1e-14)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-14)
        assert metrics.keys() | set(CLIPPED) == result.metrics.keys()
        for name, value in metrics.items():
            assert result.metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-7), name
            assert result.actor_metrics[name].shape == (3,)
        if v in UNFUSED:
            result, got = run(getattr(batch, form)(torch.float32, aggregation=aggregation))
            assert result.loss.item() == pytest.approx(loss, rel=1e-4)
            torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-6)


def test_only_logprobs_get_a_gradient(make_batch) -> None:
    arguments = make_batch(3, kl=ops.KL(), correction=TOKEN).padded()
    others = [name for name in ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")]
    for name in ("logprobs", *others):
        arguments[name].requires_grad_()
    got = ops.policy_loss(**arguments, backend="torch")
    got.loss.backward()
    assert arguments["logprobs"].grad is not None
    assert [arguments[name].grad for name in others] == [None] * 4
    assert not any(metric.requires_grad for metric in got.metrics.values())


def test_far_log_ratios_are_clamped() -> None:
    logprobs = torch.tensor([[0.0, -100.0]], dtype=torch.float64)
    arguments = {"logprobs": logprobs, "old_logprobs": logprobs.flip(1), "advantages": -torch.ones(1).double()}
    got, grad = run(arguments, backend="torch")
    assert got.metrics["ratio_max"].item() == pytest.approx(torch.e**20, rel=1e-6)
    assert grad.tolist() == [[0.0, 0.0]]


# ---------------------------------------------------------------------------------------------------------------------
# Worked numbers of the variants that plain PyTorch computes, and of LUSPO
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
    loss, slope, _ = one_token(0.6, 0.5, 2.0, ops.DPPO())
    assert loss == pytest.approx(-2 * 1.2 * math.log(0.6)) and slope == pytest.approx(-2.4)
    loss, slope, metrics = one_token(0.7, 0.5, 2.0, ops.DPPO())
    assert (loss, slope) == (0, 0) and metrics["clip_fraction_high"] == 1
    assert one_token(0.7, 0.5, -2.0, ops.DPPO())[1] == pytest.approx(2 * 1.4), "a step back is never too far"
    loss, slope, metrics = one_token(0.3, 0.5, -2.0, ops.DPPO())
    assert (loss, slope) == (0, 0) and metrics["clip_fraction_low"] == 1
    assert one_token(0.03, 0.01, 1.0, ops.DPPO())[1] == pytest.approx(-3.0)
    _, slope, metrics = one_token(0.03, 0.01, 1.0, ops.DPPO(cap=2.0))
    assert slope == pytest.approx(-2.0) and metrics["dual_clip_fraction"] == 1


def test_dppo_by_kl() -> None:
    """KL(coin 0.5 || coin 0.7) = 0.5 log(0.5 / 0.7) + 0.5 log(0.5 / 0.3) = 0.0872, above the limit of 0.05."""
    assert one_token(0.7, 0.5, 1.0, ops.DPPO("kl"))[1] == 0
    assert one_token(0.7, 0.5, 1.0, ops.DPPO("kl", high=0.0873))[1] == pytest.approx(-1.4)
    assert one_token(0.7, 0.5, 1.0, ops.DPPO("kl", high=0.0871))[1] == 0
    assert one_token(0.7, 0.5, -1.0, ops.DPPO("kl", low=0.01))[1] == pytest.approx(1.4)


def test_dro() -> None:
    """A = 2, log-ratio log 1.2 = 0.18232, beta 0.5: -2 log 0.6 + 0.25 * 0.18232**2 = 1.02996."""
    loss, slope, _ = one_token(0.6, 0.5, 2.0, ops.DRO(0.5))
    assert loss == pytest.approx(1.02996, abs=1e-5) and slope == pytest.approx(-2 + 0.5 * 0.18232, abs=1e-5)


def test_vespo() -> None:
    """phi(1) = 1. For w = 2 and A > 0, phi = e^3 2^2 e^-6 = 4 e^-3 = 0.19915; for A < 0, e^2 2^3 e^-4 = 1.08268."""
    assert one_token(0.5, 0.5, 1.0, ops.VESPO())[1] == pytest.approx(-1.0)
    assert one_token(0.8, 0.4, 1.0, ops.VESPO())[1] == pytest.approx(-0.19915, abs=1e-5)
    assert one_token(0.8, 0.4, -1.0, ops.VESPO())[1] == pytest.approx(1.08268, abs=1e-5)


def test_vespo_takes_the_weights_into_its_ratio() -> None:
    """Two tokens with ratios 2 and 1, sampled at weights 0.5 and 3, the second capped at 1.5: w = 2 * 0.5 * 1.5."""
    lp = torch.tensor([[0.8, 0.5]], dtype=torch.float64).log()
    old = torch.tensor([[0.4, 0.5]], dtype=torch.float64).log()
    rollout = old - torch.tensor([[0.5, 3.0]], dtype=torch.float64).log()
    arguments = {"logprobs": lp, "old_logprobs": old, "rollout_logprobs": rollout, "advantages": torch.ones(1)}
    _, grad = run(arguments, variant=ops.VESPO(), correction=TOKEN)
    phi = math.exp(3) * 1.5**2 * math.exp(-4.5)
    assert grad.tolist() == [pytest.approx([-phi / 2] * 2)]
    # A rejected token has weight 0, so the sequence's ratio is 1e-8: it trains nothing.
    _, grad = run(arguments, variant=ops.VESPO(), correction=ops.ImportanceCorrection("token", 1.5, bounds=(0.1, 2.0)))
    assert grad.abs().max() < 1e-14


def test_luspo_weighs_a_sequence_by_its_length() -> None:
    """On-policy each token has gradient -A / rows: the long row counts four times, with GSPO's aggregation once."""
    lp = torch.zeros(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    arguments = {"logprobs": lp, "old_logprobs": lp, "advantages": torch.tensor([1.0, 1.0]), "mask": mask}
    _, grad = run(arguments, variant=ops.LUSPO(), aggregation="seq-mean-token-sum")
    assert grad.tolist() == [[-0.5] * 4, [-0.5, 0, 0, 0]]
    _, grad = run(arguments, variant=ops.GSPO(), aggregation="seq-mean-token-mean")
    assert grad.tolist() == [[-0.125] * 4, [-0.5, 0, 0, 0]]


def test_luspo_is_served_by_the_kernels_of_gspo(make_batch, target) -> None:
    batch = target.on(make_batch(4, kl=ops.KL("k3", 0.1, importance_weighted=True)).padded(torch.float32))
    how = {"aggregation": "seq-mean-token-sum", "backend": target.backend}
    got, grad = run(batch, variant=ops.LUSPO(0.05, 0.1), **how)
    want, want_grad = run(batch, variant=ops.GSPO(0.05, 0.1), **how)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad) and grad.abs().max() > 0


# ---------------------------------------------------------------------------------------------------------------------
# In one op with what comes before, and with what makes no sense
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", [*UNFUSED, ops.LUSPO(0.01, 0.02)], ids=str)
def test_from_hidden_states_and_token_rewards(variant) -> None:
    """Head and loss in one, and rewards to loss in one, equal the ops in turn."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(40, 8)
    targets, advantages, cu = torch.randint(40, (12,)), torch.randn(3), torch.tensor([0, 5, 6, 12])
    how = {"cu_seqlens": cu, "variant": variant, "aggregation": "seq-mean-token-sum"}
    logprobs = ops.linear_logprob(hidden, weight, targets)
    old = (logprobs + 0.1 * torch.randn(12)).detach().clamp(max=-0.01)
    losses = [ops.policy_loss(logprobs, old, advantages, **how).loss]
    losses.append(ops.linear_policy_loss(hidden, weight, targets, old, advantages, **how).loss)
    grads = [torch.autograd.grad(loss, hidden)[0] for loss in losses]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)
    assert grads[0].abs().max() > 1e-3
    rewards, ids = torch.zeros(12).index_fill(0, torch.tensor([4]), 1.0), torch.zeros(3, dtype=torch.int64)
    result = ops.grouped_policy_loss(logprobs.detach(), old, rewards, ids, **how)
    want = ops.policy_loss(logprobs.detach(), old, result.advantages, **how).loss
    torch.testing.assert_close(result.loss, want)
    assert result.advantages[0] > 1


def test_what_makes_no_sense_together_raises() -> None:
    streams = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2)
    with pytest.raises(ValueError, match=r"aggregation='token-mean': expected 'seq-mean-token-sum' or .*LUSPO"):
        ops.policy_loss(*streams, variant=ops.LUSPO())
    ops.policy_loss(*streams, variant=ops.LUSPO(), aggregation="seq-mean-token-sum-norm", max_length=3)
    with pytest.raises(ValueError, match="expected level='token', as VESPO"):
        ops.policy_loss(
            *streams,
            variant=ops.VESPO(),
            correction=ops.ImportanceCorrection("sequence"),
            rollout_logprobs=torch.zeros(2, 3),
        )
    for variant in UNFUSED:
        with pytest.raises(ops.BackendUnavailable, match=f"variant is a {type(variant).__name__}, which only the ref"):
            ops.policy_loss(*streams, variant=variant, backend="native")
