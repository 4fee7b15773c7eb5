from __future__ import annotations

import pytest

from turnwise.tasks.sudoku import SudokuOptions, SudokuTask, sudoku_messages
from turnwise.tasks.sudoku.grid import format_grid

PUZZLE = "1_3_3412_1434_21"
SOLVED, EIGHT, NINE = "1234341221434321", "1432341221434321", "1134341221434321"  # 12, 8 and 9 of 12 units
ARTIFACT = {"puzzle": PUZZLE}


def team(**options):
    return SudokuTask(SudokuOptions(**options))


# --- one episode, worked by hand -------------------------------------------------------------------------------------
@pytest.mark.parametrize("turn", [0, 1])
def test_the_puzzle_ends_the_prompt(turn):
    """Each cell of the puzzle is as far before the reply's own, whatever the notes and the draft say."""
    alone, corrected = (sudoku_messages("reviser", PUZZLE, draft, turn)[1]["content"] for draft in (None, EIGHT))
    assert alone.endswith("1_3_\n3412\n_143\n4_21")
    assert corrected.endswith("Draft:\n1432\n3412\n2143\n4321\nSudoku:\n1_3_\n3412\n_143\n4_21")
    assert corrected.startswith(
        "Round 2.\nWrong: columns 2 4, boxes 1 2." if turn else "Wrong: columns 2 4, boxes 1 2."
    )
    assert sudoku_messages("proposer", PUZZLE)[1]["content"] == "1_3_\n3412\n_143\n4_21"


# --- what each actor adds --------------------------------------------------------------------------------------------
async def test_one_actor_plays_the_teams_rounds_with_its_own_prompt(table):
    task = team(blanks=(4, 6), quality=0.5).with_actors(("reviser",))
    assert (task.success_metric, task.options.blanks, task.options.quality) == ("solved/reviser", (4, 6), 0.5)
    seat = table(task, [format_grid(EIGHT), format_grid(SOLVED)])
    result = await seat.one(ARTIFACT)
    assert result.rollout.metrics["solved/reviser"] == 1.0
    assert seat.seen == [
        ("reviser", sudoku_messages("reviser", PUZZLE)),
        ("reviser", sudoku_messages("reviser", PUZZLE, EIGHT, 1)),
    ]
