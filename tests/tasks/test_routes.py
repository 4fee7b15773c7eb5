from __future__ import annotations

import pytest

from turnwise.tasks.routes import Outcome, board_message, check_note, read_board


@pytest.mark.parametrize("route", [None, "DRU"])
@pytest.mark.parametrize("note", ["", "Round 2. Walked: 1 move."])
@pytest.mark.parametrize("check", ["", "it works", "2 moves, then U is blocked"])
def test_prompts_read_back(route, note, check):
    board = "A#G\n...\n..#"
    message = board_message(board, route, note, check)
    assert read_board([message]) == (board, route)
    assert message["content"].endswith(board) and ("Checked" in message["content"]) == bool(route and check)


@pytest.mark.parametrize(
    ("goal", "moves", "blocked", "told"), [(1.0, 2, "", "it works"), (0.0, 1, "R", "1 move, then R is blocked")]
)
def test_a_suggestion_is_checked(goal, moves, blocked, told):
    assert check_note(Outcome(True, 1.0, 1.0, 0.5, goal, moves, blocked)._asdict()) == told
