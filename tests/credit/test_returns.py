from __future__ import annotations

from typing import Any

import pytest

from turnwise.credit.returns import discounted_returns


def test_worked_values_by_actor_and_rollout_in_the_order_of_the_steps(make: Any) -> None:
    samples = [
        make("a", reward=4.0, step_index=4),
        make("a", reward=1.0, step_index=0),
        make("a", "verifier", reward=100.0, step_index=1),
        make("a", reward=2.0, step_index=2),
        make("b", reward=8.0),
    ]
    assert discounted_returns(samples, 0.5).tolist() == [4, 1 + 0.5 * (2 + 0.5 * 4), 100, 2 + 0.5 * 4, 8]


def test_the_rollouts_reward_is_earned_once_at_the_end(make: Any) -> None:
    """Calls without a reward of their own all carry the rollout's: summed up, it would count once per call."""
    samples = [make("a", reward=3.0, step_index=index, has_step_reward=False) for index in range(3)]
    assert discounted_returns(samples, 0.5).tolist() == [0.75, 1.5, 3.0]
    samples[2].reward, samples[2].has_step_reward = 7.0, True
    assert discounted_returns(samples, 1.0).tolist() == [7, 7, 7]


def test_trees_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"step 2 of rollout 'a' grew in a tree"):
        discounted_returns([make("a"), make("a", tree_node=5, step_index=2)], 1.0)
