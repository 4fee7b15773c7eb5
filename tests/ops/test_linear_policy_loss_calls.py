"""What a caller may count on: the same draw as the two ops make, micro-batches, loss scales, autocast, mistakes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import (
    SAPO,
    ClipCov,
    Custom,
    KLCov,
    linear_logprob,
    linear_policy_loss,
    loss_normalizer,
    policy_loss,
    select_tokens,
)

CHUNKS = sys.modules["turnwise.ops.loss.linear_policy_loss"]  # the package has a function of that name
LENGTHS = [7, 0, 1, 30, 12]


def make(seed: int, tokens: int = sum(LENGTHS), dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = noise(tokens, 24).to(dtype), (0.4 * noise(300, 24)).to(dtype)
    targets = torch.randint(300, (tokens,), generator=generator)
    exact = linear_logprob(hidden.double(), weight.double(), targets).float()
    return {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "old_logprobs": exact + 0.4 * noise(tokens),
        "advantages": noise(tokens),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0) if tokens == sum(LENGTHS) else torch.tensor([0, tokens]),
        "mask": torch.rand(tokens, generator=generator) < 0.8,
    }


def gradients(given: dict[str, Any], target: Any, two: bool = False, factor: float = 1.0, **options: Any) -> Any:
    """Loss and gradients of ``factor`` times it, by one op or by two."""
    given = {k: v.to(target.device) for k, v in given.items()}
    leaves = [given.pop(k).clone().requires_grad_() for k in ("hidden", "weight")]
    if two:
        logprob = linear_logprob(*leaves, given.pop("targets"), backend=target.backend)
        assert isinstance(logprob, Tensor)
        result = policy_loss(logprob, **given, **options)
    else:
        result = linear_policy_loss(*leaves, **given, **options, backend=target.backend)
    (result.loss * factor).backward()
    return result, [leaf.grad for leaf in leaves]


def ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    calls.append(logprobs.detach().clone())
    return -advantages * (logprobs - old_logprobs).exp()


calls: list[Tensor] = []


@pytest.mark.parametrize(
    "variant", [ClipCov(0.1, 0.3, 0.1, 0.05, 3.0), KLCov(0.2, 0.5), Custom(ppo)], ids=lambda v: type(v).__name__
)
def test_chooses_the_tokens_that_the_two_ops_choose(target, variant) -> None:
    """One draw from torch's generator, and one call of a function of one's own, with log-probabilities alone."""
    given = make(1)
    results = []
    for two in (True, False):
        calls.clear()
        torch.manual_seed(3)
        results.append(gradients(given, target, two, variant=variant, aggregation="seq-mean-token-mean"))
        results[-1][1].append(torch.rand(1))  # the generator stands where it stood
        assert len(calls) == isinstance(variant, Custom)
        assert all((call < 0).all() for call in calls)
    (want, want_grads), (got, grads) = results
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grads, want_grads, rtol=1e-5, atol=1e-7)
    assert got.metrics["dual_clip_fraction"] == want.metrics["dual_clip_fraction"]


@pytest.mark.parametrize(
    "variant", [KLCov(0.2, 0.5), ClipCov(0.1, 0.3, 0.1, 0.05, 3.0)], ids=lambda v: type(v).__name__
)
def test_a_choice_over_the_whole_makes_any_cut_the_same(target, variant) -> None:
    given = make(2)
    logprob = linear_logprob(given["hidden"], given["weight"], given["targets"])
    assert isinstance(logprob, Tensor)
    streams = {k: given[k] for k in ("old_logprobs", "advantages", "mask", "cu_seqlens")}
    torch.manual_seed(3)
    selected = select_tokens(logprob, variant=variant, **streams)
    assert 1 < int(selected.sum()) < int(given["mask"].sum())
    torch.manual_seed(3)
    _, want = gradients(given, target, variant=variant)
    normalizer = loss_normalizer("token-mean", mask=given["mask"], cu_seqlens=given["cu_seqlens"])
    total = torch.zeros_like(given["weight"])
    for first, last in ((0, 3), (3, 5)):
        cu = given["cu_seqlens"][first : last + 1]
        cut = slice(int(cu[0]), int(cu[-1]))
        part = {k: v if k == "weight" else v[cut] for k, v in given.items()} | {"cu_seqlens": cu - cu[0]}
        chosen = selected[cut].to(target.device)
        options = {"variant": variant, "normalizer": normalizer.to(target.device), "selected": chosen}
        total += gradients(part, target, **options)[1][1].cpu()
    torch.testing.assert_close(total, want[1].cpu(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tokens", [64, 20_000])
def test_a_loss_scale_saves_what_float16_would_lose(target, tokens) -> None:
    """A token of 20,000 has a gradient near 1e-5 in its log-probability, near 1e-8 in most logits: float16 has neither.
    As `torch.amp.GradScaler` does, the loss is scaled and gradients are in range again."""
    if tokens > 64 and (target.emulated or (target.backend == "triton" and target.device == "cpu")):
        tokens = 300
    given = make(3, tokens, torch.float16)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    _, want = gradients(exact, target._replace(backend="torch"), two=True, factor=65536.0, variant=SAPO())
    _, got = gradients(given, target, factor=65536.0, variant=SAPO())
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float16
        assert (mine.double() - theirs).norm() < 1e-3 * theirs.norm()
    if target.backend == "native":  # chunks and the sums of float16 alike
        hidden = given["hidden"].to(target.device).requires_grad_()
        rest = {k: v.to(target.device) for k, v in given.items() if k != "hidden"}
        loss = linear_policy_loss(hidden, **rest, variant=SAPO(), backend=target.backend).loss
        (loss * 65536.0).backward(retain_graph=True)
        once = hidden.grad.clone()
        (loss * 65536.0).backward()
        assert torch.equal(hidden.grad, 2 * once)
