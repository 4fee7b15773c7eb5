"""Rows of few tokens, which share a warp on a GPU: the policy loss and the sum of rewards against float64."""

from __future__ import annotations

import random

import pytest
import torch

from turnwise.ops import KL, Clip, policy_loss, token_reward_sum

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
