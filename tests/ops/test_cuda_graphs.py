"""No op waits for the GPU: a CUDA graph of each gives, on new inputs, the bits of a plain call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise import ops

LENGTHS = [0, 1, 33, 40, 126]
ROWS, WIDTH, TOKENS = len(LENGTHS), 133, sum(LENGTHS)
HIDDEN, VOCABULARY, ACTORS = 32, 300, 3

Inputs = dict[str, Tensor]
CASES: dict[str, Callable[[Inputs, str], list[Tensor]]] = {}


def case(function: Callable[[Inputs, str], list[Tensor]]) -> Callable[[Inputs, str], list[Tensor]]:
    CASES[function.__name__] = function
    return function


def make(seed: int, device: str) -> Inputs:
    """Of one shape whatever the seed; lengths of rows, masks and ids differ too."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.tensor(LENGTHS)[torch.randperm(ROWS, generator=generator)]
    padded = {name: 0.4 * noise(ROWS, WIDTH) - 2 for name in ("lp", "old", "ref", "rollout", "rewards", "values")}
    packed = {f"packed_{name}": 0.4 * noise(TOKENS) - 2 for name in padded}
    drawn = {
        **padded,
        **packed,
        "mask": torch.rand(ROWS, WIDTH, generator=generator) < 0.8,
        "packed_mask": torch.rand(TOKENS, generator=generator) < 0.8,
        "lengths": lengths,
        "cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        "advantages": noise(ROWS),
        "actor_ids": torch.randint(ACTORS, (ROWS,), generator=generator),
        "scores": noise(64),
        "group_ids": torch.randint(9, (64,), generator=generator),
        "trajectory_ids": torch.randint(20, (64,), generator=generator),
        "row_groups": torch.randint(2, (ROWS,), generator=generator),
        "hidden": noise(TOKENS, HIDDEN),
        "weight": 0.4 * noise(VOCABULARY, HIDDEN),
        "bias": noise(VOCABULARY),
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=generator),
        "positions": torch.randint(TOKENS, (TOKENS,), generator=generator),
        "logits": noise(TOKENS, VOCABULARY),
    }
    return {name: values.to(device) for name, values in drawn.items()}


def leaves(x: Inputs, *names: str) -> list[Tensor]:
    return [x[name].detach().requires_grad_() for name in names]


def of_loss(result: Any, over: list[Tensor]) -> list[Tensor]:
    """Loss, metrics and the gradients of twice the loss, so that a factor other than 1 is captured."""
    grads = torch.autograd.grad(result.loss * 2, over)
    return [result.loss.detach(), *result.metrics.values(), *result.actor_metrics.values(), *grads]


@case
def group_advantage(x: Inputs, backend: str) -> list[Tensor]:
    rules: list[dict[str, Any]] = [
        {},
        {"num_groups": 9, "center": "leave_one_out", "scale": "none"},
        {"num_groups": 9, "pool": "trajectory", "trajectory_ids": x["trajectory_ids"]},
    ]
    return [ops.group_advantage(x["scores"], x["group_ids"], **rule, backend=backend) for rule in rules]


@case
def token_reward_sum(x: Inputs, backend: str) -> list[Tensor]:
    return [
        ops.token_reward_sum(x["rewards"], mask=x["mask"], backend=backend),
        ops.token_reward_sum(x["rewards"], lengths=x["lengths"], backend=backend),
        ops.token_reward_sum(x["packed_rewards"], cu_seqlens=x["cu_seqlens"], backend=backend),
    ]


@case
def token_returns(x: Inputs, backend: str) -> list[Tensor]:
    return [
        ops.token_returns(x["rewards"], 0.97, mask=x["mask"], backend=backend),
        ops.token_returns(x["packed_rewards"], 0.97, cu_seqlens=x["cu_seqlens"], backend=backend),
    ]


@case
def gae(x: Inputs, backend: str) -> list[Tensor]:
    packed = {"cu_seqlens": x["cu_seqlens"], "gamma": 0.99, "lam": 0.9, "backend": backend}
    return [
        *ops.gae(x["rewards"], x["values"], mask=x["mask"], gamma=0.99, lam=0.9, backend=backend),
        *ops.gae(x["packed_rewards"], x["packed_values"], **packed),
    ]


@case
def policy_loss(x: Inputs, backend: str) -> list[Tensor]:
    results = []
    full = {
        "kl": ops.KL("k3", 0.1, importance_weighted=True),
        "correction": ops.ImportanceCorrection("sequence", 1.5),
        "backend": backend,
    }
    actors = {"aggregation": "agent-mean", "actor_ids": x["actor_ids"], "num_actors": ACTORS}
    for variant in (ops.Clip(0.2, 0.28, dual_clip=3.0), ops.GSPO(), ops.GMPO(), ops.KLCov()):
        for start, form in (("", {"mask": x["mask"]}), ("packed_", {"cu_seqlens": x["cu_seqlens"]})):
            streams = {f"{name}_logprobs": x[start + name] for name in ("old", "ref", "rollout")}
            lp = leaves(x, f"{start}lp")
            given = {**streams, **form, **full, **actors, "variant": variant}
            results += of_loss(ops.policy_loss(*lp, advantages=x["advantages"], **given), lp)
    lp = leaves(x, "lp")
    number = ops.policy_loss(*lp, x["old"], x["advantages"], mask=x["mask"], normalizer=100.0, backend=backend)
    return results + of_loss(number, lp)


@case
def grouped_policy_loss(x: Inputs, backend: str) -> list[Tensor]:
    results = []
    for start, form in (("", {"mask": x["mask"]}), ("packed_", {"cu_seqlens": x["cu_seqlens"]})):
        lp = leaves(x, f"{start}lp")
        streams = x[f"{start}old"], x[f"{start}rewards"], x["row_groups"]
        result = ops.grouped_policy_loss(*lp, *streams, num_groups=2, backend=backend, **form)
        results += [*of_loss(result, lp), result.advantages]
    return results


@case
def linear_logprob(x: Inputs, backend: str) -> list[Tensor]:
    results = []
    for options in ({}, {"positions": x["positions"]}):
        hidden, weight, bias = over = leaves(x, "hidden", "weight", "bias")
        given = {"bias": bias, "temperature": 0.9, "entropy": True, "backend": backend, **options}
        values = ops.linear_logprob(hidden, weight, x["targets"], **given)
        grads = torch.autograd.grad(sum(v.sum() for v in values), over)
        results += [*(v.detach() for v in values), *grads]
    return results


@case
def linear_policy_loss(x: Inputs, backend: str) -> list[Tensor]:
    results = []
    streams = {"cu_seqlens": x["cu_seqlens"], "mask": x["packed_mask"], "bias": x["bias"], "backend": backend}
    for options in (
        {"aggregation": "agent-mean", "actor_ids": x["actor_ids"], "num_actors": ACTORS},
        {"variant": ops.GSPO(), "entropy": True},
        {"positions": x["positions"], "normalizer": 100.0},
    ):
        over = leaves(x, "hidden", "weight")
        given = x["targets"], x["packed_old"], x["advantages"]
        results += of_loss(ops.linear_policy_loss(*over, *given, **streams, **options), over)
    return results


@case
def logprob(x: Inputs, backend: str) -> list[Tensor]:
    results = []
    for in_place in (False, True):
        over = leaves(x, "logits")
        given = {"entropy": True, "inplace_backward": in_place, "backend": backend}
        values = ops.logprob(over[0] * 1.5, x["targets"], **given)
        results += [*(v.detach() for v in values), *torch.autograd.grad(sum(v.sum() for v in values), over)]
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_a_captured_op_replays_with_the_bits_of_a_plain_call(name, backend) -> None:
    call, held = CASES[name], make(0, "cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what happens once, such as compiling, must not be captured
        for _ in range(2):
            call(held, backend)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(held, backend)
    for seed in (1, 2):
        new = make(seed, "cuda")
        for key, values in held.items():
            values.copy_(new[key])
        graph.replay()
        for got, want in zip(captured, call(new, backend), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_sound_where_there_is_no_gpu(name) -> None:
    """Its results are numbers and follow the inputs, and a second call on the same inputs gives the same bits."""
    first, again, other = (CASES[name](make(seed, "cpu"), "native") for seed in (1, 1, 2))
    assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [a.shape for a in first] == [b.shape for b in other]
    assert sum(not torch.equal(a, b) for a, b in zip(first, other, strict=True)) > len(first) / 2


def test_every_op_of_a_gpu_has_a_case() -> None:
    # what has no kernels of its own for a GPU, and what waits for other processes
    others = {"factorize", "available_backends", "backend", "loss_normalizer", "aggregate", "select_tokens"}
    others |= {"value_loss", "optimal_token_baseline", "top_entropy_mask", "off_policy_mask", "rejection_mask"}
    others |= {name for name in ops.__all__ if "_parallel_" in name}
    functions = {n for n in ops.__all__ if callable(getattr(ops, n)) and not isinstance(getattr(ops, n), type)}
    assert set(CASES) == functions - others
