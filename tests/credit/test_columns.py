"""Credit rules over the columns of another trainer's batch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from turnwise.credit import RAECredit, credit_columns


def test_a_tree_compares_the_branches_of_one_node() -> None:
    found = credit_columns("at_grpo", [1, 0, 5, 5], questions=[1] * 4, trajectories=[0] * 4, nodes=[0, 0, 1, 1])
    assert found == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0, 0], abs=1e-6)


def test_a_rule_with_state_keeps_it_between_batches() -> None:
    rule = RAECredit(decay=0.5)
    first = credit_columns(rule, [1.0, 1.0], questions=[0, 0])
    second = credit_columns(rule, [1.0, 1.0], questions=[0, 0])
    assert first == pytest.approx([1.0, 1.0]) and second == pytest.approx([0.5, 0.5])


def test_attempts_are_compared_by_their_own_reward() -> None:
    found = credit_columns(
        "episodic", [0.0, 0.0], questions=[0, 0], trajectory_rewards=[3.0, 4.0], trajectories=["x", ("y", 1)]
    )
    assert found.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ("grpo", {"actors": ["a"]}, "actors: has 1 entries, and rewards has 2"),
        ("grpo", {"rewards": [math.nan, 0.0]}, r"rewards: expected \[B\] finite numbers"),
        ("grpo", {"trajectory_rewards": [[1.0], [2.0]]}, r"trajectory_rewards: expected \[B\] finite numbers"),
        ("opo", {}, "lengths=None: OPOCredit weighs rewards"),
        ("gigpo", {}, "states=None: GiGPOCredit compares"),
        ("gdpo", {"options": {"rewards": {"a": 1}}}, "components=None: GDPOCredit normalises"),
        ("grpo", {"components": {"a": [1.0]}}, r"components\['a'\]: has 1 entries, and rewards has 2"),
        ("grpo", {"components": {"a": [1.0, math.inf]}}, r"components\['a'\]: expected \[B\] finite numbers"),
        ("vine", {}, "rule=VineCredit: it needs whole trees"),
        ("levels", {}, "rule=LevelCredit: it needs whole trees"),
        (RAECredit(), {"options": {"decay": 0.5}}, "options={'decay': 0.5}: expected None"),
        ("nothing", {}, "'rule' = 'nothing'"),
    ],
)
def test_bad_columns_are_named(rule: Any, settings: dict[str, Any], message: str) -> None:
    settings = {"rewards": [1.0, 0.0], "questions": [0, 0], **settings}
    with pytest.raises(ValueError, match=message):
        credit_columns(rule, settings.pop("rewards"), **settings)
