"""The three ops in one call equal the three ops in turn, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from turnwise.ops import (
    AGGREGATIONS,
    GMPO,
    GSPO,
    KL,
    Clip,
    ImportanceCorrection,
    KLCov,
    group_advantage,
    grouped_policy_loss,
    policy_loss,
    token_reward_sum,
)

GROUP_OPTIONS = ("num_groups", "trajectory_ids", "lengths", "pool", "center", "scale", "singleton", "ddof", "valid")


def inputs(make_batch, seed: int, form: str = "padded", rows: int = 24, width: int = 37, **options: Any) -> dict:
    """The arguments of one call, rows in groups of about four."""
    dtype = options.pop("dtype", torch.float32)
    batch = make_batch(seed, rows, width, **options)
    arguments = getattr(batch, form)(dtype)
    generator = torch.Generator().manual_seed(seed)
    del arguments["advantages"]
    rewards = torch.randn(arguments["logprobs"].shape, generator=generator) * (
        torch.rand(arguments["logprobs"].shape, generator=generator) < 0.2
    )
    group_ids = torch.randint(0, max(rows // 4, 1), (rows,), generator=generator)
    return {**arguments, "token_rewards": rewards.to(dtype), "group_ids": group_ids}


def on(target, arguments: dict) -> dict:
    moved = {k: v.to(target.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return {**moved, "backend": target.backend}


def in_turn(arguments: dict) -> tuple[Any, torch.Tensor, torch.Tensor]:
    arguments = dict(arguments)
    shared = {"backend": arguments.get("backend")}
    sums = token_reward_sum(
        arguments.pop("token_rewards"), mask=arguments.get("mask"), cu_seqlens=arguments.get("cu_seqlens"), **shared
    )
    rule = {k: arguments.pop(k) for k in GROUP_OPTIONS if k in arguments}
    advantages = group_advantage(sums, arguments.pop("group_ids"), **rule, **shared)
    logprobs = arguments.pop("logprobs").clone().requires_grad_()
    result = policy_loss(logprobs, advantages=advantages, **arguments)
    (result.loss * 2).backward()
    return result, advantages, logprobs.grad


def at_once(arguments: dict) -> tuple[Any, torch.Tensor, torch.Tensor]:
    arguments = dict(arguments)
    logprobs = arguments.pop("logprobs").clone().requires_grad_()
    result = grouped_policy_loss(logprobs, **arguments)
    (result.loss * 2).backward()
    return result, result.advantages, logprobs.grad


def assert_same(got, want, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got[0].loss, want[0].loss, rtol=rtol, atol=atol, check_dtype=False)
    torch.testing.assert_close(got[1], want[1], rtol=rtol, atol=atol, check_dtype=False)
    largest = want[2].abs().max().item() if want[2].numel() else 0.0
    torch.testing.assert_close(got[2], want[2], rtol=rtol, atol=atol * largest, check_dtype=False)
    for name, value in want[0].metrics.items():
        torch.testing.assert_close(got[0].metrics[name], value, rtol=rtol, atol=atol, msg=name)
    for name, value in want[0].actor_metrics.items():
        torch.testing.assert_close(got[0].actor_metrics[name], value, rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("rows", "width"), [(24, 37), (3, 1), (5, 700), (0, 4), (4, 0)])
def test_equals_the_ops_in_turn(make_batch, target, form, aggregation, rows, width) -> None:
    kl = KL("k3", 0.1, importance_weighted=form == "padded")
    arguments = inputs(make_batch, rows + width, form, rows, width, kl=kl, clip=Clip(dual_clip=3.0))
    arguments = on(target, {**arguments, "aggregation": aggregation})
    assert_same(at_once(arguments), in_turn(arguments))


@pytest.mark.parametrize("variant", [GSPO(0.05, 0.1), GMPO(0.2, 0.3), KLCov(0.2, 0.5)], ids=str)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_variants(make_batch, target, form, variant) -> None:
    options = {"correction": ImportanceCorrection("sequence", 1.5), "kl": KL("k3", 0.1, importance_weighted=True)}
    arguments = on(target, inputs(make_batch, 5, form, variant=variant, **options))
    assert_same(at_once(arguments), in_turn(arguments))


@pytest.mark.parametrize(
    "rule",
    [
        {"center": "leave_one_out", "scale": "none"},
        {"center": "length_weighted"},
        {"pool": "trajectory"},
        {"singleton": "raw", "num_groups": 30},
        {"ddof": 0, "valid": torch.arange(24) % 5 != 0},
        {"center": "none", "scale": "none"},
    ],
    ids=str,
)
def test_rules(make_batch, target, rule) -> None:
    arguments = {**inputs(make_batch, 9), **rule}
    if rule.get("center") == "length_weighted":
        arguments["lengths"] = arguments["mask"].sum(1)
    if rule.get("pool") == "trajectory":
        arguments["trajectory_ids"] = torch.arange(24) // 2
    arguments = on(target, arguments)
    assert_same(at_once(arguments), in_turn(arguments))


def test_native_gives_the_same_bits_as_the_ops_in_turn(make_batch) -> None:
    arguments = inputs(make_batch, 6, rows=40, width=900, kl=KL("k3", 0.1)) | {"backend": "native"}
    got, want = at_once(arguments), in_turn(arguments)
    assert torch.equal(got[0].loss, want[0].loss)
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])


@pytest.mark.parametrize("aggregation", ["token-mean", "agent-mean"])
def test_many_actors(kernel, make_batch, aggregation: str) -> None:
    """More actors than shared memory has room for, half of them without a row."""
    arguments = inputs(make_batch, 4, "packed", rows=40, width=23, aggregation=aggregation)
    arguments |= {"actor_ids": torch.arange(40) * 7 % 40 * 2, "num_actors": 80}
    arguments = on(kernel, arguments)
    assert_same(at_once(arguments), in_turn(arguments))
