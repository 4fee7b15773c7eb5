"""Every position of tic-tac-toe in arrays: what a policy is worth, exactly, and how far it can be exploited.

Legend: ``P`` the 5,478 positions that can be reached, fewer marks first; ``I`` the 4,520 of them in which somebody is
to move. A policy is ``[I, 9]`` float64, the probabilities of the cells, or ``[I, 10]`` with that of an invalid action
last; it says what both seats do, since each position belongs to one. It knows the position alone, as the players do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from turnwise.tasks.tic_tac_toe.board import CELLS, EMPTY, TicTacToeRules, is_over, mover, outcome, place
from turnwise.tasks.two_player import SEATS, Decision
from turnwise.tasks.two_player.tree import Exploitability, check_policy


@dataclass(frozen=True, slots=True)
class Positions:
    """``boards`` all of them; ``open [I]`` those in which somebody is to move, with ``mover [I]``, ``legal [I, 9]``,
    ``child [I, 9]`` (-1 where not legal) and ``marks [I]``, how many; ``ends [P, 3]`` one-hot over X won, draw, O won.
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
        """The boards of the policy's rows, in order."""
        return [self.boards[index] for index in self.open]


@cache
def positions() -> Positions:
    """All positions, found once and kept."""
    found = {EMPTY: 0}
    layer = [EMPTY]
    while layer:
        below = [place(board, c) for board in layer if not is_over(board) for c in range(CELLS) if board[c] == "."]
        layer = list(dict.fromkeys(below))
        for board in layer:
            found.setdefault(board, len(found))
    boards = tuple(found)
    going = [index for index, board in enumerate(boards) if not is_over(board)]
    legal = np.array([[mark == "." for mark in boards[index]] for index in going])
    child = np.full(legal.shape, -1)
    for row, cell in np.argwhere(legal):
        child[row, cell] = found[place(boards[going[row]], int(cell))]
    ends = np.zeros((len(boards), 3))
    for index, board in enumerate(boards):
        if is_over(board):
            ends[index, 1 - int(outcome(board))] = 1.0
    movers = np.array([mover(boards[index]) for index in going])
    marks = np.array([CELLS - boards[index].count(".") for index in going])
    return Positions(boards, np.array(going), movers, legal, child, ends, marks)


def uniform_policy() -> np.ndarray:
    """``[4520, 9]``: each free cell as likely."""
    legal = positions().legal
    return legal / legal.sum(axis=1, keepdims=True)


@cache
def optimal_policy() -> np.ndarray:
    """``[4520, 9]``: each of the moves that keep the game's value (minimax) as likely; an equilibrium."""
    where = positions()
    values = _values(np.zeros((len(where.open), CELLS + 1)), 0.0, responders=(0, 1))
    gains = np.where(where.legal, (1 - 2 * where.mover)[:, None] * values[where.child], -np.inf)
    best = gains == gains.max(axis=1, keepdims=True)
    return best / best.sum(axis=1, keepdims=True)


def solve(policy: Any, invalid_cost: float = 1.5) -> Exploitability:
    """Value, best responses and exploitability of a policy for both seats.

    Example: ``solve(optimal_policy()).exploitability == 0``; the empty board's value is X's.
    """
    table = check_policy(policy, positions().legal)
    value, first, second = (_values(table, invalid_cost, who)[0] for who in ((), (0,), (1,)))
    return Exploitability(float(value), (float(first), 0.0 - float(second)))


def outcomes(policy: Any) -> np.ndarray:
    """``[4]`` float64: the chances that X wins, of a draw, that O wins, and of an end by an invalid action."""
    where = positions()
    table = check_policy(policy, where.legal)
    chances = np.concatenate([where.ends, np.zeros((len(where.boards), 1))], axis=1)
    for rows in _layers(where):
        below = chances[where.child[rows]] * table[rows, :CELLS, None]
        chances[where.open[rows]] = below.sum(axis=1)
        chances[where.open[rows], 3] += table[rows, CELLS]
    return chances[0]


def decisions() -> list[Decision]:
    """Return the query to a player in each non-terminal position, in the order of the policy's rows."""
    asked = []
    for board, seat in zip(positions().open_boards, positions().mover.tolist(), strict=True):
        actions = tuple(str(cell) if mark == "." else None for cell, mark in enumerate(board))
        asked.append(Decision(SEATS[seat], TicTacToeRules().messages({"board": board}, seat), actions))
    return asked


def _values(table: np.ndarray, invalid_cost: float, responders: tuple[int, ...]) -> np.ndarray:
    """X's value ``[P]`` where the seats in ``responders`` play their best and the others follow ``table [I, 10]``.

    Nobody plays an invalid action on purpose: no legal one costs more (``invalid_cost`` >= 1).
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
    """Rows by the number of marks, most marks first: who is below is always settled."""
    return [np.flatnonzero(where.marks == count) for count in range(CELLS - 1, -1, -1)]
