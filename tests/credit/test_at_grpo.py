"""Two faults of the published code among them: group ids divided twice, and rows before the last turn dropped."""

from __future__ import annotations

from typing import Any

import numpy as np

from turnwise.credit import ATGRPOCredit


def test_eight_problems_are_eight_groups(make: Any) -> None:
    samples = [
        make(f"{problem}-{copy}", reward=10.0 * problem + copy, group_id=problem)
        for problem in range(8)
        for copy in range(4)
    ]
    one = ATGRPOCredit().compute_columns(samples[:4])
    np.testing.assert_allclose(ATGRPOCredit().compute_columns(samples), np.tile(one, 8), atol=1e-5)


def test_an_early_success_trains(make: Any) -> None:
    """Copy a solves the problem in turn 0 and ends; b and c go on to turn 2. All rows keep their advantage."""
    samples = [make("a", reward=1.0)] + [
        make(name, reward=reward, turn=turn, step_index=turn)
        for name, rewards in (("b", (0.0, 0.2, 1.0)), ("c", (0.0, 0.1, 0.0)))
        for turn, reward in enumerate(rewards)
    ]
    advantages = ATGRPOCredit().compute_columns(samples)
    assert (advantages != 0).all()
    assert advantages[0] > 0 > advantages[1] == advantages[4]


def test_branches_are_compared_with_their_siblings_alone(make: Any) -> None:
    samples = [
        make(trajectory, reward=reward + offset, tree_node=parent, branch=branch, turn=1)
        for offset, (trajectory, parent) in enumerate([("t1", 3), ("t1", 4), ("t2", 3)])
        for branch, reward in enumerate((0.0, 0.5))
    ]
    expected = np.tile([-(0.5**0.5), 0.5**0.5], 3)
    np.testing.assert_allclose(ATGRPOCredit().compute_columns(samples), expected, atol=1e-5)


def test_losers_of_the_selection_train_too(make: Any) -> None:
    samples = [
        make("t", reward=float(branch == 2), tree_node=0, branch=branch, step_index=branch) for branch in range(4)
    ]
    advantages = ATGRPOCredit().compute_columns(samples)
    np.testing.assert_allclose(advantages, [-0.5, -0.5, 1.5, -0.5], atol=1e-6)


def test_the_steps_own_reward_counts(make: Any) -> None:
    samples = [make(name, reward=reward, trajectory_reward=7.0) for name, reward in (("a", 1.0), ("b", 0.0))]
    assert ATGRPOCredit().compute_columns(samples)[0] > 0
