"""Rows of few tokens, which share a warp on a GPU: losses and the sum of rewards against float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from turnwise.ops import (
    GMPO,
    GSPO,
    KL,
    Clip,
    ImportanceCorrection,
    group_advantage,
    grouped_policy_loss,
    policy_loss,
    token_reward_sum,
)

# Lengths of rows, repeated until there are enough tokens. 0 is an empty row; 600 has whole steps of a warp.
LENGTHS = {
    "1": [1],
    "7": [7],
    "33": [33],
    "200": [200],
    "empty": [0, 0, 3, 0, 1, 0, 0, 0, 0, 2],
    "short and long": [600, 1, 1, 2, 0, 700, 5, 300, 3, 0, 0, 130],
}
TOKENS = 2300  # more than the emulator's warps take in one turn


def lengths_of(pattern: str, seed: int) -> torch.Tensor:
    """Rows of at least ``TOKENS`` tokens together. In a pattern of several lengths each is up to 2 longer."""
    generator, found = random.Random(seed), []
    while sum(found) < TOKENS:
        for length in LENGTHS[pattern]:
            found.append(length + generator.randrange(3) * (length > 0 and len(LENGTHS[pattern]) > 1))
    return torch.tensor(found)


@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("actors", [0, 3])
@pytest.mark.parametrize("per_token", [False, True])
def test_policy_loss(kernel, pattern: str, dtype: torch.dtype, rtol: float, actors: int, per_token: bool) -> None:
    """Packed rows. The mask has holes, with NaN there. It is bytes for advantages per row, and floats per token."""
    seed = len(pattern) + 10 * actors + per_token
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths_of(pattern, seed)
    rows, tokens = len(lengths), int(lengths.sum())
    logprobs = -3 * torch.rand(tokens, generator=generator)
    streams = {
        "old_logprobs": logprobs + 0.4 * torch.randn(tokens, generator=generator),
        "ref_logprobs": logprobs + 0.4 * torch.randn(tokens, generator=generator),
        "advantages": torch.randn(tokens if per_token else rows, generator=generator),
    }
    mask = torch.rand(tokens, generator=generator) < 0.8
    logprobs[~mask] = torch.nan
    given = {name: value.to(dtype) for name, value in streams.items()}
    options = {"clip": Clip(0.2, 0.28, dual_clip=3.0), "kl": KL("k3", 0.1)}
    if actors:
        options |= {"actor_ids": torch.randint(0, actors, (rows,), generator=generator), "num_actors": actors}
        options |= {"aggregation": "agent-mean"}
    options |= {"cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])}

    def run(own: torch.Tensor, others: dict[str, torch.Tensor], backend: str, device: str):
        tensors = {k: v.to(device) for k, v in {**others, **options}.items() if isinstance(v, torch.Tensor)}
        leaf = own.detach().to(device).clone().requires_grad_()
        used_mask = (mask.float() if per_token else mask).to(device)
        result = policy_loss(leaf, mask=used_mask, **{**options, **tensors}, backend=backend)
        result.loss.backward()
        return result, leaf.grad.cpu().double()

    got, grad = run(logprobs.to(dtype), given, kernel.backend, kernel.device)
    exact = {name: value.double() for name, value in given.items()}
    want, want_grad = run(logprobs.to(dtype).double(), exact, "torch", "cpu")
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=rtol, abs=1e-6)
    largest = want_grad.abs().max().item()
    torch.testing.assert_close(grad, want_grad, rtol=rtol, atol=rtol / 10 * largest)
    for name, value in want.metrics.items():
        assert got.metrics[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name
        if actors:
            mine = got.actor_metrics[name].cpu().double()
            torch.testing.assert_close(mine, want.actor_metrics[name].double(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_token_reward_sum(kernel, pattern: str, dtype: torch.dtype) -> None:
    """Packed rows over more than a block's chunk, with a mask."""
    lengths = lengths_of(pattern, 3).repeat(3)
    tokens = int(lengths.sum())
    generator = torch.Generator().manual_seed(3)
    rewards = torch.randn(tokens, generator=generator).to(dtype)
    mask = torch.rand(tokens, generator=generator) < 0.7
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    device = kernel.device
    got = token_reward_sum(
        rewards.to(device), mask=mask.to(device), cu_seqlens=cu_seqlens.to(device), backend=kernel.backend
    )
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    want = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, row, rewards.double() * mask)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-6, atol=1e-6)


# What the first launch of the loss on a GPU counts and adds up: tokens per row, per actor, and sums per row.
COUNTED: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "agent-mean, 3": {"aggregation": "agent-mean", "num_actors": 3},
    "agent-mean, 40": {"aggregation": "agent-mean", "num_actors": 40},  # more than a warp has lanes
    "GSPO": {"variant": GSPO(0.1, 0.2), "kl": KL("k3", 0.1, importance_weighted=True)},
    "GMPO": {"variant": GMPO(0.2, 0.3)},
    "sequence": {"correction": ImportanceCorrection("sequence", cap=1.5)},
}


@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_counts_and_sums_of_rows(kernel, pattern: str, counted: str, mask_dtype: torch.dtype) -> None:
    """Both losses, from packed rows: ``policy_loss``, and ``grouped_policy_loss`` with rewards per token."""
    seed = len(pattern) + len(counted)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths_of(pattern, seed)
    rows, tokens = len(lengths), int(lengths.sum())
    logprobs = -3 * torch.rand(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.7
    mask[: int(lengths[0])] = False  # a row without a trained token
    near = logprobs + 0.4 * torch.randn(tokens, generator=generator)
    logprobs[~mask] = torch.nan
    streams = {
        "old_logprobs": near,
        "ref_logprobs": near + 0.1 * torch.randn(tokens, generator=generator),
        "rollout_logprobs": near + 0.1 * torch.randn(tokens, generator=generator),
        "token_rewards": torch.randn(tokens, generator=generator),
    }
    plain: dict[str, torch.Tensor] = {
        "group_ids": torch.randint(0, max(rows // 4, 1), (rows,), generator=generator),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "mask": mask.to(mask_dtype),
    }
    options = COUNTED[counted]
    if "num_actors" in options:
        plain["actor_ids"] = torch.randint(0, options["num_actors"], (rows,), generator=generator)
    if "kl" not in options:
        del streams["ref_logprobs"]
    if "correction" not in options:
        del streams["rollout_logprobs"]

    def run(dtype: torch.dtype, backend: str, device: str, grouped: bool):
        given = {k: v.to(device) for k, v in {**{k: v.to(dtype) for k, v in streams.items()}, **plain}.items()}
        leaf = logprobs.to(device, dtype).clone().requires_grad_()
        if not grouped:
            given["advantages"] = group_advantage(
                token_reward_sum(
                    given.pop("token_rewards"), mask=given["mask"], cu_seqlens=given["cu_seqlens"], backend=backend
                ),
                given.pop("group_ids"),
                backend=backend,
            )
        call = grouped_policy_loss if grouped else policy_loss
        result = call(leaf, **given, **options, backend=backend)
        result.loss.backward()
        return result, leaf.grad.cpu().double()

    want, want_grad = run(torch.float64, "torch", "cpu", grouped=False)
    for grouped in (False, True):
        got, grad = run(torch.float32, kernel.backend, kernel.device, grouped)
        assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-4, abs=1e-5)
        torch.testing.assert_close(grad, want_grad, rtol=1e-4, atol=1e-5 * want_grad.abs().max().item())
        for name, value in want.metrics.items():
            assert got.metrics[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("per_token", [False, True])
def test_rows_in_wider_memory_and_threads(aggregation: str, per_token: bool) -> None:
    """On a CPU: rows of 7 side by side, the same rows apart from one another, and several threads."""
    generator = torch.Generator().manual_seed(5)
    rows, width = 6000, 7  # more tokens than one thread takes
    wide = {name: torch.randn(rows, 2 * width, generator=generator) for name in ("lp", "old", "ref", "a")}
    mask = torch.rand(rows, 2 * width, generator=generator) < 0.8
    near = {name: value[:, :width] if name == "lp" else wide["lp"] + 0.3 * value for name, value in wide.items()}

    def run(side_by_side: bool, threads: int) -> list[torch.Tensor]:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, :width].contiguous() if side_by_side else tensor[:, :width]

        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaf = take(wide["lp"]).detach().requires_grad_()
            result = policy_loss(
                leaf,
                take(near["old"]),
                take(wide["a"]) if per_token else wide["a"][:, 0],
                mask=take(mask),
                ref_logprobs=take(near["ref"]),
                kl=KL("k3", 0.1),
                aggregation=aggregation,
                backend="native",
            )
            result.loss.backward()
        finally:
            torch.set_num_threads(before)
        assert leaf.grad is not None
        return [result.loss.detach(), *result.metrics.values(), leaf.grad]

    joined = run(True, 1)
    for threads in (2, 3):
        assert all(map(torch.equal, run(True, threads), joined))
    torch.testing.assert_close(run(False, 1), joined, rtol=1e-5, atol=1e-7)
