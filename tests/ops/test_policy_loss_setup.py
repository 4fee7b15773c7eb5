"""Losses of one's own, tokens singled out beforehand, and values added up as the loss is."""

from __future__ import annotations

import pytest
import torch

from turnwise.ops import (
    AGGREGATIONS,
    KL,
    BackendUnavailable,
    Clip,
    ClipCov,
    Custom,
    ImportanceCorrection,
    KLCov,
    Reinforce,
    aggregate,
    grouped_policy_loss,
    linear_policy_loss,
    loss_normalizer,
    policy_loss,
    select_tokens,
)


def ppo(logprobs, old_logprobs, advantages):
    ratio = (logprobs - old_logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))


def run(arguments, **changes):
    arguments = {**arguments, **changes}
    logprobs = arguments.pop("logprobs").clone().requires_grad_()
    result = policy_loss(logprobs, **arguments)
    result.loss.backward()
    return result, logprobs.grad


# ---------------------------------------------------------------------------------------------------------------------
# Custom
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_the_same_formula_as_a_function_gives_the_same(make_batch, form, aggregation) -> None:
    correction = ImportanceCorrection("token", 1.5)
    batch = make_batch(3, kl=KL("k2", 0.3), correction=correction)
    batch.options |= {"aggregation": aggregation}
    want, want_grad = run(getattr(batch, form)(variant=Clip(0.2, 0.28)))
    got, grad = run(getattr(batch, form)(variant=Custom(ppo)))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-14)
    assert want.metrics["clip_fraction_high"] > 0
    for name in set(want.metrics) - {"clip_fraction_low", "clip_fraction_high"}:
        assert got.metrics[name].item() == pytest.approx(want.metrics[name].item(), rel=1e-6), name


def test_a_function_sees_the_tokens_that_train_alone() -> None:
    def strict(logprobs, old_logprobs, advantages):
        assert logprobs.tolist() == [-1.0, -2.0, -3.0] and old_logprobs.tolist() == [-1.5, -2.5, -3.5]
        assert advantages.tolist() == [7.0, 7.0, 9.0]
        return -advantages * logprobs

    values = torch.tensor([[-1.0, float("nan"), -2.0], [-3.0, 0.0, float("inf")]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    result, grad = run(
        {"logprobs": values, "old_logprobs": values - 0.5, "advantages": torch.tensor([7.0, 9.0]), "mask": mask},
        variant=Custom(strict),
    )
    assert result.loss.item() == pytest.approx((7 + 14 + 27) / 3)
    torch.testing.assert_close(grad, torch.tensor([[-7.0, 0, -7], [-9, 0, 0]]) / 3)


def test_what_is_no_loss_per_token_is_refused() -> None:
    streams = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2)
    for function in (lambda lp, old, a: (lp * a).mean(), lambda lp, old, a: 1.0, lambda lp, old, a: lp > a):
        with pytest.raises(ValueError, match=r"variant=Custom.* gave .*: expected the loss of each token"):
            policy_loss(*streams, variant=Custom(function))
    with pytest.raises(TypeError, match=r"Custom.function=3: expected a function"):
        Custom(3)
    with pytest.raises(BackendUnavailable, match="variant is a Custom, which only the reference"):
        policy_loss(*streams, variant=Custom(ppo), backend="native")


def test_from_hidden_states_too() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(40, 8)
    rest = torch.randint(40, (12,)), -torch.rand(12) * 4, torch.randn(3)
    grads = []
    for variant in (Custom(ppo), Clip(0.2, 0.28)):
        linear_policy_loss(
            hidden, weight, *rest, cu_seqlens=torch.tensor([0, 5, 6, 12]), variant=variant
        ).loss.backward()
        grads.append(hidden.grad)
        hidden.grad = None
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Selection over a whole step
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("variant", [KLCov(0.2, 0.5), ClipCov(0.1, 0.3, 0.1, 0.05, 3.0)], ids=str)
def test_a_choice_over_the_whole_makes_any_cut_the_same(make_batch, variant, backend) -> None:
    batch = make_batch(5, 12, 30).padded(torch.float32)
    streams = {k: batch[k] for k in ("logprobs", "old_logprobs", "advantages", "mask")}
    torch.manual_seed(3)
    selected = select_tokens(**streams, variant=variant)
    assert 1 < int(selected.sum()) < int(streams["mask"].sum())
    torch.manual_seed(3)
    _, whole = run(streams, variant=variant, backend=backend)
    normalizer = loss_normalizer("token-mean", mask=streams["mask"])
    parts = [
        run(
            {k: v[rows] for k, v in streams.items()},
            variant=variant,
            selected=selected[rows],
            normalizer=normalizer,
            backend=backend,
        )[1]
        for rows in (slice(0, 1), slice(1, 7), slice(7, 12))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=0)


def test_a_choice_that_does_not_fit_is_named() -> None:
    streams = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2)
    chosen = torch.zeros(2, 3, dtype=torch.bool)
    for selected, variant, error, message in (
        (chosen, Clip(), ValueError, "selected: expected None, as variant=Clip"),
        (chosen[:1], KLCov(), ValueError, r"selected has shape \(1, 3\): expected \(2, 3\)"),
        (chosen.int(), KLCov(), TypeError, "expected a bool tensor"),
    ):
        with pytest.raises(error, match=message):
            policy_loss(*streams, variant=variant, selected=selected)
    with pytest.raises(TypeError, match="expected one that singles out tokens, ClipCov or KLCov"):
        select_tokens(*streams, Reinforce())


# ---------------------------------------------------------------------------------------------------------------------
# aggregate
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_aggregate_adds_up_as_the_loss_does(make_batch, form, aggregation, given) -> None:
    arguments = getattr(make_batch(8), form)(variant=Reinforce())
    how = {k: arguments.get(k) for k in ("mask", "cu_seqlens", "actor_ids", "num_actors", "max_length")}
    how |= {"aggregation": aggregation}
    if given:
        how["normalizer"] = loss_normalizer(**how) * 3
    want, want_grad = run({**arguments, **how, "advantages": torch.ones_like(arguments["advantages"])})
    values = (-arguments["logprobs"]).requires_grad_()
    got = aggregate(values, **how)
    got.backward()
    torch.testing.assert_close(got, want.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(values.grad, -want_grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"values": torch.zeros(2, 3).int()}, TypeError, "values: expected a tensor of floats"),
        ({"values": torch.zeros(3), "mask": torch.ones(3)}, ValueError, r"values has shape \(3,\): expected \[B, T\]"),
        ({"values": torch.zeros(2, 3), "mask": torch.ones(2, 2)}, ValueError, r"mask has shape \(2, 2\)"),
        ({"values": torch.zeros(2, 3), "aggregation": "sum"}, ValueError, "aggregation='sum'"),
        ({"values": torch.zeros(2, 3), "normalizer": torch.ones(3)}, ValueError, r"normalizer has shape \(3,\)"),
        ({"values": torch.zeros(2, 3), "normalizer": "5"}, TypeError, "normalizer: expected a number or a tensor"),
        ({"values": torch.zeros(2, 3), "normalizer": -1.0}, ValueError, "normalizer=-1.0: expected counts >= 0"),
        ({"values": torch.zeros(2, 3), "mask": [[1]]}, TypeError, "mask: expected a tensor, got list"),
        ({"values": torch.zeros(2, 3), "mask": torch.full((2, 3), 0.5)}, ValueError, r"mask\[0, 0\]=0\.5"),
    ],
)
def test_aggregate_names_mistakes(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        aggregate(**{"mask": torch.ones(2, 3), **arguments})


def test_a_number_normalizes_as_a_tensor_does() -> None:
    values = torch.rand(2, 3)
    assert torch.equal(aggregate(values, normalizer=4.0), aggregate(values, normalizer=torch.tensor(4.0)))
    assert torch.equal(aggregate(values, normalizer=4), values.double().sum().div(4).float())


# ---------------------------------------------------------------------------------------------------------------------
# Loss scales
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("grouped", [False, True])
def test_a_loss_scale_saves_what_float16_would_lose(target, grouped) -> None:
    """A token of 65,536 has a gradient near 1e-5, where float16 has steps of 6e-8: a loss scale, as
    `torch.amp.GradScaler` has one, must come before the rounding."""
    small = target.emulated or (target.backend == "triton" and target.device == "cpu")
    rows, width = (8, 64) if small else (64, 1024)
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(rows, width, generator=generator)).half()
    old = (logprobs.float() + 0.1 * torch.randn(rows, width, generator=generator)).half()
    rewards, ids = torch.randn(rows, width, generator=generator), torch.arange(rows) // 4
    grads = []
    for dtype, backend in ((torch.float64, "torch"), (torch.float16, target.backend)):
        leaf = logprobs.to(dtype).to(target.device).requires_grad_()
        streams = leaf, old.to(dtype).to(target.device)
        if grouped:
            given = rewards.to(target.device), ids.to(target.device)
            loss = grouped_policy_loss(*streams, *given, normalizer=2.0**20, backend=backend).loss
        else:
            given = rewards[:, 0].to(target.device)
            loss = policy_loss(*streams, given, normalizer=2.0**20, backend=backend).loss
        (loss * 65536.0).backward()
        assert leaf.grad.dtype == dtype
        grads.append(leaf.grad.double())
    assert (grads[1] - grads[0]).norm() < 1e-3 * grads[0].norm()
