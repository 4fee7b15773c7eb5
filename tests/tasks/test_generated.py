"""Requests of a task that draws its questions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

from turnwise.tasks.generated import GeneratedTask


class Counting(GeneratedTask):
    """Questions are the numbers from the split's first one on."""

    name = "counting"
    system_prompts: ClassVar = {"left": "L", "right": "R"}

    def __init__(self, seed=0):
        self.options = SimpleNamespace(seed=seed, max_tokens=7)

    def draw(self, split, n, seed):
        return [f"{split} {number}" for number in range(n)]


def test_requests_share_groups_by_question_and_seeds_by_nothing():
    made = Counting().requests(3, questions=2, copies=3)
    assert [request.artifact["question"] for request in made] == ["train 0"] * 3 + ["train 1"] * 3
    assert len({request.group_id for request in made}) == 2 and len({request.seed for request in made}) == 6
    assert all(request.is_trainable and request.episode_type == "counting" for request in made)
    again = Counting().requests(4, questions=2, copies=3)
    assert not {r.group_id for r in made} & {r.group_id for r in again} and not {r.seed for r in made} & {
        r.seed for r in again
    }
    assert Counting(1).requests(3, 2, 3) != made == Counting().requests(3, 2, 3)
    with pytest.raises(ValueError, match="copies=0"):
        Counting().requests(0, 1, 0)


def test_held_out_questions_do_not_depend_on_the_task_s_seed():
    held_out = Counting(5).eval_requests("eval", 3)
    assert held_out == Counting().eval_requests("eval", 3) and not any(request.is_trainable for request in held_out)
    assert [(actor.id, actor.system_prompt, actor.max_tokens) for actor in Counting().actors] == [
        ("left", "L", 7),
        ("right", "R", 7),
    ]
