"""The plain PyTorch reference against the definition in Python floats, and its derivatives."""

from __future__ import annotations

import pytest
import torch

from turnwise.ops import AGGREGATIONS, KL, Clip, ImportanceCorrection, policy_loss

TOKEN, SEQUENCE = ImportanceCorrection("token", 1.5), ImportanceCorrection("sequence", 3.0)
OPTIONS = [
    {},
    {"clip": Clip(0.1, 0.3, dual_clip=1.5)},
    {"kl": KL("k1", 0.1)},
    {"kl": KL("abs", 0.1)},
    {"kl": KL("k2", 0.1), "correction": TOKEN},
    {"kl": KL("k3", 0.1), "clip": Clip(dual_clip=3.0)},
    {"kl": KL("k3+", 0.1), "correction": SEQUENCE},
    {"kl": KL("k1+", 0.1)},
]


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_definition(make_batch, form, aggregation, options) -> None:
    batch = make_batch(7, per_token="kl" in options, **options)
    loss, metrics = batch.expected(aggregation)
    got = policy_loss(**getattr(batch, form)(), aggregation=aggregation, backend="torch")
    assert got.loss.item() == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert got.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert got.metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-7), name
        assert got.actor_metrics[name].shape == (3,)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("options", [o for o in OPTIONS if "+" not in str(o)], ids=str)
def test_gradcheck(make_batch, aggregation, options) -> None:
    arguments = make_batch(11, 4, 6, **options).padded()
    logprobs = arguments.pop("logprobs").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, **arguments, aggregation=aggregation, backend="torch").loss, logprobs
    )


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_straight_through_kinds_have_the_gradient_of_k2(make_batch, kind) -> None:
    gradients = []
    for name in (kind, "k2"):
        arguments = make_batch(3, kl=KL(name, 0.5)).padded()
        logprobs = arguments.pop("logprobs").requires_grad_()
        policy_loss(logprobs, **arguments, backend="torch").loss.backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


def test_only_logprobs_get_a_gradient(make_batch) -> None:
    arguments = make_batch(3, kl=KL(), correction=TOKEN).padded()
    others = [name for name in ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")]
    for name in ("logprobs", *others):
        arguments[name].requires_grad_()
    got = policy_loss(**arguments, backend="torch")
    got.loss.backward()
    assert arguments["logprobs"].grad is not None
    assert [arguments[name].grad for name in others] == [None] * 4
    assert not any(metric.requires_grad for metric in got.metrics.values())


def test_far_log_ratios_are_clamped() -> None:
    logprobs = torch.tensor([[0.0, -100.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-100.0, 0.0]], dtype=torch.float64)
    got = policy_loss(logprobs, old, torch.tensor([-1.0], dtype=torch.float64), backend="torch")
    assert got.metrics["ratio_max"].item() == pytest.approx(torch.e**20, rel=1e-6)
    got.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0]]
