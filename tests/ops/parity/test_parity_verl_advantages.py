"""Advantages against verl's own estimators, imported from its package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.ops import factorize, group_advantage

from ..conftest import TARGETS

pytestmark = pytest.mark.slow

CPU = TARGETS["native"]
SEEDS = 300
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def draw(seed: int) -> tuple[Tensor, np.ndarray, np.random.Generator]:
    """Rewards ``[B]`` float32 with ties, and question ids as text: groups of one to all rows, in any order."""
    generator = np.random.default_rng(seed)
    rows = int(generator.integers(1, 14))
    rewards = generator.normal(size=rows) if seed % 2 else generator.integers(0, 3, size=rows).astype(float)
    uids = np.array([f"q{i}" for i in generator.integers(0, max(rows // 3, 1) + 1, size=rows)], dtype=object)
    return torch.tensor(rewards, dtype=torch.float32), uids, generator


def theirs(estimator: Any, rewards: Tensor, uids: np.ndarray, mask: Tensor | None = None, **options: Any) -> Tensor:
    """A verl estimator's advantages ``[B]``, in float64: the reward on the first token, which trains."""
    mask = torch.ones(len(rewards), 1, dtype=torch.int64) if mask is None else mask
    token_rewards = torch.zeros(mask.shape, dtype=torch.float64)
    token_rewards[:, 0] = rewards.double()
    return estimator(token_level_rewards=token_rewards, response_mask=mask, index=uids, **options)[0][:, 0]


def ours(target: Any, rewards: Tensor, *keys: Any, **rule: Any) -> Tensor:
    """Our advantages of rows grouped by their keys. A question's only answer keeps its reward, as at verl (``raw``)."""
    ids, groups = factorize(*keys)
    given = target.on({"rewards": rewards, "group_ids": ids, "singleton": "raw", **rule})
    return group_advantage(**given, num_groups=groups, backend=target.backend).cpu().double()


# By name verl's estimator, its settings, and our rule. Alone in its group, an answer keeps its reward with the loop of
# RLOO and gets 0 from its vectorised form.
RULES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {"norm_adv_by_std_in_grpo": True}, {}),
    "grpo, not divided": ("grpo", {"norm_adv_by_std_in_grpo": False}, {"scale": "none"}),
    "rloo": ("rloo", {}, {"center": "leave_one_out", "scale": "none"}),
    "rloo, vectorised": ("rloo_vectorized", {}, {"center": "leave_one_out", "scale": "none", "singleton": "zero"}),
    "opo": ("opo", {}, {"center": "length_weighted", "scale": "none"}),
    "gpg": ("gpg", {}, {"scale": "none"}),
}


@pytest.mark.parametrize("name", RULES)
def test_estimators(verl: Any, target: Any, seeds: Any, name: str) -> None:
    estimator, settings, rule = RULES[name]
    for seed in seeds():
        rewards, uids, generator = draw(seed)
        lengths = torch.from_numpy(generator.integers(1, 9, size=len(rewards)))
        mask = (torch.arange(8)[None] < lengths[:, None]).long()
        expected = theirs(getattr(verl, f"compute_{estimator}_outcome_advantage"), rewards, uids, mask, **settings)
        got = ours(target, rewards, uids, lengths=lengths, **rule)
        if name == "gpg":  # times batch size over the number of rewards that are not 0
            got = got * (len(rewards) / max(int((rewards != 0).sum()), 1))
        torch.testing.assert_close(got, expected, **TOLERANCE, msg=lambda text, s=seed: f"seed {s}: {text}")


@pytest.mark.parametrize("by_std", [True, False], ids=["std", "no-std"])
def test_grpo_vectorized(verl: Any, by_std: bool) -> None:
    """It computes in float32 whatever it gets, and a group's sum rounds: so ties are not exact and small deviations
    carry that noise, which ours does not have. Rewards here differ by a tenth or not at all."""
    for seed in range(SEEDS):
        rewards, uids, _ = draw(seed)
        rewards = (rewards * 10).round() / 8
        expected = theirs(verl.compute_grpo_vectorized_outcome_advantage, rewards, uids, norm_adv_by_std_in_grpo=by_std)
        got = ours(CPU, rewards, uids, scale="std" if by_std else "none")
        torch.testing.assert_close(got, expected.double(), **TOLERANCE)


@pytest.mark.parametrize("by_std", [True, False], ids=["std", "no-std"])
def test_dr_mas(verl: Any, by_std: bool) -> None:
    """Dr. MAS (https://arxiv.org/abs/2602.08847) is no package; it calls verl's GRPO with (question, agent) in place of
    the question. It is compared with a global baseline, where a rollout counts once, with the mean of its rows."""
    for seed in range(SEEDS):
        generator = np.random.default_rng(seed)
        # Up to 8 rollouts of two questions call each of three agents 0 to 3 times.
        calls = np.repeat(np.arange(int(generator.integers(1, 9)) * 3), 2)
        calls = generator.choice(calls, size=int(generator.integers(1, len(calls) + 1)), replace=False)
        rollouts, agents = calls // 3, calls % 3
        questions = rollouts % 2
        rewards = torch.tensor(generator.integers(0, 5, size=len(calls)) / 4, dtype=torch.float32)
        grpo, how = verl.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": by_std}
        scale = "std" if by_std else "none"
        by_agent = theirs(grpo, rewards, np.array([f"{q}/{a}" for q, a in zip(questions, agents, strict=True)]), **how)
        torch.testing.assert_close(ours(CPU, rewards, questions, agents, scale=scale), by_agent, **TOLERANCE)
        names, rows = np.unique(rollouts, return_inverse=True)
        means = torch.stack([rewards.double()[rollouts == name].mean() for name in names])
        rule = {"pool": "trajectory", "trajectory_ids": torch.from_numpy(rollouts), "scale": scale}
        by_question = theirs(grpo, means, names % 2, **how)[rows]
        torch.testing.assert_close(ours(CPU, rewards, questions, **rule), by_question, **TOLERANCE)


# ---------------------------------------------------------------------------------------------------------------------
# Where verl is off, ours holds to float64
# ---------------------------------------------------------------------------------------------------------------------
def test_opo_of_a_group_without_tokens(verl: Any) -> None:
    """verl divides 0 by 0 where no row of a question has trained tokens; ours takes the plain mean."""
    rewards, uids = torch.tensor([1.0, 0.0]), np.array(["q", "q"], dtype=object)
    expected = theirs(verl.compute_opo_outcome_advantage, rewards, uids, torch.zeros(2, 1, dtype=torch.int64))
    assert expected.isnan().all()
    zero = torch.zeros(2, dtype=torch.int64)
    got = group_advantage(rewards, zero, lengths=zero, center="length_weighted", scale="none")
    assert got.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
def test_float32_rewards_far_from_zero(verl: Any, offset: float) -> None:
    """In float32, as verl calls it in training, its means round at the size of the rewards; ours stays with float64."""
    rewards = torch.tensor([0.0, 0.1, 0.2, 0.3] * 4) + offset
    ids, uids = torch.zeros(16, dtype=torch.int64), np.array(["q"] * 16, dtype=object)
    exact = rewards.double()
    expected = (exact - exact.mean()) / (exact.std() + 1e-6)
    peer = verl.compute_grpo_vectorized_outcome_advantage(rewards[:, None], torch.ones(16, 1), uids)[0][:, 0]
    mine = group_advantage(rewards, ids)
    torch.testing.assert_close(mine.double(), expected, rtol=1e-6, atol=1e-6)
    if offset == 1e4:
        assert (peer.double() - expected).abs().max() > 1e-4


def test_float32_ties_are_not_blown_up(verl: Any) -> None:
    """Seven equal rewards have no advantage. verl's float32 deviations are rounding noise, over a floor of 1e-6."""
    worst = 0.0
    for value in torch.linspace(0.05, 100, 400):
        rewards = value.expand(7).clone()
        uids = np.array(["q"] * 7, dtype=object)
        peer = verl.compute_grpo_outcome_advantage(rewards[:, None].clone(), torch.ones(7, 1), uids)[0]
        worst = max(worst, peer.abs().max().item())
        assert group_advantage(rewards, torch.zeros(7, dtype=torch.int64)).abs().max() == 0
    assert worst > 0.1
