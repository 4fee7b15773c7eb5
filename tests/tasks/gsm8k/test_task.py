from __future__ import annotations

import numpy as np
import pytest

from turnwise.credit import GRPOCredit
from turnwise.run.build import build_run
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

pytestmark = pytest.mark.usefixtures("narrow_model")

ARTIFACT = {"question": "2 + 2?", "answer": "4"}


@pytest.fixture
def task(build):
    return build("gsm8k")


def test_demonstrations_are_worked_solutions_of_training_questions(task):
    solutions = {q.question: f"{q.solution}\n#### {q.answer}" for q in task.splits["train"]}
    assert all(
        solutions[messages[-1]["content"]] == said and "<<" not in said
        for _, messages, said in task.demonstrations(20, seed=0)
    )


def settings(questions, folder, **changes):
    return {
        "task": "gsm8k", "task_options": {"path": questions, "max_tokens": 16}, "run_dir": str(folder),
        "steps": 1, "threads": 1, "rollout": {"prompts_per_step": 4, "group_size": 4}, "eval": {"num_prompts": 4},
        "warm_start": {"steps": 4, "batch_size": 8}, "health": {"start_questions": 0}, **changes,
    }  # fmt: skip


def test_a_step_of_training_credits_the_copies_of_a_question_by_grpo(questions, tmp_path):
    run = build_run(
        config_from_dict(settings(questions, tmp_path / "run", **{"filter": {"drop_zero_advantage": False}}))
    )
    assert type(run.arena.credit) is GRPOCredit
    # The tiny model solves nothing in one step: its answers are scored by their length here, so that something trains.
    run.arena.episodes["gsm8k"].rubric.funcs[0] = lambda completion, artifact: {"solver": len(completion) / 100}
    before = {name: values.detach().clone() for name, values in run.trainer.policies["default"].weights()}
    assert run.train().step == 1
    results = run.arena.last_results
    assert len(results) == 16 and all(len(result.rollout.steps) == 1 for result in results)
    for question in {result.group_id for result in results}:
        steps = [r.rollout.steps[0] for r in results if r.group_id == question]
        rewards = np.array([len(step.completion) / 100 for step in steps])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if rewards.std() else 0 * rewards
        assert np.allclose([step.advantage for step in steps], expected, atol=1e-4)
    assert any((before[name] != values).any() for name, values in run.trainer.policies["default"].weights())
    assert run.evaluate().failed == 0


def test_a_tree_is_refused_before_anything_runs(questions, tmp_path):
    with pytest.raises(ConfigError, match=r"'rollout.branches' = 2: .*branch with rollout.group_size"):
        build_run(config_from_dict(settings(questions, tmp_path / "run", rollout={"branches": 2})))
