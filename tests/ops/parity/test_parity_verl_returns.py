"""Token-level rewards against verl's own functions: sums, discounted returns, generalised advantage estimation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import gae, token_returns, token_reward_sum

pytestmark = pytest.mark.slow

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def draw(streams: Any, seed: int) -> tuple[Tensor, Tensor, Any]:
    """Rewards ``[B, T]`` and the mask as float64, at least two tokens of which train."""
    s = streams(seed)
    s.mask.view(-1)[:2] = True
    return s.old.clone(), s.mask.double(), s


def test_returns(verl: Any, streams: Any, target: Any, seeds: Any) -> None:
    """Of REINFORCE++, with tool answers inside a row passed over."""
    for seed in seeds():
        rewards, mask, s = draw(streams, seed)
        if mask.numel() < 2:
            continue
        gamma = s.choose.choice([1.0, s.choose.uniform(0.5, 1)])
        _, expected = verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards.double(), mask, config=SimpleNamespace(gamma=gamma)
        )
        given = rewards.to(target.device)
        got = token_returns(given, gamma, mask=s.on(target).mask, backend=target.backend).cpu()
        torch.testing.assert_close(got.double(), expected, **TOLERANCE)


def test_gae(verl: Any, streams: Any, target: Any, seeds: Any) -> None:
    """verl whitens its advantages and keeps the plain ones only within its returns, ``A + V``. Where a token doesn't
    train it carries the next one's figures along; ours are 0."""
    for seed in seeds():
        rewards, mask, s = draw(streams, seed)
        if mask.numel() < 2:
            continue
        gamma, lam = s.choose.uniform(0.8, 1), s.choose.choice([0.0, 1.0, s.choose.uniform(0.5, 1)])
        values = s.double("ref")
        _, returns = verl.compute_gae_advantage_return(rewards.double(), values, mask, gamma, lam)
        g, given = s.on(target), rewards.to(target.device)
        results = gae(given, g.ref, mask=g.mask, gamma=gamma, lam=lam, backend=target.backend)
        advantages, got = (result.cpu() for result in results)
        torch.testing.assert_close(got.double()[s.mask], returns[s.mask], **TOLERANCE)
        torch.testing.assert_close(advantages.double()[s.mask], (returns - values)[s.mask], **TOLERANCE)
        assert advantages[~s.mask].eq(0).all() and got[~s.mask].eq(0).all()


def test_rewards_outside_the_mask(verl: Any) -> None:
    """verl's estimators add up rewards of tokens that don't train, too; ours leave them out."""
    rewards, mask = torch.tensor([[1.0, 5.0]]), torch.tensor([[1.0, 0.0]])
    theirs = verl.compute_grpo_outcome_advantage(rewards, mask, ["q"], norm_adv_by_std_in_grpo=False)[0]
    assert theirs[0, 0].item() == 6
    assert token_reward_sum(rewards, mask=mask).tolist() == [1.0]
