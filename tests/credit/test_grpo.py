from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import DrGRPOCredit, GRPOCredit, HierarchyCredit, OPOCredit, RLOOCredit
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


def test_calls_may_share_the_weight_of_their_attempt(make: Any) -> None:
    """Three calls with reward 1 and one with 0: each attempt's weights add up to the same."""
    samples = [make("a", reward=1.0, step_index=index) for index in range(3)] + [make("b", reward=0.0)]
    np.testing.assert_allclose(GRPOCredit(hierarchy=True).compute_columns(samples), [S, S, S, -S], atol=1e-5)
    by_attempt = GRPOCredit(hierarchy=True, call_weight="attempt").compute_columns(samples)
    np.testing.assert_allclose(by_attempt, [S / 3, S / 3, S / 3, -S], atol=1e-5)
    with pytest.raises(ValueError, match="call_weight='turn': expected 'row' or 'attempt'"):
        GRPOCredit(call_weight="turn")


def test_questions_levels_types_and_actors_are_not_compared(make: Any) -> None:
    """In the hierarchy each pair below is a group of its own; a top level with two questions is two groups."""
    pairs = [
        {"group_id": "q1"},
        {"group_id": "q2"},
        {"group_id": "q1", "parent_rollout_id": "p1"},
        {"group_id": "q1", "parent_rollout_id": "p2"},
        {"group_id": "q1", "episode_type": "propose"},
        {"group_id": "q1", "actor": "critic"},
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


def test_dr_grpo_worked_values(worked: list[Sample]) -> None:
    gap = ((0.9 + 1 + 1) / 3) / 2
    np.testing.assert_allclose(DrGRPOCredit().compute_columns(worked), [gap] * 3 + [-gap] * 2, rtol=1e-6)


def test_dr_grpo_keeps_small_differences_small(worked: list[Sample]) -> None:
    for sample in worked:
        sample.reward = sample.trajectory_reward = 1e-3 * sample.reward
    assert abs(DrGRPOCredit().compute_columns(worked)).max() < 1e-3
    assert abs(GRPOCredit().compute_columns(worked)).max() > 0.5


def test_rloo_worked_values(make: Any) -> None:
    samples = [make(name, reward=reward) for name, reward in zip("abcd", [1.0, 0.0, 1.0, 1.0], strict=True)]
    np.testing.assert_allclose(RLOOCredit().compute_columns(samples), [1 / 3, -1, 1 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_rloo_compares_with_the_mean_of_the_others(make: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = 1000 + rng.random(7)
    samples = [make(f"t{index}", reward=reward) for index, reward in enumerate(rewards)]
    expected = [reward - np.delete(rewards, index).mean() for index, reward in enumerate(rewards)]
    np.testing.assert_allclose(RLOOCredit().compute_columns(samples), expected, atol=1e-6, err_msg=f"seed {seed}")


def test_rloo_counts_a_long_trajectory_once(make: Any) -> None:
    samples = [make("a", reward=1.0, step_index=index) for index in range(5)] + [make("b"), make("c")]
    np.testing.assert_allclose(RLOOCredit().compute_columns(samples), [1] * 5 + [-0.5, -0.5], rtol=1e-6)


def test_opo_worked_values(make: Any) -> None:
    """A right answer of 3 tokens, a wrong one of 1: the baseline is 3 / 4."""
    samples = [make("a", reward=1.0, completion_token_ids=[1, 2, 3]), make("b", reward=0.0)]
    np.testing.assert_allclose(OPOCredit().compute_columns(samples), [0.25, -0.75], rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_opo_adds_up_the_lengths_of_a_trajectory(make: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples, rewards, lengths = [], rng.random(5), []
    for index, reward in enumerate(rewards):
        calls = rng.integers(1, 9, size=rng.integers(1, 4)).tolist()
        samples += [make(f"t{index}", reward=reward, completion_token_ids=[2] * length) for length in calls]
        lengths.append(sum(calls))
    baseline = np.average(rewards, weights=lengths)
    expected = [rewards[int(sample.rollout_id[1:])] - baseline for sample in samples]
    np.testing.assert_allclose(OPOCredit().compute_columns(samples), expected, atol=1e-6, err_msg=f"seed {seed}")
