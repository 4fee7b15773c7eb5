from __future__ import annotations

import pytest

from turnwise.tasks.plan_path.maze import parse_maze
from turnwise.tasks.plan_path.prompts import SYSTEM_PROMPTS, plan_path_messages, read_messages

MAZE = parse_maze("A#G\n...\n..#")


@pytest.mark.parametrize("actor", SYSTEM_PROMPTS)
def test_prompts_read_back(actor):
    assert read_messages(plan_path_messages(actor, MAZE)) == (MAZE, None)
    assert read_messages(plan_path_messages(actor, MAZE, 4, "RU")) == (MAZE._replace(start=4), "RU")


def test_each_actor_has_its_own_instruction():
    first = [plan_path_messages(actor, MAZE)[0]["content"] for actor in SYSTEM_PROMPTS]
    assert len(set(first)) == len(first) == 3
    assert plan_path_messages("planner", MAZE, 4, "RU", "Round 2. Walked: 2 moves.", "it works")[1] == {
        "role": "user",
        "content": "Round 2. Walked: 2 moves.\nRoute: R U\nChecked: it works.\nBoard:\n.#G\n.A.\n..#",
    }


def test_a_foreign_prompt_is_refused():
    with pytest.raises(ValueError, match="maze='hello'"):
        read_messages([{"role": "user", "content": "hello"}])
