from __future__ import annotations

from collections import defaultdict

import pytest

from turnwise.arena import TreeSampler
from turnwise.arena.answers import Contribution
from turnwise.tasks.sudoku import SudokuOptions, SudokuTask, sudoku_messages
from turnwise.tasks.sudoku.grid import format_grid

PUZZLE = "1_3_3412_1434_21"
SOLVED, EIGHT, NINE = "1234341221434321", "1432341221434321", "1134341221434321"  # 12, 8 and 9 of 12 units
ARTIFACT = {"puzzle": PUZZLE}


def team(**options):
    return SudokuTask(SudokuOptions(**options))


def solo(**options):
    return team(actors=("solver",), max_turns=1, **options)


# --- one episode, worked by hand -------------------------------------------------------------------------------------
async def test_a_solved_first_draft_ends_the_episode(table):
    result = await table(team(), [format_grid(SOLVED)]).one(ARTIFACT)
    assert table.rewards(result) == [("proposer", 0, 2.0)]  # alpha * 1 + 12/12
    assert result.rollout.rewards == {"proposer": 2.0, "reviser": 1.0}
    assert result.rollout.metrics["solved/proposer"] == result.rollout.metrics["solved/reviser"] == 1.0
    assert result.rollout.extras["rounds"] == 1


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


async def test_after_the_last_round_an_unsolved_grid_earns_its_share_only(table):
    result = await table(team(max_turns=1), [format_grid(EIGHT), format_grid(NINE)]).one(ARTIFACT)
    assert table.rewards(result) == [("proposer", 0, 8 / 12), ("reviser", 0, 9 / 12)]
    assert result.rollout.metrics["solved/proposer"] == 0.0
    assert result.rollout.rewards == {"proposer": pytest.approx(8 / 12), "reviser": pytest.approx(9 / 12)}


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


async def test_the_solver_plays_alone_and_once(table):
    result = await table(solo(), [format_grid(NINE)]).one(ARTIFACT)
    assert table.rewards(result) == [("solver", 0, 9 / 12)]
    assert result.rollout.rewards == {"solver": pytest.approx(9 / 12)}
    assert solo().success_metric == "solved/solver" and team().success_metric == "solved/proposer"


async def test_a_changed_given_is_not_a_solution(table):
    result = await table(solo(), [format_grid("2143432112343412")]).one(ARTIFACT)
    assert result.rollout.metrics["solved/solver"] == 0.0


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
async def test_the_reviser_repairs_the_best_of_the_drafts(table):
    lines = [format_grid(grid) for grid in (EIGHT, NINE, PUZZLE.replace("_", "1"), EIGHT, SOLVED, NINE)]
    seat = table(team(), lines, tree=TreeSampler(branches=3, select="best"))
    result = await seat.one(ARTIFACT)
    steps = defaultdict(list)
    for step in result.rollout.steps:
        steps[step.actor_id].append((step.branch, pytest.approx(step.reward), step.selected))
    # 1131 / 3412 / 1143 / 4121: rows 0, 2, 3, columns 0, 1, 3 and boxes 0, 1, 2 fail; row 1, column 2 and box 3 hold.
    assert steps["proposer"] == [(0, 8 / 12, False), (1, 9 / 12, True), (2, 3 / 12, False)]
    assert steps["reviser"] == [(0, 8 / 12, False), (1, 2.0, True), (2, 9 / 12, False)]
    assert {str(m) for actor, m in seat.seen if actor == "reviser"} == {str(sudoku_messages("reviser", PUZZLE, NINE))}
    assert result.rollout.metrics["solved/proposer"] == 1.0


# --- the task --------------------------------------------------------------------------------------------------------


# --- what each actor adds --------------------------------------------------------------------------------------------
async def test_units_of_the_draft_are_mended_and_broken(table):
    """EIGHT lacks columns 2 and 4 and boxes 1 and 2; NINE lacks row 1, column 2 and box 1."""
    seat = table(team(), [format_grid(EIGHT), format_grid(NINE), "1234", format_grid(SOLVED)])
    assert await seat.contributions(ARTIFACT) == [
        ("reviser", 0, Contribution(handed=1, changed=1, wrong=4, mended=2, right=8, broke=1)),
        ("proposer", 1, Contribution(handed=1, changed=0, wrong=3, mended=0, right=9, broke=0)),  # unreadable
        ("reviser", 1, Contribution(handed=1, changed=1, wrong=3, mended=3, right=9, broke=0)),
    ]


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
