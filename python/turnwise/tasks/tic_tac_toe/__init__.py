"""Tic-tac-toe for two seats: rules, minimax, and the exact exploitability of a policy.

Read in this order: task, board.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.tic_tac_toe.board import (
    TicTacToeRules,
    optimal_policy,
    outcomes,
    positions,
    solve,
    uniform_policy,
)
from turnwise.tasks.tic_tac_toe.task import TicTacToeOptions, TicTacToeTask, table_player

__all__ = [
    "TicTacToeOptions",
    "TicTacToeRules",
    "TicTacToeTask",
    "optimal_policy",
    "outcomes",
    "positions",
    "solve",
    "table_player",
    "uniform_policy",
]
