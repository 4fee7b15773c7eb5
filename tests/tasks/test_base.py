from __future__ import annotations

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

import pytest

from turnwise.tasks import TASKS, build_task
from turnwise.tasks.base import check_counts, check_split, split_of
from turnwise.tasks.generated import GeneratedTask


def test_unknown_tasks_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="task='sudoko': unknown; did you mean 'sudoku'"):
        build_task("sudoko")
    with pytest.raises(ValueError, match="known: " + ", ".join(sorted(TASKS))):
        build_task("zzz")


def test_hash_splits_are_frozen_and_eight_in_ten_train():
    assert [split_of(text) for text in "efgh"] == ["train", "validation", "eval", "train"]
    counts = Counter(split_of(str(i)) for i in range(5000))
    assert counts["train"] / 5000 == pytest.approx(0.8, abs=0.02)
    assert counts["eval"] / 5000 == pytest.approx(0.1, abs=0.02)


def test_checks_name_what_is_wrong():
    with pytest.raises(ValueError, match="copies=0"):
        check_counts(questions=1, copies=0)
    with pytest.raises(ValueError, match="split='dev'"):
        check_split("dev")


def test_importing_every_task_needs_no_torch_no_key_and_no_network():
    modules = ", ".join(["turnwise.tasks.tiny", *(place.partition(":")[0] for place in TASKS.values())])
    code = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules), 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})


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
