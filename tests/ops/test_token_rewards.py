"""Reward sums and discounted rewards to go, against loops over Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from turnwise.ops import token_returns, token_reward_sum
from turnwise.ops.common import dispatch as backends


def batch(seed: int, rows: int = 7, width: int = 70, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Rewards in float64 and a mask with holes, an empty row and a full one; masked rewards are NaN."""
    generator = torch.Generator().manual_seed(seed)
    rewards = spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width)[None] < lengths) & (torch.rand(rows, width, generator=generator) < 0.7)
    if rows > 2:
        mask[1], mask[2] = False, True
    return torch.where(mask, rewards, math.nan), mask


def packed(mask: Tensor, *streams: Tensor) -> tuple[Tensor, list[Tensor]]:
    """``cu_seqlens`` and the streams up to each row's last trained token, masked ones inside kept."""
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in mask]
    keep = torch.arange(mask.shape[1])[None] < torch.tensor(lengths)[:, None]
    return torch.tensor([0, *lengths]).cumsum(0), [stream[keep] for stream in streams]


def sums_by_loop(rewards: Tensor, mask: Tensor) -> Tensor:
    sums = [
        math.fsum(r for r, m in zip(*row, strict=True) if m)
        for row in zip(rewards.tolist(), mask.tolist(), strict=True)
    ]
    return torch.tensor(sums, dtype=torch.float64)


def returns_by_loop(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    result = torch.zeros(rewards.shape, dtype=torch.float64)
    for b in range(rewards.shape[0]):
        behind = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t]:
                behind = rewards[b, t].item() + gamma * behind
                result[b, t] = behind
    return result


SHAPES = [(7, 70), (1, 1), (1, 31), (2, 33), (3, 257), (1, 1025), (0, 5), (4, 0), (0, 0)]


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_sums_and_returns_equal_the_loop_padded_and_packed(target, rows: int, width: int) -> None:
    rewards, mask = batch(rows * 1000 + width, rows, width)
    given, on, use = rewards.float().to(target.device), mask.to(target.device), {"backend": target.backend}
    exact = torch.where(mask, rewards.float().double(), 0.0)
    cu_seqlens, (stream, trains) = packed(mask, given.cpu(), mask)
    boundaries = cu_seqlens.to(target.device)
    form = {"cu_seqlens": boundaries, "mask": trains.to(target.device)}

    sums = token_reward_sum(given, mask=on, **use)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.cpu().double(), sums_by_loop(exact, mask), rtol=1e-6, atol=1e-6)
    again = token_reward_sum(stream.to(target.device), **form, **use)
    torch.testing.assert_close(again, sums, rtol=1e-6, atol=1e-6)

    for gamma in (1.0, 0.9, 0.0):
        expected = returns_by_loop(exact, mask, gamma)
        returns = token_returns(given, gamma, mask=on, **use)
        assert returns.dtype == torch.float32
        torch.testing.assert_close(returns.cpu().double(), expected, rtol=2e-6, atol=2e-6)
        again = token_returns(stream.to(target.device), gamma, **form, **use)
        _, (wanted,) = packed(mask, expected)
        torch.testing.assert_close(again.cpu().double(), wanted, rtol=2e-6, atol=2e-6)


def test_integer_rewards(target) -> None:
    rewards, mask = batch(4, 6, 37, spread=3.0)
    whole = rewards.nan_to_num().long()
    use = target.on({"mask": mask, "backend": target.backend})
    exact = torch.where(mask, whole.double(), 0.0)
    assert token_reward_sum(target.on(whole), **use).tolist() == sums_by_loop(exact, mask).tolist()
    returns = token_returns(target.on(whole), 0.75, **use).cpu()
    assert returns.dtype == torch.float32
    torch.testing.assert_close(returns.double(), returns_by_loop(exact, mask, 0.75), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("width", [124, 128, 130, 132, 512, 600, 5000])
def test_lengths_of_rows_that_a_gpu_cuts_anywhere(emulator, monkeypatch, width) -> None:
    """Whole units of 512 tokens are read up to the row's length alone; the rest, here NaN, counts for nothing."""
    monkeypatch.setattr(backends, "emulator", emulator)
    rows = 3 + 1200 // width
    generator = torch.Generator().manual_seed(width)
    lengths = torch.randint(width + 1, (rows,), generator=generator)
    lengths[:3] = torch.tensor([width, 0, width // 2 + 1])
    rewards = torch.randn(rows, width, generator=generator)
    beyond = torch.arange(width) >= lengths[:, None]
    want = rewards.double().masked_fill(beyond, 0).sum(1)
    got = token_reward_sum(rewards.masked_fill(beyond, math.nan), lengths=lengths, backend="native")
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [5000, 40_000])
def test_long_rows_keep_their_accuracy(target, width: int) -> None:
    """Longer than the pieces that rows are cut into; an offset that a float32 running sum would drown in."""
    if width > 5000 and target.simulated:  # which needs no more pieces than the shorter one
        return
    rewards = torch.full((2, width), 1000.0) + torch.arange(2 * width).view(2, width) % 7
    exact = rewards.double()
    use = {"backend": target.backend}
    sums = token_reward_sum(rewards.to(target.device), **use)
    torch.testing.assert_close(sums.cpu().double(), exact.sum(1), rtol=1e-7, atol=0)
    returns = token_returns(rewards.to(target.device), 1.0, **use)
    expected = exact.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns.cpu().double(), expected, rtol=1e-6, atol=0)
    cu_seqlens = torch.tensor([0, 3, 3, width + 9, 2 * width])
    stream = rewards.reshape(-1)
    sums = token_reward_sum(stream.to(target.device), cu_seqlens=cu_seqlens.to(target.device), **use)
    parts = [part.double() for part in stream.tensor_split(cu_seqlens[1:-1])]
    torch.testing.assert_close(sums.cpu().double(), torch.stack([p.sum() for p in parts]), rtol=1e-7, atol=0)
    returns = token_returns(stream.to(target.device), 1.0, cu_seqlens=cu_seqlens.to(target.device), **use)
    expected = torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])
    torch.testing.assert_close(returns.cpu().double(), expected, rtol=1e-6, atol=0)


def test_a_row_of_more_chunks_than_lanes(target) -> None:
    """A CUDA block looks at the chunks behind it 32 at a time."""
    if target.backend == "torch" or target.interpreted:  # slow, and without chunks
        return
    tokens = 34 * 4096 + 5
    stream, cu_seqlens = torch.ones(tokens, device=target.device), torch.tensor([0, 3, tokens], device=target.device)
    returns = token_returns(stream, 1.0, cu_seqlens=cu_seqlens, backend=target.backend)
    assert returns[:3].tolist() == [3.0, 2.0, 1.0]
    assert torch.equal(returns[3:].cpu(), torch.arange(tokens - 3, 0, -1, dtype=torch.float32))
    assert token_reward_sum(stream, cu_seqlens=cu_seqlens, backend=target.backend).tolist() == [3.0, tokens - 3.0]


def test_worked_values(target) -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]], device=target.device)
    mask = torch.tensor([[True, False, True]], device=target.device)
    use = {"backend": target.backend}
    assert token_returns(rewards, 0.5, **use).tolist() == [[0.25, 0.5, 1.0]]
    assert token_returns(rewards, 0.5, mask=mask, **use).tolist() == [[0.5, 0.0, 1.0]]
    assert token_reward_sum(rewards + 1, mask=mask, **use).tolist() == [3.0]
