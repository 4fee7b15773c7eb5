"""Groups: what is compared with what, what counts once, and how options change the statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import (
    ATGRPOCredit,
    DrMASCredit,
    GiGPOCredit,
    GRPOCredit,
    HierarchyCredit,
    PassAtKCredit,
    ReinforcePPCredit,
)
from turnwise.credit.rules.turn_returns import discounted_returns
from turnwise.types import GenerateResult, Rollout, Sample, Step


def test_compute_walks_children_and_skips_failures() -> None:
    def result(name: str, reward: float, **fields: Any) -> GenerateResult:
        step = Step("solver", 0, [], "4", [1], [2], [-0.1], [(1, 0)], "stop", reward=reward)
        judge = Step(None, 0, [], "ok", [1], [2], [-0.1], [(1, 0)], "stop")
        error = fields.pop("error", None)
        return GenerateResult(Rollout(name, "solve", "q", [judge, step], error=error), group_id="q", **fields)

    parent = result("p", 9.0, is_trainable=False, children=[result("a", 1.0), result("b", 0.0)])
    advantages = DrMASCredit().compute([parent, result("x", 5.0, error="Traceback")])
    assert advantages == {("a", 1): pytest.approx(0.5**0.5, abs=1e-5), ("b", 1): pytest.approx(-(0.5**0.5), abs=1e-5)}


def test_a_group_of_one_gets_zero_and_is_not_lost(make: Any) -> None:
    samples = [make("a", reward=1.0, group_id="alone"), make("b", reward=1.0), make("c", reward=0.0)]
    for rule in (GRPOCredit, HierarchyCredit, DrMASCredit, ATGRPOCredit):
        advantages = rule().compute_columns(samples)
        assert advantages[0] == 0 and advantages[1] > 0 > advantages[2]
        assert rule(singleton="raw").compute_columns(samples)[0] == pytest.approx(1.0, abs=1e-5)
        with pytest.raises(ValueError, match=r"group .*'alone'.* has a single member, and singleton='error'"):
            rule(singleton="error").compute_columns(samples)


def test_units_of_several_calls_are_tied_by_their_means(make: Any) -> None:
    """0.1 + 0.2 is not 0.3 in binary: the mean of three equal rewards must be that reward all the same."""
    samples = [make("a", reward=0.1) for _ in range(3)] + [make("b", reward=0.1)]
    assert GRPOCredit().compute_columns(samples).tolist() == [0.0] * 4
    assert GRPOCredit().zero_causes(samples, range(4)) == ["equal_rewards"] * 4
    assert GRPOCredit(singleton="raw").zero_causes([make("a")], [0]) == ["zero_advantage"], "its reward is 0"


def test_means_are_tied_by_the_magnitude_of_their_rewards(make: Any) -> None:
    """0.1 + 0.2 - 0.3 leaves 5.6e-17, and 1000.1 - 999.8 is 0.3 to 1e-13: rounding of the rewards, not of the means."""
    parts = {"a": [0.1, 0.2, -0.3], "b": [0.0], "c": [1000.1, -999.8], "d": [0.1, 0.2]}
    samples = [
        make(name, reward=reward, trajectory_reward=0.0, group_id=name in "ab")
        for name, rewards in parts.items()
        for reward in rewards
    ]
    for rule in (GRPOCredit(), GRPOCredit(normalize=False), PassAtKCredit(k=1)):
        assert rule.compute_columns(samples).tolist() == [0.0] * 8
        assert rule.zero_causes(samples, range(8)) == ["equal_rewards"] * 8
    assert GRPOCredit(center="none", normalize=False).compute_columns(samples)[-1] == pytest.approx(0.15)


def test_the_samples_own_group_and_a_custom_key_go_first(make: Any) -> None:
    samples = [make("a", reward=1.0, group_id=1), make("b", reward=0.0, group_id=2), make("c", reward=4.0, group_id=2)]
    assert DrMASCredit().compute_columns(samples)[0] == 0
    assert DrMASCredit(key=lambda s: (s.actor,)).compute_columns(samples)[0] < 0
    for sample in samples[:2]:
        sample.group = ("mine",)
    advantages = DrMASCredit(key=lambda s: (s.actor,)).compute_columns(samples)
    np.testing.assert_allclose(advantages, [0.5**0.5, -(0.5**0.5), 0], atol=1e-5)


def test_options_reach_the_statistics(make: Any) -> None:
    samples = [make(name, reward=reward) for name, reward in zip("abcd", [1.0, 0.0, 1.0, 1.0], strict=True)]
    for options, expected in [
        ({}, [0.499999, -1.499997, 0.499999, 0.499999]),
        ({"scale": "none"}, [0.25, -0.75, 0.25, 0.25]),
        ({"scale": "none", "center": "leave_one_out"}, [1 / 3, -1, 1 / 3, 1 / 3]),
        ({"scale": "none", "center": "none"}, [1, 0, 1, 1]),
        ({"ddof": 0}, [0.577349, -1.732047, 0.577349, 0.577349]),
        ({"eps": 0.5}, [0.25, -0.75, 0.25, 0.25]),
        ({"min_std": 0.6}, [0, 0, 0, 0]),
    ]:
        np.testing.assert_allclose(DrMASCredit(**options).compute_columns(samples), expected, atol=1e-6)


def test_calls_may_share_the_weight_of_their_attempt(make: Any) -> None:
    """Three calls with reward 1 and one with 0: each attempt's weights add up to the same."""
    s, samples = 0.5**0.5, [make("a", reward=1.0, step_index=index) for index in range(3)] + [make("b", reward=0.0)]
    np.testing.assert_allclose(HierarchyCredit(ddof=1).compute_columns(samples), [s, s, s, -s], atol=1e-5)
    by_attempt = HierarchyCredit(ddof=1, call_weight="attempt").compute_columns(samples)
    np.testing.assert_allclose(by_attempt, [s / 3, s / 3, s / 3, -s], atol=1e-5)


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
    np.testing.assert_allclose(HierarchyCredit().compute_columns(samples), [1, -1] * len(pairs), atol=1e-5)


def test_only_what_is_better_than_the_others_may_count(make: Any) -> None:
    samples = [make(name, reward=reward) for name, reward in zip("ab", [1.0, 0.0], strict=True)]
    np.testing.assert_allclose(GRPOCredit(positive_only=True).compute_columns(samples), [0.5**0.5, 0], atol=1e-5)


# --- faults of published code: group ids divided twice, and rows before the last turn dropped ------------------------
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


# --- states as anchors ----------------------------------------------------------------------------------------------
def test_without_a_named_state_the_prompt_is_the_anchor(make: Any) -> None:
    def rows() -> list[Sample]:
        return [make("a", reward=1.0, prompt_token_ids=[1, 2]), make("b", reward=0.0, prompt_token_ids=[1, 2])]

    same = GiGPOCredit().compute_columns(rows())
    apart = rows()
    apart[1].prompt_token_ids = [1, 3]
    np.testing.assert_allclose(same, [2 * 0.5**0.5, -2 * 0.5**0.5], atol=1e-5)
    np.testing.assert_allclose(GiGPOCredit().compute_columns(apart), same / 2, rtol=1e-6)
    mine = GiGPOCredit(anchor=lambda sample: "everywhere").compute_columns(apart)
    np.testing.assert_array_equal(mine, same)


def test_a_state_that_cannot_be_compared_is_named(make: Any) -> None:
    with pytest.raises(TypeError, match="list"):
        GiGPOCredit().compute_columns([make("a", info={"state": [1]}), make("b", info={"state": [1]})])


def test_equal_rewards_say_nothing(make: Any) -> None:
    samples = [make(name, reward=0.1, completion_token_ids=[2] * size) for name, size in (("a", 3), ("b", 7), ("c", 1))]
    for eps in (1e-8, 0.0):
        assert ReinforcePPCredit(eps=eps).compute_columns(samples).tolist() == [0, 0, 0]
    other = [make(name, reward=reward, policy="other") for name, reward in (("d", 0.0), ("e", 1.0), ("f", 0.5))]
    assert ReinforcePPCredit().compute_columns(samples + other)[5] == 0
    causes = ["equal_rewards"] * 3 + ["zero_advantage"]
    assert ReinforcePPCredit().zero_causes(samples + other, [0, 1, 2, 5]) == causes, "the batch is its policy's group"


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


def test_the_mean_of_the_group_can_be_the_scale(make: Any) -> None:
    """MaxRL: one success in four weighs (1 - 1/4) / (1/4) = 3, a failure -1; three in four weigh 1/3, a failure -1."""
    rewards = {"hard": [1.0, 0.0, 0.0, 0.0], "easy": [1.0, 1.0, 1.0, 0.0], "never": [0.0] * 4, "alone": [1.0]}
    samples = [
        make(f"{group}{row}", reward=reward, group_id=group)
        for group, of_group in rewards.items()
        for row, reward in enumerate(of_group)
    ]
    want = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0, 0]
    for rule in (GRPOCredit, DrMASCredit, ATGRPOCredit, HierarchyCredit):
        np.testing.assert_allclose(rule(scale="mean").compute_columns(samples), want, atol=2e-5)
    # Each attempt counts once: "a" earns the mean .5 of its calls, so the group's mean is .25. Each call counts once: a
    # third of them succeed.
    calls = [make("a", reward=1.0), make("a", reward=0.0), make("b", reward=0.0)]
    np.testing.assert_allclose(GRPOCredit(scale="mean").compute_columns(calls), [1, 1, -1], atol=1e-5)
    np.testing.assert_allclose(DrMASCredit(scale="mean").compute_columns(calls), [2, -1, -1], atol=1e-5)
    # The mean of the others as centre, and eps beside the mean: (1 - 0) / (.25 + .25), -1/3 / .5.
    loo = GRPOCredit(scale="mean", center="leave_one_out", eps=0.25).compute_columns(samples[:4])
    np.testing.assert_allclose(loo, [2, -2 / 3, -2 / 3, -2 / 3], atol=1e-6)
    assert GRPOCredit(scale="mean", eps=0.0).compute_columns(samples[8:12]).tolist() == [0.0] * 4
    assert GRPOCredit(scale="mean", singleton="raw").compute_columns(samples[12:]).tolist() == [1.0]
    with pytest.raises(ValueError, match=r"rewards\[1\]=-0.5: expected numbers >= 0.*scale='mean'"):
        GRPOCredit(scale="mean").compute_columns([make("a", reward=1.0), make("b", reward=-0.5)])
    with pytest.raises(ValueError, match="center='none': expected another one with scale='mean'"):
        GRPOCredit(scale="mean", center="none")
    with pytest.raises(ValueError, match="scale='median': expected one of std, none, mean"):
        GRPOCredit(scale="median")
