"""Sudoku on a 4x4 grid, for a proposer and a reviser, or for one solver.

Read in this order: team, grid, prompts.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.sudoku.grid import (
    parse_grid,
)
from turnwise.tasks.sudoku.prompts import sudoku_messages
from turnwise.tasks.sudoku.team import SudokuEpisode, SudokuOptions, SudokuTask

__all__ = [
    "SudokuEpisode",
    "SudokuOptions",
    "SudokuTask",
    "parse_grid",
    "sudoku_messages",
]
