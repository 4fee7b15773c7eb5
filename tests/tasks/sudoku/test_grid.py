from __future__ import annotations

import pytest

from turnwise.tasks.sudoku import sudoku_messages
from turnwise.tasks.sudoku.grid import (
    BLANK,
    check_grid,
    format_grid,
    is_solved,
    parse_grid,
    satisfied_share,
    solutions,
    solve,
    split_of,
    sudoku_puzzles,
)

PUZZLE = "1_3_3412_1434_21"
SOLVED = "1234341221434321"
ALL_BLANK = BLANK * 16


def test_there_are_288_grids_and_each_obeys_every_rule():
    assert len(set(solutions())) == 288
    assert SOLVED in solutions()
    for grid in solutions():
        rows = [grid[i : i + 4] for i in (0, 4, 8, 12)]
        columns = [grid[i::4] for i in range(4)]
        boxes = [rows[r][c : c + 2] + rows[r + 1][c : c + 2] for r in (0, 2) for c in (0, 2)]
        assert all(sorted(unit) == list("1234") for unit in rows + columns + boxes)


def test_solve_finds_every_completion():
    assert solve(PUZZLE) == [SOLVED]
    assert len(solve(ALL_BLANK)) == 288
    assert solve("11______________") == []
    # 1 and 2 in the corners of an open rectangle: both ways round are right.
    assert solve("__343412__434321") == [SOLVED, "2134341212434321"]
    assert len(solve("1__3" + "_" * 12)) == len([g for g in solutions() if g[0] == "1" and g[3] == "3"])


@pytest.mark.parametrize(
    ("grid", "share"),
    [
        (SOLVED, 12 / 12),
        # Cells 1 and 3 of row 0 the wrong way round: the row holds; columns 1 and 3 and both upper boxes fail.
        ("1432341221434321", 8 / 12),
        # Row 0 filled with a digit twice: row 0, column 1 and box 0 fail.
        ("1134341221434321", 9 / 12),
        # A given changed (cell 0 from 1 to 4, cell 12 from 4 to 1): rows 0 and 3, column 0, boxes 0 and 2 fail.
        ("4234341221431321", 7 / 12),
        # The puzzle itself: row 1 is complete; column 2 (3, 1, 4, 2) as well; box 3 (4 3 / 2 1) too.
        (PUZZLE, 3 / 12),
        (ALL_BLANK, 0.0),
    ],
)
def test_satisfied_share_by_hand(grid, share):
    assert satisfied_share(PUZZLE, grid) == pytest.approx(share, abs=1e-12)
    assert is_solved(PUZZLE, grid) == (share == 1.0)


def test_swapping_two_open_neighbours_breaks_two_columns():
    puzzle = "__34341221434321"
    assert satisfied_share(puzzle, "2134341221434321") == pytest.approx(10 / 12)


def test_another_right_grid_does_not_count_where_it_drops_givens():
    other = next(grid for grid in solutions() if grid != SOLVED)
    assert satisfied_share(ALL_BLANK, other) == 1.0
    assert not is_solved(PUZZLE, other)
    assert satisfied_share(SOLVED, "2143432112343412") == 0.0  # right everywhere, and every given changed


@pytest.mark.parametrize("grid", ["", "1234", "5" * 16, "1234341221434321 ", "0" * 16])
def test_what_is_no_grid_is_refused(grid):
    with pytest.raises(ValueError, match="grid="):
        check_grid(grid)


# --- puzzles ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("split", ["train", "validation", "eval"])
@pytest.mark.parametrize("blanks", [(4, 4), (6, 8), (10, 12)])
def test_puzzles_have_one_solution_and_the_asked_blanks(split, blanks):
    puzzles = sudoku_puzzles(split, 60, seed=3, blanks=blanks)
    assert len({puzzle.givens for puzzle in puzzles}) == 60
    for givens, solution in puzzles:
        assert solve(givens) == [solution]
        assert blanks[0] <= givens.count(BLANK) <= blanks[1]
        assert split_of(givens) == split


# --- text ------------------------------------------------------------------------------------------------------------
def test_blanks_are_read_only_when_asked_for():
    assert parse_grid(format_grid(PUZZLE)) is None
    assert parse_grid(format_grid(PUZZLE), blanks=True) == PUZZLE


@pytest.mark.parametrize("turn", [0, 1])
def test_the_puzzle_ends_the_prompt(turn):
    """Each cell of the puzzle is as far before the reply's own, whatever the notes and the draft say."""
    alone, corrected = (
        sudoku_messages("reviser", PUZZLE, draft, turn)[1]["content"] for draft in (None, "1432341221434321")
    )
    assert alone.endswith("1_3_\n3412\n_143\n4_21")
    assert corrected.endswith("Draft:\n1432\n3412\n2143\n4321\nSudoku:\n1_3_\n3412\n_143\n4_21")
    assert corrected.startswith(
        "Round 2.\nWrong: columns 2 4, boxes 1 2." if turn else "Wrong: columns 2 4, boxes 1 2."
    )
    assert sudoku_messages("proposer", PUZZLE)[1]["content"] == "1_3_\n3412\n_143\n4_21"
