from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from turnwise.credit import RAECredit


def test_the_baseline_before_the_batch_and_one_update_after_it(make: Any) -> None:
    rule = RAECredit(decay=0.9)
    batch = [make("a", reward=1.0), make("b", reward=0.0), make("c", reward=1.0), make("d", reward=2.0)]
    np.testing.assert_allclose(rule.compute_columns(batch), [1, 0, 1, 2])
    assert rule.baseline("solve", "solver") == pytest.approx(0.1 * 1.0)
    np.testing.assert_allclose(rule.compute_columns(batch), [0.9, -0.1, 0.9, 1.9], atol=1e-6)
    assert rule.baseline("solve", "solver") == pytest.approx(0.9 * 0.1 + 0.1)


def test_identical_children_of_different_parents_get_identical_advantages(make: Any) -> None:
    rule = RAECredit(decay=0.5)
    rule.compute_columns([make("z", reward=1.0)])
    batch = [
        make(f"t{index}", reward=1.0, parent_rollout_id=f"p{index // 2}", group_id=index // 2) for index in range(6)
    ]
    assert len(set(rule.compute_columns(batch).tolist())) == 1


def test_each_seat_of_each_game_has_its_own_baseline(make: Any) -> None:
    rule = RAECredit(decay=0.0)
    rule.compute_columns(
        [
            make("a", "first", 1.0, episode_type="kuhn"),
            make("a", "second", -1.0, episode_type="kuhn"),
            make("b", "first", 0.25, episode_type="chess"),
        ]
    )
    assert rule.baseline("kuhn", "first") == 1.0
    assert rule.baseline("kuhn", "second") == -1.0
    assert rule.baseline("chess", "first") == 0.25
    assert rule.baseline("chess", "second") == 0.0


def test_a_long_game_counts_once(make: Any) -> None:
    rule = RAECredit(decay=0.0)
    rule.compute_columns([make("a", reward=1.0, step_index=index) for index in range(9)] + [make("b", reward=0.0)])
    assert rule.baseline("solve", "solver") == 0.5


def test_bias_correction_is_the_mean_of_what_was_seen(make: Any) -> None:
    rule = RAECredit(decay=0.95, bias_correction=True)
    for _ in range(3):
        rule.compute_columns([make("a", reward=2.0)])
        assert rule.baseline("solve", "solver") == pytest.approx(2.0)


def test_state_survives_a_checkpoint(make: Any) -> None:
    first, second = RAECredit(bias_correction=True), RAECredit(bias_correction=True)
    first.compute_columns([make("a", reward=1.0), make("a", "other", 3.0)])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    batch = [make("b", reward=2.0), make("b", "other", 2.0)]
    assert first.compute_columns(batch).tolist() == second.compute_columns(batch).tolist()
    assert first.state_dict() == second.state_dict()


def test_per_trajectory_each_game_is_judged_by_those_before_it(make: Any) -> None:
    """By hand, decay 1/2: seat first earns 1 0 1, so b is 0 1/2 1/4 5/8; seat second earns -1 0 2: 0 -1/2 -1/4 7/8."""
    rule = RAECredit(decay=0.5, per="trajectory")
    games = [
        make(game, actor, reward, step_index=index)
        for game, rewards in (("a", (1.0, -1.0)), ("b", (0.0, 0.0)), ("c", (1.0, 2.0)))
        for index, (actor, reward) in enumerate(zip(("first", "second"), rewards, strict=True))
    ]
    advantages = rule.compute_columns(games)
    np.testing.assert_allclose(advantages, [1, -1, -0.5, 0.5, 0.75, 2.25], atol=1e-7)
    assert (rule.baseline("solve", "first"), rule.baseline("solve", "second")) == (0.625, 0.875)
    per_batch = RAECredit(decay=0.5)
    np.testing.assert_allclose(per_batch.compute_columns(games), [1, -1, 0, 0, 1, 2])
    assert per_batch.baseline("solve", "first") == pytest.approx(1 / 3)


def test_per_trajectory_all_calls_of_a_game_share_one_baseline(make: Any) -> None:
    rule = RAECredit(decay=0.5, per="trajectory")
    interleaved = [
        make("a", reward=2.0),
        make("b", reward=4.0),
        make("a", reward=2.0, turn=1, step_index=1),
        make("b", reward=4.0, turn=1, step_index=1, finish_reason="length"),
    ]
    assert rule.compute_columns(interleaved).tolist() == [2.0, 3.0, 2.0, 3.0]
    assert rule.baseline("solve", "solver") == 2.5, "two updates, however many calls"


def test_per_trajectory_one_batch_or_many_is_the_same(make: Any) -> None:
    rng = np.random.default_rng(5)
    games = [make(f"t{n}", ("first", "second")[n % 2], float(rng.normal())) for n in range(40)]
    for options in ({}, {"bias_correction": True}):
        whole, parts = (RAECredit(per="trajectory", **options) for _ in range(2))
        expected = whole.compute_columns(games)
        got: list[float] = []
        for start in range(0, 40, 7):
            again = RAECredit(per="trajectory", **options)
            again.load_state_dict(json.loads(json.dumps(parts.state_dict())))
            got += again.compute_columns(games[start : start + 7]).tolist()
            parts = again
        np.testing.assert_array_equal(got, expected)
        assert parts.state_dict() == whole.state_dict()


def test_a_zero_is_no_loss(make: Any) -> None:
    rule = RAECredit(decay=0.0)
    assert rule.compute_columns([make("a", reward=-9.0)]).tolist() == [-9.0]
    assert rule.compute_columns([make("a", reward=-9.0)]).tolist() == [0.0]
    assert rule.zero_causes([make("a")], [0]) == ["zero_advantage"]


def test_a_reward_that_equals_its_baseline_up_to_rounding_says_nothing(make: Any) -> None:
    rule = RAECredit(decay=0.0)
    rule.compute_columns([make("a", reward=0.3)])
    assert rule.compute_columns([make("a", reward=0.1 + 0.2)]).tolist() == [0.0]
    assert rule.compute_columns([make("a", reward=0.3001)])[0] == pytest.approx(1e-4, rel=1e-3)
