"""Sudoku on a 4x4 grid, without models: grids, the puzzles of each split, scoring and the text form.

A grid is a string of 16 characters, row by row: digits ``1``-``4`` and ``_`` for a blank.

Example: the only solution of the puzzle ``"1_3_3412_1434_21"`` is ``"1234341221434321"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from random import Random
from typing import NamedTuple

import numpy as np

from turnwise.tasks.base import Split, split_of
from turnwise.tasks.generated import draw_distinct

SIDE, BOX, BLANK, DIGITS = 4, 2, "_", "1234"
CELLS = SIDE * SIDE
MAX_BLANKS = 12  # four givens are the fewest that can fix a 4x4 grid

ROWS = tuple(tuple(range(SIDE * r, SIDE * (r + 1))) for r in range(SIDE))
COLUMNS = tuple(tuple(range(c, CELLS, SIDE)) for c in range(SIDE))
BOXES = tuple(
    tuple(SIDE * (r + i) + c + j for i in range(BOX) for j in range(BOX))
    for r in range(0, SIDE, BOX)
    for c in range(0, SIDE, BOX)
)
UNITS = ROWS + COLUMNS + BOXES
KINDS = {"rows": ROWS, "columns": COLUMNS, "boxes": BOXES}
"""The units of each kind."""


class Puzzle(NamedTuple):
    """A puzzle and its only solution, both as 16 characters."""

    givens: str
    solution: str


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------
@cache
def solutions() -> tuple[str, ...]:
    """List all 288 complete grids, in lexical order."""

    def extend(grid: str) -> Iterator[str]:
        if len(grid) == CELLS:
            yield grid
            return
        seen = {grid[cell] for unit in UNITS if len(grid) in unit for cell in unit if cell < len(grid)}
        for digit in DIGITS:
            if digit not in seen:
                yield from extend(grid + digit)

    return tuple(extend(""))


@cache
def _solution_codes() -> np.ndarray:
    return np.array([[int(digit) for digit in grid] for grid in solutions()], dtype=np.uint8)  # [288, 16]


def solve(puzzle: str) -> list[str]:
    """List every complete grid that keeps the givens of ``puzzle``, in lexical order."""
    check_grid(puzzle)
    codes = np.array([0 if cell == BLANK else int(cell) for cell in puzzle], dtype=np.uint8)
    fits = ((_solution_codes() == codes) | (codes == 0)).all(axis=1)
    return [solutions()[i] for i in np.flatnonzero(fits)]


def check_grid(grid: str) -> None:
    """Raise ``ValueError`` unless ``grid`` is 16 characters of ``1``-``4`` and ``_``."""
    if len(grid) != CELLS or set(grid) - set(DIGITS + BLANK):
        raise ValueError(f"grid={grid!r}: expected {CELLS} characters, each of {DIGITS + BLANK!r}")


def satisfied_share(puzzle: str, grid: str) -> float:
    """Return the share of the 12 units (4 rows, 4 columns, 4 boxes) that hold 1-4 once each and keep their givens.

    Example: the solution scores 1.0. If the digits of two blanks side by side in one box are swapped, two columns fail,
    and the grid scores 10/12.
    """
    return sum(_right_units(puzzle, grid)) / len(UNITS)


def broken_units(puzzle: str, grid: str) -> dict[str, list[int]]:
    """List by kind the units of ``grid``, numbered from 1, that lack a digit or change a given.

    Example: for the puzzle ``1_3_3412_1434_21`` the grid ``1432341221434321`` gives
    ``{"rows": [], "columns": [2, 4], "boxes": [1, 2]}``
    """
    right = iter(_right_units(puzzle, grid))
    return {kind: [n for n in range(1, len(units) + 1) if not next(right)] for kind, units in KINDS.items()}


def right_units(puzzle: str, grid: str) -> list[bool]:
    """Return for each of the 12 units, rows before columns before boxes, True if :func:`broken_units` lacks it."""
    return list(_right_units(puzzle, grid))


def is_solved(puzzle: str, grid: str) -> bool:
    """Return True if ``grid`` is complete, right, and keeps every given."""
    return all(_right_units(puzzle, grid))


@lru_cache(maxsize=4096)  # a step scores equal drafts of siblings several times
def _right_units(puzzle: str, grid: str) -> tuple[bool, ...]:
    check_grid(puzzle)
    check_grid(grid)
    kept = [given in (BLANK, cell) for given, cell in zip(puzzle, grid, strict=True)]
    return tuple({grid[cell] for cell in unit} == set(DIGITS) and all(kept[cell] for cell in unit) for unit in UNITS)


# ---------------------------------------------------------------------------------------------------------------------
# Puzzles
# ---------------------------------------------------------------------------------------------------------------------
def sudoku_puzzles(split: Split, n: int, seed: int | str, blanks: tuple[int, int] = (6, 8)) -> list[Puzzle]:
    """Draw ``n`` different puzzles of ``split``, with one solution each and ``blanks[0]`` to ``blanks[1]`` blanks.

    Equal arguments give equal puzzles, and a longer list begins with the shorter one. Splits never share a puzzle,
    whatever the seeds. Raises ``ValueError`` if the split holds too few such puzzles.
    """
    low, high = blanks
    if not 1 <= low <= high <= MAX_BLANKS:
        raise ValueError(f"blanks={blanks!r}: expected (low, high) with 1 <= low <= high <= {MAX_BLANKS}")
    rng = Random(f"sudoku/{split}/{seed}/{low}-{high}")

    def draw() -> Puzzle | None:
        solution = rng.choice(solutions())
        holes = set(rng.sample(range(CELLS), rng.randint(low, high)))
        givens = "".join(BLANK if cell in holes else digit for cell, digit in enumerate(solution))
        is_unique = split_of(givens) == split and len(solve(givens)) == 1
        return Puzzle(givens, solution) if is_unique else None

    what = f"puzzles with blanks={blanks!r}"
    return draw_distinct(split, n, draw, what, split_of=lambda puzzle: split_of(puzzle.givens), patience=100_000)


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------
_SEPARATORS = re.compile(r"[\s|,;\[\]]")
_RULE = re.compile(r"\s*[-+|=][-+|=\s]*")
_ROW = re.compile(rf"[{DIGITS}]{{{SIDE}}}")
_ROW_OR_BLANKS = re.compile(rf"[{DIGITS}{BLANK}]{{{SIDE}}}")


def format_grid(grid: str) -> str:
    """Write four lines of four characters, without a newline at the end."""
    check_grid(grid)
    return "\n".join(grid[start : start + SIDE] for start in range(0, CELLS, SIDE))


def parse_grid(text: str, *, blanks: bool = False) -> str | None:
    """Parse the last 4x4 grid in ``text``; ``None`` without one.

    A grid is a block of exactly four consecutive lines with four digits each. Spaces, ``|``, ``,``, ``;``, brackets and
    drawn lines are ignored. ``blanks=True`` also accepts ``_`` for a cell.

    Example: ``parse_grid("So:\\n1 2|3 4\\n3 4|1 2\\n---+---\\n2 1|4 3\\n4 3|2 1") == "1234341221434321"``
    """
    row = _ROW_OR_BLANKS if blanks else _ROW
    last, block = None, []
    for line in [*text.splitlines(), ""]:
        cells = _SEPARATORS.sub("", line)
        if row.fullmatch(cells):
            block.append(cells)
        elif not _RULE.fullmatch(line):
            last = "".join(block) if len(block) == SIDE else last
            block = []
    return last
