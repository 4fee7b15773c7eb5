"""The arrays on games whose answers are known: a game with forced moves, unequal chances, and bad policies."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.tasks.two_player.tree import build_tree, check_policy


def test_an_action_that_is_not_there_is_never_the_best():
    """The only move of seat 0 is action 2 and costs 5; then seat 1 may give back 1 (action 1) or nothing (action 0)."""
    tree = build_tree(
        roots=[("", 1.0)],
        children=lambda state: {"": [(2, "c")], "c": [(0, "ca"), (1, "cb")]}.get(state, []),
        infoset=lambda state: state,
        payoff=lambda state: {"ca": -5.0, "cb": -4.0}[state],
        infosets=[("", 0), ("c", 1)],
        actions=3,
    )
    policy = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    assert tree.best_response(policy, 0)[0] == -4.0 and tree.best_response(policy, 0)[1][0] == 2
    assert tree.best_response(policy, 1)[0] == 5.0 and tree.best_response(policy, 1)[1][1] == 0


def test_chance_weighs_the_deals():
    tree = build_tree(
        roots=[("good", 0.25), ("bad", 0.75)],
        children=lambda state: [] if state.endswith("!") else [(0, state + "!"), (1, "fold!")],
        infoset=lambda state: "blind",
        payoff=lambda state: {"good!": 8.0, "bad!": -4.0, "fold!": -1.5}[state],
        infosets=[("blind", 0)],
        actions=2,
    )
    assert tree.value(np.array([[1.0, 0.0]])) == pytest.approx(0.25 * 8 - 0.75 * 4)
    assert tree.best_response(np.array([[1.0, 0.0]]), 0) == (pytest.approx(-1.0), 0)
    assert tree.best_response(np.array([[1.0, 0.0]]), 1)[0] == pytest.approx(1.0)


LEGAL = np.array([[True, True], [True, False]])


def test_a_policy_without_invalid_actions_gets_a_column_of_zeros():
    assert check_policy([[0.5, 0.5], [1, 0]], LEGAL).tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]
    given = [[0.5, 0.25, 0.25], [0.5, 0.0, 0.5]]
    assert check_policy(given, LEGAL).tolist() == given


def test_weight_on_an_illegal_action_belongs_into_the_last_column():
    with pytest.raises(ValueError, match=r"policy\[1, 1\]=0.5: the action is not legal there"):
        check_policy([[0.5, 0.5], [0.5, 0.5]], LEGAL)
