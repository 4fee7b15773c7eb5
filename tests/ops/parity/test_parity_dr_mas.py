"""Dr. MAS's advantages: GRPO's, with each agent of a question as a group of its own.

Dr. MAS (https://arxiv.org/abs/2602.08847) is no package; it calls verl's estimator, with (question, agent) in the place
of the question. So does this test, in both modes: divided by the deviation, and not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.ops import factorize, group_advantage

pytestmark = pytest.mark.slow

SEEDS = 300
AGENTS = ("solver", "verifier", "searcher")


def draw(seed: int) -> tuple[Tensor, list[str], list[str], list[int]]:
    """Rewards, questions, agents and rollouts by row: each rollout of a question calls its agents 0 to 3 times each."""
    generator = np.random.default_rng(seed)
    questions, agents, rollouts = [], [], []
    for rollout in range(int(generator.integers(1, 9))):
        question = f"q{rollout % 2}"
        for agent in AGENTS:
            for _ in range(int(generator.integers(0, 4))):
                questions.append(question)
                agents.append(agent)
                rollouts.append(rollout)
    rewards = torch.tensor(generator.integers(0, 5, size=len(questions)) / 4, dtype=torch.float32)
    order = generator.permutation(len(questions))
    pick = [questions[i] for i in order], [agents[i] for i in order], [rollouts[i] for i in order]
    return rewards, *pick


def verl_grpo(verl: Any, rewards: Tensor, keys: list[str], by_std: bool) -> Tensor:
    return verl.compute_grpo_outcome_advantage(
        rewards.double()[:, None],
        torch.ones(len(rewards), 1),
        np.array(keys, dtype=object),
        norm_adv_by_std_in_grpo=by_std,
    )[0][:, 0]


@pytest.mark.parametrize("by_std", [True, False], ids=["std", "no-std"])
def test_by_agent(verl: Any, by_std: bool) -> None:
    for seed in range(SEEDS):
        rewards, questions, agents, _ = draw(seed)
        ids, groups = factorize(questions, agents)
        keys = [f"{question}/{agent}" for question, agent in zip(questions, agents, strict=True)]
        expected = verl_grpo(verl, rewards, keys, by_std)
        got = group_advantage(rewards, ids, num_groups=groups, scale="std" if by_std else "none", singleton="raw")
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_std", [True, False], ids=["std", "no-std"])
def test_by_question(verl: Any, by_std: bool) -> None:
    """The global baseline that it is compared with: a rollout counts once, with the mean of its rows."""
    for seed in range(SEEDS):
        rewards, questions, _, rollouts = draw(seed)
        names = sorted(set(rollouts))
        means = torch.stack(
            [rewards.double()[np.array(rollouts) == name].mean() for name in names] or [torch.zeros(())]
        )
        asked = [questions[rollouts.index(name)] for name in names]
        expected = verl_grpo(verl, means[: len(names)], asked, by_std)[[names.index(name) for name in rollouts]]
        ids, groups = factorize(questions)
        got = group_advantage(
            rewards,
            ids,
            num_groups=groups,
            trajectory_ids=torch.tensor(rollouts, dtype=torch.int64),
            pool="trajectory",
            scale="std" if by_std else "none",
            singleton="raw",
        )
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_one_pass_variance_loses_small_differences() -> None:
    """A single pass, ``sum(r²)/n - mean²`` in float32, as vectorised forms of this estimator do: rewards near 1000
    that differ by tenths get a deviation of rounding noise. Ours holds to float64."""
    rewards = torch.tensor([1000.0, 1000.1, 1000.2, 1000.3])
    exact = rewards.double()
    expected = (exact - exact.mean()) / (exact.std() + 1e-6)
    got = group_advantage(rewards, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    variance = (rewards.square().mean() - rewards.mean().square()).clamp(min=0) * 4 / 3
    one_pass = (rewards - rewards.mean()) / (variance.sqrt() + 1e-6)
    assert (one_pass.double() - expected).abs().max() > 0.1


def test_worked_values() -> None:
    """Two rollouts, a and b: the solver called twice in a, each verifier once."""
    rewards = torch.tensor([0.9, 1.0, 1.0, 0.0, 0.0])
    agents = ["solver", "solver", "verifier", "solver", "verifier"]
    ids, groups = factorize(["q"] * 5, agents)
    got = group_advantage(rewards, ids, num_groups=groups)
    torch.testing.assert_close(got, torch.tensor([0.48418, 0.66575, 0.70711, -1.14993, -0.70711]), rtol=0, atol=1e-5)
    plain = group_advantage(rewards, ids, num_groups=groups, scale="none")
    torch.testing.assert_close(plain, torch.tensor([0.26667, 0.36667, 0.5, -0.63333, -0.5]), rtol=0, atol=1e-5)
