"""What tasks with generated questions share, and that they train: whole runs of the tiny model, few steps each."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest

from turnwise.run.build import train_from_config
from turnwise.tasks.generated import GeneratedTask
from turnwise.train.validate import config_from_dict

pytestmark = pytest.mark.usefixtures("narrow_model")

SMALL = {
    "steps": 2,
    "threads": 1,
    "health": {"start_questions": 0},  # these models know nothing yet
    "warm_start": {"steps": 20, "batch_size": 8},
    "credit": {"rule": "at_grpo"},
    "update": {"lr": 1e-3},
    "eval": {"num_prompts": 3},
    "log": {},
}


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


def train(tmp_path, task, options, settings=None, **rollout):
    """Train; the run, and a line of metrics per step. Every line must have sampled, and lost nothing."""
    rollout = {"prompts_per_step": 2, "group_size": 2, "branches": 1, **rollout}
    config = config_from_dict(
        {
            **SMALL,
            "task": task,
            "task_options": options,
            "rollout": rollout,
            "run_dir": str(tmp_path),
            **(settings or {}),
        }
    )
    run = train_from_config(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["sampled_tokens"] > 0 and line["episodes/failed"] == 0 for line in lines)
    assert run.evaluate().failed == 0
    return run, lines


def test_code_duel_trains_in_a_tree(tmp_path):
    options = {"families": ["sums"], "max_cases": 2, "max_tokens": 48}
    _, lines = train(tmp_path, "code_duel", options, branches=2, group_size=1)
    assert all("reward/tester" in line for line in lines)


def test_search_orchestra_trains(tmp_path):
    options = {"hops": 1, "max_searches": 1, "max_tokens": 16}
    _, lines = train(tmp_path, "search_orchestra", options)
    assert all("reward/answerer" in line for line in lines)


def test_proposer_solver_trains(tmp_path):
    options = {"numbers": 2, "largest": 3, "attempts": 2, "max_tokens": 8}
    settings = {"credit": {"rule": "hierarchy"}}
    _, lines = train(tmp_path, "proposer_solver", options, settings)
    assert all(line["episodes"] >= 4 and "reward/proposer" in line for line in lines)


def test_sokoban_trains_in_a_tree(tmp_path):
    options = {"side": 5, "min_route": 2, "shaping": 0.5, "max_turns": 2, "max_tokens": 12}
    _, lines = train(tmp_path, "sokoban", options, branches=2)
    assert all("reward/planner" in line for line in lines)


def test_refine_loop_trains_in_a_tree(tmp_path):
    _, lines = train(tmp_path, "refine_loop", {"rules": 2, "max_tokens": 12}, branches=2)
    assert all("reward/critic" in line for line in lines)
