"""Generalised advantage estimation, against the sum of its definition in Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from turnwise.ops import gae


def batch(seed: int, rows: int = 6, width: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards and values in float64 and a mask with holes, an empty row and a full one; what is masked is NaN."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    values = 3 + torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width)[None] < lengths) & (torch.rand(rows, width, generator=generator) < 0.7)
    if rows > 2:
        mask[1], mask[2] = False, True
    mask[:, 100:200], mask[:, 200:250] = False, True  # a tool's answer: blocks without a trained token, amid a row
    return torch.where(mask, rewards, math.nan), torch.where(mask, values, math.nan), mask


def by_definition(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """``A[t] = sum over l of (gamma lam)^l delta[t + l]``, equation 16, over the trained tokens of each row."""
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    for b in range(rewards.shape[0]):
        places = mask[b].nonzero().flatten().tolist()
        r, v = rewards[b, places].tolist(), [*values[b, places].tolist(), 0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
        for i, t in enumerate(places):
            advantages[b, t] = math.fsum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(r)))
            returns[b, t] = advantages[b, t] + v[i]
    return advantages, returns


def check(target, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> None:
    on = {"mask": mask.to(target.device), "gamma": gamma, "lam": lam, "backend": target.backend}
    got = gae(rewards.to(target.device), values.to(target.device), **on)
    expected = by_definition(rewards.double(), values.double(), mask, gamma, lam)
    for mine, exact in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.cpu().double(), exact, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("rows", "width"), [(6, 50), (1, 1), (1, 31), (3, 33), (2, 300), (0, 4), (3, 0)])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_equals_its_definition(target, rows: int, width: int, gamma: float, lam: float) -> None:
    rewards, values, mask = batch(rows * 100 + width, rows, width)
    check(target, rewards.float(), values.float(), mask, gamma, lam)


def test_long_rows_keep_their_accuracy(target) -> None:
    """Values far from 0: summing errors one by one would lose six digits."""
    width = 4000
    values = 1000 + torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    rewards = torch.zeros(1, width)
    rewards[0, -1] = 1.0
    got = gae(rewards.to(target.device), values.to(target.device), gamma=1.0, lam=1.0, backend=target.backend)
    torch.testing.assert_close(got[0].cpu().double(), 1 - values.double(), rtol=1e-6, atol=0)
    assert got[1].tolist() == [[1.0] * width]


def test_worked_values(target) -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    got = gae(rewards.to(target.device), values.to(target.device), lam=1.0, backend=target.backend)
    assert [x.tolist() for x in got] == [[[0.5, 0.75]], [[1.0, 1.0]]]
