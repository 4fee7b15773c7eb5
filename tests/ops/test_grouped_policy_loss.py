"""The three ops in one call equal the three ops in turn, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise import ops

from .conftest import TARGETS

GROUP_OPTIONS = ("num_groups", "trajectory_ids", "lengths", "pool", "center", "scale", "singleton", "ddof", "valid")
WEIGHTED = {"correction": ops.ImportanceCorrection("sequence", 1.5), "kl": ops.KL("k3", 0.1, importance_weighted=True)}


def inputs(make_batch: Any, seed: int, form: str = "padded", rows: int = 24, width: int = 37, **options: Any) -> dict:
    """The arguments of one call, rows in groups of about four, a reward on every fifth token."""
    arguments = getattr(make_batch(seed, rows, width, **options), form)(torch.float32)
    del arguments["advantages"]
    generator, shape = torch.Generator().manual_seed(seed), arguments["logprobs"].shape
    rewards = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)
    group_ids = torch.randint(0, max(rows // 4, 1), (rows,), generator=generator)
    return {**arguments, "token_rewards": rewards, "group_ids": group_ids}


def in_turn(logprobs: Tensor, token_rewards: Tensor, group_ids: Tensor, **arguments: Any) -> tuple[Any, Tensor]:
    layout, shared = {k: arguments.get(k) for k in ("mask", "cu_seqlens")}, {"backend": arguments["backend"]}
    rule = {k: arguments.pop(k) for k in GROUP_OPTIONS if k in arguments}
    advantages = ops.group_advantage(
        ops.token_reward_sum(token_rewards, **layout, **shared), group_ids, **rule, **shared
    )
    return ops.policy_loss(logprobs, advantages=advantages, **arguments), advantages


def at_once(logprobs: Tensor, **arguments: Any) -> tuple[Any, Tensor]:
    result = ops.grouped_policy_loss(logprobs, **arguments)
    return result, result.advantages


def run(call: Callable[..., tuple[Any, Tensor]], target: Any, arguments: dict[str, Any]) -> list[Tensor]:
    """The gradient of twice the loss, the loss, advantages and metrics."""
    given = target.on(arguments)
    leaf = given.pop("logprobs").clone().requires_grad_()
    result, advantages = call(leaf, **given, backend=target.backend)
    (result.loss * 2).backward()
    return [leaf.grad, result.loss.detach(), advantages, *result.metrics.values(), *result.actor_metrics.values()]


def compare(target: Any, arguments: dict[str, Any]) -> None:
    got, want = (run(call, target, arguments) for call in (at_once, in_turn))
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        largest = theirs.abs().max().item() if i == 0 and theirs.numel() else 1.0
        close = {"rtol": 1e-5, "atol": 1e-6 * largest, "check_dtype": False}
        torch.testing.assert_close(mine, theirs, **close, msg=lambda text, i=i: f"result {i}: {text}")


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("aggregation", ops.AGGREGATIONS)
@pytest.mark.parametrize(("rows", "width"), [(24, 37), (3, 1), (5, 700), (0, 4), (4, 0)])
def test_equals_the_ops_in_turn(make_batch, target, form, aggregation, rows, width) -> None:
    kl = ops.KL("k3", 0.1, importance_weighted=form == "padded")
    given = inputs(make_batch, rows + width, form, rows, width, kl=kl, clip=ops.Clip(dual_clip=3.0))
    compare(target, {**given, "aggregation": aggregation})


@pytest.mark.parametrize("variant", [ops.GSPO(0.05, 0.1), ops.GMPO(0.2, 0.3), ops.KLCov(0.2, 0.5)], ids=str)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_variants(make_batch, target, form, variant) -> None:
    compare(target, inputs(make_batch, 5, form, variant=variant, **WEIGHTED))


RULES: list[dict[str, Any]] = [
    {"center": "leave_one_out", "scale": "none"},
    {"center": "length_weighted", "lengths": torch.arange(24) % 7},
    {"pool": "trajectory", "trajectory_ids": torch.arange(24) // 2},
    {"singleton": "raw", "num_groups": 30},
    {"ddof": 0, "valid": torch.arange(24) % 5 != 0},
    {"center": "none", "scale": "none"},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule))
def test_rules(make_batch, target, rule) -> None:
    compare(target, {**inputs(make_batch, 9), **rule})


def test_native_gives_the_same_bits_as_the_ops_in_turn(make_batch) -> None:
    given = inputs(make_batch, 6, rows=40, width=900, kl=ops.KL("k3", 0.1))
    got, want = (run(call, TARGETS["native"], given) for call in (at_once, in_turn))
    assert all(map(torch.equal, got[:3], want[:3]))


@pytest.mark.parametrize("aggregation", ["token-mean", "agent-mean"])
def test_many_actors(kernel, make_batch, aggregation: str) -> None:
    """More actors than shared memory has room for, half of them without a row."""
    given = inputs(make_batch, 4, "packed", rows=40, width=23, aggregation=aggregation)
    compare(kernel, given | {"actor_ids": torch.arange(40) * 7 % 40 * 2, "num_actors": 80})
