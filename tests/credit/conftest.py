"""Small samples, and a float64 brute-force version of ``A = (r - centre) / scale``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
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


def brute_force(
    samples: Sequence[Sample],
    key: Callable[[Sample], Hashable],
    unit: Callable[[Sample], Hashable],
    value: Callable[[Sample], float],
    ddof: int = 1,
    eps: float = 1e-6,
) -> np.ndarray:
    """Compute advantages group by group and unit by unit, in float64. Groups of one unit or of equal values give 0."""
    result = np.zeros(len(samples))
    for group in {key(s) for s in samples}:
        rows = [place for place, s in enumerate(samples) if key(s) == group]
        units = {unit(samples[place]) for place in rows}
        values = {u: np.mean([value(samples[p]) for p in rows if unit(samples[p]) == u]) for u in units}
        if len(units) == 1 or len(set(values.values())) == 1:
            continue
        spread = np.std(list(values.values()), ddof=ddof)
        for place in rows:
            result[place] = (values[unit(samples[place])] - np.mean(list(values.values()))) / (spread + eps)
    return result


@pytest.fixture(scope="session")
def make() -> Callable[..., Sample]:
    return sample


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    return brute_force


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
