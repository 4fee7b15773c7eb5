"""Tic-tac-toe: its rules, all its positions, and the exact value and exploitability of a policy.

A board is a string of nine ``X``, ``O`` and ``.``, row by row. Seat 0 plays ``X``, first. On ``"X...O..X."`` O moves.
Players see the numbers of free cells, and answer ``[6]``.

Legend: ``P`` the 5,478 positions that can be reached, fewer marks first; ``I`` the 4,520 of them that are not over. A
policy is ``[I, 9]`` float64, the probabilities of the cells; ``[I, 10]`` adds the probability of an invalid action. One
policy serves both seats, as each position belongs to one of them. Like the players, it sees only the position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from turnwise.tasks.two_player import SEATS, Decision, Rules
from turnwise.tasks.two_player.tree import Exploitability, check_policy
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
        cells = re.findall(r"\[([0-8])\]", text)
        return cells[-1] if cells else None

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
    """Write three rows. Free cells are shown by their numbers.

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


# ---------------------------------------------------------------------------------------------------------------------
# Exact value and exploitability
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Positions:
    """All positions as ``boards``, and arrays over them.

    ``open [I]``: indices of the positions that are not over. ``mover [I]``: the seat to move. ``legal [I, 9]``: bool.
    ``child [I, 9]``: the index of the next position, -1 if not legal. ``marks [I]``: the number of marks.
    ``ends [P, 3]``: one-hot over "X won", "draw" and "O won"; zeros if the game is not over.
    """

    boards: tuple[str, ...]
    open: np.ndarray
    mover: np.ndarray
    legal: np.ndarray
    child: np.ndarray
    ends: np.ndarray
    marks: np.ndarray

    @property
    def open_boards(self) -> list[str]:
        """Boards of the policy's rows, in order."""
        return [self.boards[index] for index in self.open]


@cache
def positions() -> Positions:
    """List all positions; cached."""
    # Find the positions layer by layer: those of a layer have one mark more than those before.
    numbers = {EMPTY: 0}
    layer = [EMPTY]
    while layer:
        below = [place(board, c) for board in layer if not is_over(board) for c in range(CELLS) if board[c] == "."]
        layer = list(dict.fromkeys(below))
        for board in layer:
            numbers.setdefault(board, len(numbers))
    # Fill the arrays.
    boards = tuple(numbers)
    going = [index for index, board in enumerate(boards) if not is_over(board)]
    legal = np.array([[mark == "." for mark in boards[index]] for index in going])
    child = np.full(legal.shape, -1)
    for row, cell in np.argwhere(legal):
        child[row, cell] = numbers[place(boards[going[row]], int(cell))]
    ends = np.zeros((len(boards), 3))
    for index, board in enumerate(boards):
        if is_over(board):
            ends[index, 1 - int(outcome(board))] = 1.0
    movers = np.array([mover(boards[index]) for index in going])
    marks = np.array([CELLS - boards[index].count(".") for index in going])
    return Positions(boards, np.array(going), movers, legal, child, ends, marks)


def uniform_policy() -> np.ndarray:
    """Return ``[4520, 9]``: equal probabilities for all free cells."""
    legal = positions().legal
    return legal / legal.sum(axis=1, keepdims=True)


@cache
def optimal_policy() -> np.ndarray:
    """Return ``[4520, 9]``: equal probabilities for all moves that keep the minimax value. It is an equilibrium."""
    where = positions()
    values = _values(np.zeros((len(where.open), CELLS + 1)), 0.0, responders=(0, 1))
    gains = np.where(where.legal, (1 - 2 * where.mover)[:, None] * values[where.child], -np.inf)
    best = gains == gains.max(axis=1, keepdims=True)
    return best / best.sum(axis=1, keepdims=True)


def solve(policy: Any, invalid_cost: float = 1.5) -> Exploitability:
    """Compute value, best responses and exploitability of a policy for both seats. ``value`` is X's.

    Example: ``solve(optimal_policy()).exploitability == 0``.
    """
    table = check_policy(policy, positions().legal)
    value, first, second = (_values(table, invalid_cost, who)[0] for who in ((), (0,), (1,)))
    return Exploitability(float(value), (float(first), 0.0 - float(second)))


def outcomes(policy: Any) -> np.ndarray:
    """Return ``[4]`` float64: the probabilities of a win of X, a draw, a win of O, and an end by an invalid action."""
    where = positions()
    table = check_policy(policy, where.legal)
    chances = np.concatenate([where.ends, np.zeros((len(where.boards), 1))], axis=1)
    for rows in _layers(where):
        below = chances[where.child[rows]] * table[rows, :CELLS, None]
        chances[where.open[rows]] = below.sum(axis=1)
        chances[where.open[rows], 3] += table[rows, CELLS]
    return chances[0]


def decisions() -> list[Decision]:
    """Return the query to a player in each position that is not over, in the order of the policy's rows."""
    asked = []
    for board, seat in zip(positions().open_boards, positions().mover.tolist(), strict=True):
        actions = tuple(str(cell) if mark == "." else None for cell, mark in enumerate(board))
        asked.append(Decision(SEATS[seat], TicTacToeRules().messages({"board": board}, seat), actions))
    return asked


def _values(table: np.ndarray, invalid_cost: float, responders: tuple[int, ...]) -> np.ndarray:
    """Return X's value ``[P]`` if seats in ``responders`` play their best and the others follow ``table [I, 10]``.

    A best response never takes an invalid action, as no legal action costs more (``invalid_cost`` >= 1).
    """
    where = positions()
    values = where.ends @ np.array([1.0, 0.0, -1.0])
    for rows in _layers(where):
        seat = int(where.mover[rows[0]])
        sign = 1.0 - 2.0 * seat
        below = values[where.child[rows]]
        if seat in responders:
            values[where.open[rows]] = sign * np.where(where.legal[rows], sign * below, -np.inf).max(axis=1)
        else:
            expected = (table[rows, :CELLS] * below).sum(axis=1)
            values[where.open[rows]] = expected - sign * invalid_cost * table[rows, CELLS]
    return values


def _layers(where: Positions) -> list[np.ndarray]:
    """Group the rows by their number of marks, most marks first, so that children come before their parents."""
    return [np.flatnonzero(where.marks == count) for count in range(CELLS - 1, -1, -1)]
