"""The rules, worked by hand."""

from __future__ import annotations

import pytest

from turnwise.tasks.tic_tac_toe.board import LINES, TicTacToeRules, format_board, outcome, read_board

PLAYS = [
    ([0, 3, 1, 4, 2], "XXXOO....", (1.0, -1.0)),
    ([0, 2, 1, 4, 8, 6], "XXO.O.O.X", (-1.0, 1.0)),
    ([0, 4, 8, 1, 7, 6, 2, 5, 3], "XOXXOOOXX", (0.0, 0.0)),
    ([0, 1, 2, 3, 4, 5, 7, 6, 8], "XOXOXOOXX", (1.0, -1.0)),
]


@pytest.mark.parametrize(("cells", "board", "payoffs"), PLAYS)
def test_plays_worked_by_hand(cells, board, payoffs):
    rules = TicTacToeRules()
    game = rules.start({})
    for number, cell in enumerate(cells):
        assert rules.to_move(game) == number % 2
        assert rules.play(game, f"Not [{(cell + 1) % 9}] but [{cell}]!") == "legal"
    assert rules.to_move(game) is None
    assert rules.describe(game) == {"board": board}
    assert rules.payoffs(game) == payoffs


def test_eight_lines_win():
    for line in LINES:
        for mark, won in (("X", 1.0), ("O", -1.0)):
            assert outcome("".join(mark if cell in line else "." for cell in range(9))) == won
    assert len({tuple(sorted(line)) for line in LINES}) == 8
    magic = (2, 7, 6, 9, 5, 1, 4, 3, 8)
    assert all(sum(magic[cell] for cell in line) == 15 for line in LINES), "the lines of a magic square"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("[1]", "legal"), ("[0]", "illegal"), ("[9]", "unreadable"), ("1", "unreadable"), ("[ 1 ]", "unreadable")],
)
def test_what_can_be_read_and_what_is_allowed(text, verdict):
    game = {"board": "X........"}
    assert TicTacToeRules().play(game, text) == verdict
    assert game["board"] == ("XO......." if verdict == "legal" else "X........")


def test_free_cells_are_shown_by_their_numbers():
    assert format_board("X...O..X.") == "X 1 2\n3 O 5\n6 X 8"
    assert read_board([{"role": "user", "content": "X 1 2\n3 O 5\n6 X 8"}]) == "X...O..X."
    with pytest.raises(ValueError, match="expected a prompt of tic-tac-toe"):
        read_board([{"role": "user", "content": "X 1 2\n3 O 5\n6 X 7"}])


@pytest.mark.parametrize("board", ["XX.......", "O........", "XXXOO....", "X", None, "XOXXOOOXX", "x........"])
def test_a_game_starts_where_it_can_go_on(board):
    with pytest.raises(ValueError, match=r"artifact\['board'\]="):
        TicTacToeRules().start({"board": board})
