"""All positions counted, the random game's exact chances, and values against a plain recursion."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from turnwise.tasks.tic_tac_toe import optimal_policy, outcomes, positions, solve, uniform_policy
from turnwise.tasks.tic_tac_toe.board import is_over, mover, outcome, place

SEED = int(np.random.SeedSequence().entropy % 2**32)
SYMMETRIES = [
    [3 * r + c for r, c in (turn(i // 3, i % 3) for i in range(9))]
    for turn in (
        lambda r, c: (r, c), lambda r, c: (c, 2 - r), lambda r, c: (2 - r, 2 - c), lambda r, c: (2 - c, r),
        lambda r, c: (r, 2 - c), lambda r, c: (2 - r, c), lambda r, c: (c, r), lambda r, c: (2 - c, 2 - r),
    )
]  # fmt: skip


def random_policy(columns=10, sharp=0.3):
    rng = np.random.default_rng(SEED)
    print("seed", SEED)
    legal = positions().legal
    if columns == 10:
        legal = np.concatenate([legal, np.ones((len(legal), 1), dtype=bool)], axis=1)
    weights = rng.gamma(sharp, size=legal.shape) * legal + 1e-12 * legal
    return weights / weights.sum(axis=1, keepdims=True)


def plain_value(policy, responder=None, cost=1.5):
    """X's value by recursion over boards; the seat ``responder`` plays its best."""
    rows = {board: row for row, board in enumerate(positions().open_boards)}

    @cache
    def value(board):
        if is_over(board):
            return outcome(board)
        seat, row = mover(board), policy[rows[board]]
        below = {cell: value(place(board, cell)) for cell in range(9) if board[cell] == "."}
        if seat == responder:
            return max(below.values()) if seat == 0 else min(below.values())
        invalid = row[9] if len(row) > 9 else 0.0
        return sum(row[cell] * worth for cell, worth in below.items()) + invalid * (-cost if seat == 0 else cost)

    return value("." * 9)


def test_all_positions_are_there_and_765_up_to_symmetry():
    where = positions()
    assert len(where.boards) == len(set(where.boards)) == 5478
    assert len(where.open) == 4520
    assert where.ends.sum(axis=0).tolist() == [626, 16, 316]
    assert len({min("".join(board[i] for i in turn) for turn in SYMMETRIES) for board in where.boards}) == 765
    assert where.legal.sum() == (where.child >= 0).sum() == 16167


def test_perfect_play_is_a_draw():
    solved = solve(optimal_policy())
    assert (solved.value, solved.best_response, solved.exploitability) == (0.0, (0.0, 0.0), 0.0)
    assert outcomes(optimal_policy())[1] == pytest.approx(1.0)
    opening = optimal_policy()[0]
    assert opening.tolist() == [1 / 9] * 9, "every opening holds the draw"


def test_chances_of_the_random_game():
    chances = outcomes(uniform_policy())
    assert chances == pytest.approx([0.5849, 0.1270, 0.2881, 0.0], abs=5e-5)
    assert chances[:3] == pytest.approx([737 / 1260, 8 / 63, 121 / 420], abs=1e-12)
    assert solve(uniform_policy()).value == pytest.approx(chances[0] - chances[2])


@pytest.mark.parametrize("make", [uniform_policy, random_policy], ids=["uniform", "random"])
def test_values_and_best_responses_are_those_of_a_plain_recursion(make):
    policy = make()
    solved = solve(policy, 1.25)
    assert solved.value == pytest.approx(plain_value(policy, cost=1.25), abs=1e-12)
    assert solved.best_response[0] == pytest.approx(plain_value(policy, 0, 1.25), abs=1e-12)
    assert solved.best_response[1] == pytest.approx(-plain_value(policy, 1, 1.25), abs=1e-12)
    assert solved.exploitability > 0.5
    assert outcomes(policy).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("policy", "named"),
    [(np.full((4520, 8), 1 / 8), r"shape \(4520, 8\)"), (np.full((4520, 9), 1 / 9), r"policy\[1, 0\].*not legal")],
)
def test_bad_policies_are_refused(policy, named):
    with pytest.raises(ValueError, match=named):
        solve(policy)
