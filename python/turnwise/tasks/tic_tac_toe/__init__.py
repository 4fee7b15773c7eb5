"""Tic-tac-toe for two seats: rules, minimax, and the exact exploitability of a policy."""

from __future__ import annotations

from .board import TicTacToeRules, format_board
from .exact import optimal_policy, outcomes, positions, solve, uniform_policy
from .task import TicTacToeOptions, TicTacToeTask, table_player

__all__ = [
    "TicTacToeOptions",
    "TicTacToeRules",
    "TicTacToeTask",
    "format_board",
    "optimal_policy",
    "outcomes",
    "positions",
    "solve",
    "table_player",
    "uniform_policy",
]
