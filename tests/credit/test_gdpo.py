"""GDPO: worked by hand, from columns, from a rubric's values and from steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import GDPOCredit, LevelCredit, credit_columns
from turnwise.types import GenerateResult, Rollout, Step


def test_worked_values() -> None:
    """Three attempts with rewards (0, 2), (1, 1), (2, 0): GRPO sees 2, 2, 2. With weights 1 and 0.5:

    each reward is normalised to -1, 0, 1 (the deviation is 1), so the sums are -0.5, 0, 0.5, and their deviation 0.5.
    """
    columns = {"a": [0.0, 1.0, 2.0], "b": [2.0, 1.0, 0.0]}
    whole = {"questions": [7] * 3, "components": columns}
    assert credit_columns("grpo", [2.0] * 3, **whole).tolist() == [0, 0, 0]
    found = credit_columns("gdpo", [2.0] * 3, options={"rewards": {"a": 1.0, "b": 0.5}}, **whole)
    assert found == pytest.approx([-1, 0, 1], abs=1e-5)
    found = credit_columns("gdpo", [2.0] * 3, options={"rewards": {"a": 1.0, "b": -1.0}}, **whole)
    assert found == pytest.approx([-1, 0, 1], abs=1e-5)


def test_a_reward_of_another_size_counts_alike() -> None:
    """The second question's second reward is 1000 times as large: by hand the sums are -s, s | -2s, 2s with
    s = sqrt(1/2), and their deviation is sqrt((2 s^2 + 8 s^2) / 3) = 1.29099."""
    right, brief = [0.0, 1.0, 0.0, 1.0], [5.0, 5.0, 0.0, 1000.0]
    found = credit_columns(
        "gdpo",
        [0.0] * 4,
        questions=[1, 1, 2, 2],
        components={"right": right, "brief": brief},
        options={"rewards": {"right": 1.0, "brief": 1.0}},
    )
    s = np.sqrt(0.5) / 1.2909944
    assert found == pytest.approx([-s, s, -2 * s, 2 * s], abs=1e-5)


def test_a_group_whose_rewards_are_all_tied_gets_exactly_zero() -> None:
    rng = np.random.default_rng(0)
    questions = np.repeat(range(8), 3)
    right, brief = rng.random(24), 1000 + rng.random(24)
    right[:3], brief[:3] = 0.1, 1000.3
    brief[3:6] = 7.0
    rule = GDPOCredit(rewards={"right": 1.0, "brief": 1.0})
    found = credit_columns(rule, [0.0] * 24, questions=list(questions), components={"right": right, "brief": brief})
    assert found[:3].tolist() == [0, 0, 0] and np.all(found[3:] != 0)


def test_a_zero_names_its_cause(make: Any) -> None:
    def of(question: str, right: float, brief: float) -> Any:
        return make(f"{question}{right}{brief}", group_id=question, info={"rewards": {"right": right, "brief": brief}})

    samples = [of("tied", 1.0, 0.0), of("tied", 1.0, 0.0), of("lonely", 1.0, 1.0)]
    samples += [of("mixed", 0.0, 1.0), of("mixed", 0.0, 2.0), of("mixed", 0.0, 3.0)]
    samples[1].rollout_id = "another"
    rule = GDPOCredit(rewards={"right": 1.0, "brief": 1.0})
    assert np.flatnonzero(rule.compute_columns(samples) == 0).tolist() == [0, 1, 2, 4]
    assert rule.zero_causes(samples, [0, 2, 4]) == ["equal_rewards", "alone", "zero_advantage"]
    assert rule.zero_causes(samples, []) == []


def result(name: str, metrics: dict[str, float], children: Any = ()) -> GenerateResult:
    step = Step("solver", 0, [], "4", [1], [2], [-0.1], [(1, 0)], "stop", reward=sum(metrics.values()))
    rollout = Rollout(name, "solve", "q", [step], metrics=metrics)
    return GenerateResult(rollout, group_id="q", children=list(children))


def test_the_values_of_a_rubric_s_functions_are_the_rewards() -> None:
    """Of the actor's own, in children as well; other metrics, and those of other actors, are not read."""
    top = result("p", {"right/solver": 1.0, "brief/solver": 5.0, "right/verifier": 9.0})
    top.children = [result("c", {"right/solver": 0.0, "brief/solver": 7.0})]
    rule = GDPOCredit(rewards={"right": 1.0, "brief": 0.5})
    found = rule.compute([top])
    assert found == {("p", 0): pytest.approx(0.5**0.5, abs=1e-5), ("c", 0): pytest.approx(-(0.5**0.5), abs=1e-5)}


def test_an_invalid_action_is_worth_what_it_was_paid() -> None:
    """An episode that an invalid action ended has no values of a rubric: its -1 counts in each reward, below the wrong
    answer's 0. Were it left out, an unreadable answer would be worth as much as the mean one."""
    results = [result("right", {"right/solver": 1.0}), result("wrong", {"right/solver": 0.0}), result("unread", {})]
    results[2].rollout.steps[0].reward = -1.0
    rule = GDPOCredit(rewards={"right": 1.0})
    found = rule.compute(results)
    assert [found[name, 0] for name in ("right", "wrong", "unread")] == pytest.approx([1, 0, -1], abs=1e-5)
    # Nor does a batch of such episodes alone, before any was scored, say that the name is wrong.
    fresh = GDPOCredit(rewards={"right": 1.0})
    assert fresh.compute(results[2:]) == {("unread", 0): 0.0}
    with pytest.raises(ValueError, match=r"no call of this batch has \['rihgt'\]"):
        GDPOCredit(rewards={"rihgt": 1.0}).compute(results)


def test_a_batch_may_lack_a_reward_that_was_seen() -> None:
    """After the first batch: one in which the only actor whom a function pays did nothing that trains."""
    rule = GDPOCredit(rewards={"right": 1.0, "brief": 1.0})
    rule.compute([result("a", {"right/solver": 1.0, "brief/solver": 0.0})])
    later = [result("b", {"right/solver": 1.0}), result("c", {"right/solver": 0.0})]
    assert rule.compute(later)["b", 0] == pytest.approx(0.5**0.5, abs=1e-5)


def test_what_it_does_not_read_is_refused(make: Any) -> None:
    edge = {"kind": "children", "parent": "p", "actor": "a", "child": "c", "child_actor": "b"}
    with pytest.raises(ValueError, match="its advantages don't depend on the rewards of calls"):
        LevelCredit(rule=GDPOCredit(rewards={"right": 1.0}), edges=[edge])
    with pytest.raises(ValueError, match="step 0 of rollout 'a' has no tree of episodes: expected info"):
        GDPOCredit(rewards={"right": 1.0}).compute_columns([make("a")])


def test_a_reward_that_no_call_has_is_named(make: Any) -> None:
    samples = [make("a", info={"rewards": {"right": 1.0}}), make("b", info={"rewards": {"right": 0.0}})]
    with pytest.raises(ValueError, match=r"no call of this batch has \['rihgt'\]; expected some of \['right'\]"):
        GDPOCredit(rewards={"rihgt": 1.0}).compute_columns(samples)
    samples[0].info["rewards"]["right"] = float("inf")
    with pytest.raises(ValueError, match="step 0 of rollout 'a' has rewards"):
        GDPOCredit(rewards={"right": 1.0}).compute_columns(samples)


def test_rewards_that_cancel_out_leave_no_signal() -> None:
    right = [0.1, 0.7, 0.3, 0.9]
    parts = {"right": right, "wrong": [1 - value for value in right]}
    rule = GDPOCredit(rewards={"right": 1.0, "wrong": 1.0})
    assert credit_columns(rule, right, questions=["q"] * 4, components=parts).tolist() == [0.0] * 4
