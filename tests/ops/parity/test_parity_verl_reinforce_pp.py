"""The rule REINFORCE++ against verl's estimators, which whiten with the unbiased variance: a factor, nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.credit import ReinforcePPCredit
from turnwise.types import Sample

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_whitened_batch(verl: Any, seed: int, baseline: bool) -> None:
    rng = np.random.default_rng(seed)
    rewards, lengths = rng.normal(size=12), rng.integers(1, 9, size=12)
    uids = np.array([f"q{index % 4}" for index in range(12)], dtype=object)
    samples = [
        Sample(
            group_id=uid,
            episode_type="e",
            actor="a",
            turn=0,
            branch=0,
            tree_node=None,
            rollout_id=f"t{index}",
            step_index=0,
            policy="p",
            prompt_token_ids=[1],
            completion_token_ids=[2] * int(length),
            rollout_logprobs=[-1.0] * int(length),
            policy_versions=[(int(length), 0)],
            reward=float(reward),
            trajectory_reward=float(reward),
        )
        for index, (uid, reward, length) in enumerate(zip(uids, rewards, lengths, strict=True))
    ]
    mask = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
    token_rewards = torch.zeros(12, 8, dtype=torch.float64)
    token_rewards[torch.arange(12), torch.tensor(lengths) - 1] = torch.tensor(rewards)
    name = "baseline_outcome_advantage" if baseline else "outcome_advantage"
    theirs, _ = getattr(verl, f"compute_reinforce_plus_plus_{name}")(
        token_level_rewards=token_rewards,
        response_mask=mask.long(),
        index=uids,
        config=SimpleNamespace(gamma=1.0),
    )
    tokens = lengths.sum()
    expected = theirs[:, 0].numpy() * np.sqrt(tokens / (tokens - 1))
    ours = ReinforcePPCredit(baseline=baseline).compute_columns(samples)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6, err_msg=f"seed {seed}")
