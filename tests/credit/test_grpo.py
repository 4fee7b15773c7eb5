from __future__ import annotations

from typing import Any

import numpy as np

from turnwise.credit import GRPOCredit, HierarchyCredit
from turnwise.types import Sample

S = 0.70711


def test_worked_values(worked: list[Sample]) -> None:
    np.testing.assert_allclose(GRPOCredit().compute_columns(worked), [S, S, S, -S, -S], atol=1e-5)
    mean_gap = ((0.9 + 1 + 1) / 3) / 2
    without_std = GRPOCredit(normalize=False).compute_columns(worked)
    np.testing.assert_allclose(without_std, [mean_gap] * 3 + [-mean_gap] * 2, atol=1e-6)


def test_a_trajectory_counts_once_however_long(make: Any) -> None:
    short = [make("a", reward=1.0), make("b", reward=0.0)]
    long = [make("a", reward=1.0, step_index=index) for index in range(9)] + [make("b", reward=0.0)]
    assert GRPOCredit().compute_columns(long)[0] == GRPOCredit().compute_columns(short)[0]


def test_questions_levels_types_and_actors_are_not_compared(make: Any) -> None:
    """In the hierarchy each pair below is a group of its own; a top level with two questions is two groups."""
    pairs = [
        {"uid": "q1"},
        {"uid": "q2"},
        {"uid": "q1", "parent_node": "p1"},
        {"uid": "q1", "parent_node": "p2"},
        {"uid": "q1", "episode_type": "propose"},
        {"uid": "q1", "actor": "critic"},
    ]
    samples = [
        make(f"t{index}-{name}", reward=100.0 * index + reward, **pair)
        for index, pair in enumerate(pairs)
        for name, reward in (("good", 1.0), ("bad", 0.0))
    ]
    for rule in (HierarchyCredit(), GRPOCredit(hierarchy=True, ddof=0)):
        np.testing.assert_allclose(rule.compute_columns(samples), [1, -1] * len(pairs), atol=1e-5)


def test_the_hierarchy_looks_at_the_rollouts_reward(make: Any) -> None:
    samples = [make("a", reward=0.0, trajectory_reward=1.0), make("b", reward=5.0, trajectory_reward=0.0)]
    assert HierarchyCredit().compute_columns(samples)[0] > 0 > GRPOCredit().compute_columns(samples)[0]
