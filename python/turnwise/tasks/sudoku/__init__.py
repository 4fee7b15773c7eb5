"""Sudoku on a 4x4 grid, for a proposer and a reviser, or for one solver.

Read in this order: team, grid, prompts, demonstrations.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.sudoku.demonstrations import demonstrations
from turnwise.tasks.sudoku.grid import (
    Puzzle,
    format_grid,
    is_solved,
    parse_grid,
    satisfied_share,
    split_of,
    sudoku_puzzles,
)
from turnwise.tasks.sudoku.prompts import sudoku_messages
from turnwise.tasks.sudoku.team import SudokuEpisode, SudokuOptions, SudokuTask

__all__ = [
    "Puzzle",
    "SudokuEpisode",
    "SudokuOptions",
    "SudokuTask",
    "demonstrations",
    "format_grid",
    "is_solved",
    "parse_grid",
    "satisfied_share",
    "split_of",
    "sudoku_messages",
    "sudoku_puzzles",
]
