"""Small samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turnwise.types import Sample


def sample(rollout_id: str = "a", actor: str = "solver", reward: float = 0.0, **fields: Any) -> Sample:
    defaults: dict[str, Any] = {
        "group_id": "q",
        "episode_type": "solve",
        "turn": 0,
        "branch": 0,
        "tree_node": None,
        "step_index": 0,
        "policy": "default",
        "prompt_token_ids": [1],
        "completion_token_ids": [2],
        "rollout_logprobs": [-0.1],
        "policy_versions": [(1, 0)],
        "trajectory_reward": reward,
    }
    return Sample(actor=actor, rollout_id=rollout_id, reward=reward, **(defaults | fields))


@pytest.fixture(scope="session")
def make() -> Callable[..., Sample]:
    return sample


@pytest.fixture
def worked(make: Callable[..., Sample]) -> list[Sample]:
    """Five rows. The docstring of each rule gives their advantages to five digits."""
    return [
        make("a", "solver", 0.9),
        make("a", "solver", 1.0, turn=1, step_index=1),
        make("a", "verifier", 1.0, step_index=2),
        make("b", "solver", 0.0),
        make("b", "verifier", 0.0, step_index=1),
    ]
