"""4x4 sudoku for a proposer and a reviser, or for one solver."""

from __future__ import annotations

from .demonstrations import demonstrations
from .grid import Puzzle, format_grid, is_solved, parse_grid, satisfied_share, split_of, sudoku_puzzles
from .prompts import sudoku_messages
from .team import SudokuEpisode, SudokuOptions, SudokuTask

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
