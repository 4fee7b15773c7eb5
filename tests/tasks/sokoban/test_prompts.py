from __future__ import annotations

import pytest

from turnwise.tasks.sokoban.level import State, parse_level
from turnwise.tasks.sokoban.prompts import SYSTEM_PROMPTS, read_messages, sokoban_messages

LEVEL = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")


@pytest.mark.parametrize("actor", SYSTEM_PROMPTS)
def test_prompts_read_back(actor):
    assert read_messages(sokoban_messages(actor, LEVEL)) == (LEVEL, None)
    there = State(11, (12,))
    assert read_messages(sokoban_messages(actor, LEVEL, there, "RU")) == (LEVEL._replace(start=there), "RU")


def test_a_foreign_prompt_is_refused():
    with pytest.raises(ValueError, match="level='hello'"):
        read_messages([{"role": "user", "content": "hello"}])
