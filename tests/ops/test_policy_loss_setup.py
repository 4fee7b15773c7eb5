"""Custom losses, tokens selected beforehand, normalisers, and values aggregated as the loss is."""

from __future__ import annotations

import pytest
import torch

from turnwise import ops

from .definition import run


def ppo(logprobs, old_logprobs, advantages):
    ratio = (logprobs - old_logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))


# ---------------------------------------------------------------------------------------------------------------------
# Custom
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("aggregation", ops.AGGREGATIONS)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_the_same_formula_as_a_function_gives_the_same(make_batch, form, aggregation) -> None:
    correction = ops.ImportanceCorrection("token", 1.5)
    batch = make_batch(3, kl=ops.KL("k2", 0.3), correction=correction, aggregation=aggregation)
    want, want_grad = run(getattr(batch, form)(variant=ops.Clip(0.2, 0.28)))
    got, grad = run(getattr(batch, form)(variant=ops.Custom(ppo)))
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
        variant=ops.Custom(strict),
    )
    assert result.loss.item() == pytest.approx((7 + 14 + 27) / 3)
    torch.testing.assert_close(grad, torch.tensor([[-7.0, 0, -7], [-9, 0, 0]]) / 3)


def test_what_is_no_loss_per_token_is_rejected() -> None:
    streams = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2)
    for function in (lambda lp, old, a: (lp * a).mean(), lambda lp, old, a: 1.0, lambda lp, old, a: lp > a):
        with pytest.raises(ValueError, match=r"variant=Custom.* gave .*: expected the loss of each token"):
            ops.policy_loss(*streams, variant=ops.Custom(function))
    with pytest.raises(TypeError, match=r"Custom.function=3: expected a function"):
        ops.Custom(3)
    with pytest.raises(ops.BackendUnavailable, match="variant is a Custom, which only the reference"):
        ops.policy_loss(*streams, variant=ops.Custom(ppo), backend="native")


# ---------------------------------------------------------------------------------------------------------------------
# Selection over a whole step
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("variant", [ops.KLCov(0.2, 0.5), ops.ClipCov(0.1, 0.3, 0.1, 0.05, 3.0)], ids=str)
def test_a_choice_over_the_whole_makes_any_cut_the_same(make_batch, variant, backend) -> None:
    batch = make_batch(5, 12, 30).padded(torch.float32)
    streams = {k: batch[k] for k in ("logprobs", "old_logprobs", "advantages", "mask")}
    torch.manual_seed(3)
    selected = ops.select_tokens(**streams, variant=variant)
    assert 1 < int(selected.sum()) < int(streams["mask"].sum())
    torch.manual_seed(3)
    _, whole = run(streams, variant=variant, backend=backend)
    normalizer = ops.loss_normalizer("token-mean", mask=streams["mask"])
    how = {"variant": variant, "normalizer": normalizer, "backend": backend}
    parts = [
        run({k: v[rows] for k, v in streams.items()}, selected=selected[rows], **how)[1]
        for rows in (slice(0, 1), slice(1, 7), slice(7, 12))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Normalisers, and `aggregate`
# ---------------------------------------------------------------------------------------------------------------------
MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
COUNTS = dict(zip(ops.AGGREGATIONS, [5.0, 2.0, 2.0, 128.0, [5.0, 0.0]], strict=True))


@pytest.mark.parametrize("aggregation", ops.AGGREGATIONS)
def test_a_normalizer_by_hand(aggregation) -> None:
    lengths = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    for layout in (
        {"mask": MASK.bool()},
        {"mask": MASK[MASK.sum(1) > 0].flatten(), "cu_seqlens": torch.tensor([0, 3, 3, 6])},
        {"cu_seqlens": lengths},
    ):
        actors = torch.tensor([0, 1, 0])
        got = ops.loss_normalizer(aggregation, **layout, actor_ids=actors, num_actors=2, max_length=128)
        assert got.tolist() == COUNTS[aggregation] and got.dtype == torch.float32


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("aggregation", ops.AGGREGATIONS)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_aggregate_adds_up_as_the_loss_does(make_batch, form, aggregation, given) -> None:
    arguments = getattr(make_batch(8), form)(variant=ops.Reinforce())
    how = {k: arguments.get(k) for k in ("mask", "cu_seqlens", "actor_ids", "num_actors", "max_length")}
    how |= {"aggregation": aggregation}
    if given:
        how["normalizer"] = ops.loss_normalizer(**how) * 3
    want, want_grad = run({**arguments, **how, "advantages": torch.ones_like(arguments["advantages"])})
    values = (-arguments["logprobs"]).requires_grad_()
    got = ops.aggregate(values, **how)
    got.backward()
    torch.testing.assert_close(got, want.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(values.grad, -want_grad, rtol=1e-10, atol=1e-14)


def test_a_number_normalizes_as_a_tensor_does() -> None:
    values = torch.rand(2, 3)
    assert torch.equal(ops.aggregate(values, normalizer=4.0), ops.aggregate(values, normalizer=torch.tensor(4.0)))
    assert torch.equal(ops.aggregate(values, normalizer=4), values.double().sum().div(4).float())
    with pytest.raises(ValueError, match=r"^normalizer"):
        ops.aggregate(values, normalizer=-1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Loss scales
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", [ops.policy_loss, ops.grouped_policy_loss])
def test_a_loss_scale_saves_what_float16_would_lose(target, op) -> None:
    """A token of 65,536 has a gradient near 1e-5, where float16 has steps of 6e-8: a loss scale, as
    `torch.amp.GradScaler` has one, must come before the rounding."""
    rows, width = (8, 64) if target.simulated else (64, 1024)
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(rows, width, generator=generator)).half()
    old = (logprobs.float() + 0.1 * torch.randn(rows, width, generator=generator)).half()
    rewards, ids = torch.randn(rows, width, generator=generator), torch.arange(rows) // 4
    grads = []
    for dtype, backend in ((torch.float64, "torch"), (torch.float16, target.backend)):
        leaf = target.on(logprobs).to(dtype).requires_grad_()
        streams = target.on((old.to(dtype), *([rewards[:, 0]] if op is ops.policy_loss else [rewards, ids])))
        loss = op(leaf, *streams, normalizer=2.0**20, backend=backend).loss
        (loss * 65536.0).backward()
        assert leaf.grad.dtype == dtype
        grads.append(leaf.grad.double())
    assert (grads[1] - grads[0]).norm() < 1e-3 * grads[0].norm()
