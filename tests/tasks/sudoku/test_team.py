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


async def test_reviser_is_scored_for_the_grid_that_it_leaves(table):
    seat = table(team(), [format_grid(EIGHT), format_grid(NINE), format_grid(EIGHT), format_grid(SOLVED)])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [
        ("proposer", 0, 8 / 12),
        ("reviser", 0, 9 / 12),
        ("proposer", 1, 8 / 12),
        ("reviser", 1, 1 + 12 / 12),
    ]
    assert result.rollout.rewards == {"proposer": pytest.approx(1 + 8 / 12), "reviser": pytest.approx(2.0)}
    assert result.rollout.extras["rounds"] == 2
    # Each prompt is the actor's instruction, the puzzle, the standing draft and the round: nothing else piles up.
    assert seat.seen == [
        ("proposer", sudoku_messages("proposer", PUZZLE)),
        ("reviser", sudoku_messages("reviser", PUZZLE, EIGHT)),
        ("proposer", sudoku_messages("proposer", PUZZLE, NINE, 1)),
        ("reviser", sudoku_messages("reviser", PUZZLE, EIGHT, 1)),
    ]


async def test_an_unreadable_reply_leaves_the_draft_and_pays(table):
    seat = table(team(), ["I do not know.", format_grid(EIGHT), "1234", format_grid(SOLVED)])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [
        ("proposer", 0, 3 / 12 - 0.25),  # the puzzle itself has 3 whole units
        ("reviser", 0, 8 / 12),
        ("proposer", 1, 8 / 12 - 0.25),
        ("reviser", 1, 2.0),
    ]
    assert [messages for _, messages in seat.seen][1:] == [
        sudoku_messages("reviser", PUZZLE, PUZZLE),
        sudoku_messages("proposer", PUZZLE, EIGHT, 1, unread=True),
        sudoku_messages("reviser", PUZZLE, EIGHT, 1),
    ]
    assert result.rollout.metrics["valid_format/proposer"] == 0.0
    assert result.rollout.metrics["valid_format/reviser"] == 1.0


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


# --- a tree, worked by hand ------------------------------------------------------------------------------------------


# --- the task --------------------------------------------------------------------------------------------------------


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
