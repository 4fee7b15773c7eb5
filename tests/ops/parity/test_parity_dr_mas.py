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
