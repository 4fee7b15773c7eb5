"""The rules of tic-tac-toe. A board is a string of nine ``X``, ``O`` and ``.``, row by row. Seat 0 plays ``X``, first.

Example: on ``"X...O..X."`` O is to move. Players see the numbers of free cells, and answer ``[6]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from turnwise.tasks.two_player import Rules
from turnwise.types import Messages

CELLS = 9
EMPTY = "." * CELLS
MARKS = "XO"
LINES = (
    *((3 * r, 3 * r + 1, 3 * r + 2) for r in range(3)),
    *((c, c + 3, c + 6) for c in range(3)),
    (0, 4, 8),
    (2, 4, 6),
)


class TicTacToeRules(Rules):
    """The game as a :class:`Rules`: 1 for a win, -1 for a loss, 0 for a draw. Nothing is hidden.

    Question: ``{"board": "........."}``, or any position that is not decided; ``{}`` is the empty board.
    """

    name = "tic_tac_toe"

    def __init__(self, invalid_cost: float = 1.5) -> None:
        self.invalid_cost = invalid_cost

    def start(self, question: Mapping[str, Any]) -> dict[str, Any]:
        return {"board": check_board(question.get("board", EMPTY))}

    def to_move(self, game: Mapping[str, Any]) -> int | None:
        board = game["board"]
        return None if is_over(board) else mover(board)

    def observe(self, game: Mapping[str, Any], seat: int) -> str:
        return format_board(game["board"])

    def parse(self, text: str) -> str | None:
        """The last ``[0]`` to ``[8]`` in the text."""
        found = re.findall(r"\[([0-8])\]", text)
        return found[-1] if found else None

    def is_legal(self, game: Mapping[str, Any], action: str) -> bool:
        return game["board"][int(action)] == "."

    def apply(self, game: dict[str, Any], action: str) -> None:
        game["board"] = place(game["board"], int(action))

    def payoffs(self, game: Mapping[str, Any]) -> tuple[float, float]:
        won = outcome(game["board"])
        return won, -won

    def describe(self, game: Mapping[str, Any]) -> dict[str, Any]:
        return {"board": game["board"]}


def mover(board: str) -> int:
    """Return 0 if X is to move, 1 if O is."""
    return (board.count("X") - board.count("O")) % 2


def place(board: str, cell: int) -> str:
    """Put the mark of the seat to move into a free cell of ``board``."""
    assert board[cell] == ".", f"cell {cell} of {board} is taken"
    return board[:cell] + MARKS[mover(board)] + board[cell + 1 :]


def outcome(board: str) -> float:
    """Return 1 if X has a line, -1 if O has one, else 0."""
    for first, second, third in LINES:
        if board[first] != "." and board[first] == board[second] == board[third]:
            return 1.0 if board[first] == "X" else -1.0
    return 0.0


def is_over(board: str) -> bool:
    return "." not in board or outcome(board) != 0


def check_board(board: Any) -> str:
    """Return ``board``. Raises ``ValueError`` unless the game can continue from it."""
    right = isinstance(board, str) and len(board) == CELLS and set(board) <= set("XO.")
    if not right or board.count("X") - board.count("O") not in (0, 1) or is_over(board):
        raise ValueError(f"artifact['board']={board!r}: expected nine of 'X', 'O' and '.', X first, and not decided")
    return board


def format_board(board: str) -> str:
    """Three rows; free cells are shown by their numbers.

    Example: ``"X...O..X."`` is ``"X 1 2\\n3 O 5\\n6 X 8"``.
    """
    shown = [str(cell) if mark == "." else mark for cell, mark in enumerate(board)]
    return "\n".join(" ".join(shown[row : row + 3]) for row in (0, 3, 6))


def read_board(messages: Messages) -> str:
    """Parse the board from a prompt."""
    cells = messages[-1]["content"].split()
    if len(cells) != CELLS or not all(cell in ("X", "O", str(index)) for index, cell in enumerate(cells)):
        raise ValueError(f"messages={messages!r}: expected a prompt of tic-tac-toe")
    return "".join("." if cell.isdigit() else cell for cell in cells)
