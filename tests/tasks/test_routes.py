from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.tasks.routes import MOVES, Outcome, board_message, check_note, format_route, parse_route, read_board


@pytest.mark.parametrize(
    "text",
    [
        "D R R U",
        "DRRU",
        "  D, R, R, U\n",
        "down right Right UP",
        "[D, R, R, U]",
        "['down', 'right', 'right', 'up']",
        "D -> R → R > U.",
        "Moves: D R R U",
        "**Answer:** `DRRU`",
        "First I thought\nU U U\nbut there is a wall.\nD R R U\n\nThat is all.",
        "D R R U\nI am sure: it works.",
    ],
)
def test_the_last_route_is_read(text):
    assert parse_route(text) == "DRRU"


@pytest.mark.parametrize(
    "text", ["", "I cannot.", "d r r u", "Go down and right", "D R X U", "->", "Moves:", "1. D 2. R"]
)
def test_what_is_no_route_reads_as_none(text):
    assert parse_route(text) is None


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="UDLR", min_size=1, max_size=30), st.text(alphabet="ab.: \n", max_size=20))
def test_writing_and_reading_agree(route, talk):
    assert parse_route(f"{talk}\n{format_route(route)}\n{talk}") == parse_route(route) == route


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_reading_never_fails(text):
    assert set(parse_route(text) or "") <= set(MOVES)


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
