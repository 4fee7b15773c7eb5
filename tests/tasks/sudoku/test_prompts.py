from __future__ import annotations

import pytest

from turnwise.tasks.sudoku.prompts import SYSTEM_PROMPTS, read_messages, sudoku_messages

PUZZLE, DRAFT = "1_3_3412_1434_21", "1432341221434321"


@pytest.mark.parametrize("actor", SYSTEM_PROMPTS)
def test_prompts_read_back(actor):
    assert read_messages(sudoku_messages(actor, PUZZLE)) == (PUZZLE, None)
    assert read_messages(sudoku_messages(actor, PUZZLE, DRAFT)) == (PUZZLE, DRAFT)
    assert read_messages(sudoku_messages(actor, PUZZLE, PUZZLE)) == (PUZZLE, PUZZLE)


@pytest.mark.parametrize("turn", [0, 1])
def test_the_puzzle_ends_the_prompt(turn):
    """Each cell of the puzzle is as far before the reply's own, whatever the notes and the draft say."""
    alone, corrected = (sudoku_messages("reviser", PUZZLE, draft, turn)[1]["content"] for draft in (None, DRAFT))
    assert alone.endswith("1_3_\n3412\n_143\n4_21")
    assert corrected.endswith("Draft:\n1432\n3412\n2143\n4321\nSudoku:\n1_3_\n3412\n_143\n4_21")
    assert corrected.startswith(
        "Round 2.\nWrong: columns 2 4, boxes 1 2." if turn else "Wrong: columns 2 4, boxes 1 2."
    )


def test_each_actor_has_its_own_instruction():
    first = [sudoku_messages(actor, PUZZLE)[0]["content"] for actor in SYSTEM_PROMPTS]
    assert len(set(first)) == len(first) == 3
    assert sudoku_messages("proposer", PUZZLE)[1] == {"role": "user", "content": "1_3_\n3412\n_143\n4_21"}


def test_a_foreign_prompt_is_refused():
    with pytest.raises(ValueError, match="sudoku prompt"):
        read_messages([{"role": "user", "content": "hello"}])
