from __future__ import annotations

import pytest

from turnwise.tasks.sudoku.prompts import SYSTEM_PROMPTS, read_messages, sudoku_messages

PUZZLE, DRAFT = "1_3_3412_1434_21", "1432341221434321"


@pytest.mark.parametrize("actor", SYSTEM_PROMPTS)
def test_prompts_read_back(actor):
    assert read_messages(sudoku_messages(actor, PUZZLE)) == (PUZZLE, None)
    assert read_messages(sudoku_messages(actor, PUZZLE, DRAFT)) == (PUZZLE, DRAFT)
    assert read_messages(sudoku_messages(actor, PUZZLE, PUZZLE)) == (PUZZLE, PUZZLE)


def test_each_actor_has_its_own_instruction():
    first = [sudoku_messages(actor, PUZZLE)[0]["content"] for actor in SYSTEM_PROMPTS]
    assert len(set(first)) == len(first) == 3
    assert sudoku_messages("proposer", PUZZLE)[1] == {"role": "user", "content": "1_3_\n3412\n_143\n4_21"}


def test_a_foreign_prompt_is_refused():
    with pytest.raises(ValueError, match="sudoku prompt"):
        read_messages([{"role": "user", "content": "hello"}])
