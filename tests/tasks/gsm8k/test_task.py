from __future__ import annotations

import json

import pytest

from turnwise.credit import GRPOCredit
from turnwise.run.build import build_run
from turnwise.tasks import build_task
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

pytestmark = pytest.mark.usefixtures("narrow_model")


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


def test_copies_of_a_question_are_credited_by_grpo(questions, tmp_path):
    assert type(build_run(config_from_dict(settings(questions, tmp_path / "run"))).arena.credit) is GRPOCredit


def test_a_tree_is_refused_before_anything_runs(questions, tmp_path):
    with pytest.raises(ConfigError, match=r"'rollout.branches' = 2: .*branch with rollout.group_size"):
        build_run(config_from_dict(settings(questions, tmp_path / "run", rollout={"branches": 2})))


def write(path, numbers):
    lines = [json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in numbers]
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "path=None, dataset=None: expected one of them"),
        ({"path": "a.jsonl", "dataset": "b"}, "path='a.jsonl', dataset='b': expected one of them"),
        ({"dataset": "b", "eval_path": "c.jsonl"}, "eval_path='c.jsonl': it goes with path"),
        ({"path": "a.jsonl", "subset": "main"}, "subset='main': expected a dataset with it"),
    ],
)
def test_one_source_is_asked_for(options, message):
    with pytest.raises(ValueError, match=message):
        build_task("gsm8k", options)


def test_a_dataset_is_evaluated_on_its_split_test(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    folder.mkdir()
    write(folder / "train.jsonl", range(60))
    write(folder / "test.jsonl", range(55, 70))
    splits = build_task("gsm8k", {"dataset": str(folder)}).splits
    asked = {name: {question.question for question in questions} for name, questions in splits.items()}
    assert asked["eval"] == {f"{n} + 1?" for n in range(55, 70)}
    assert asked["train"] | asked["validation"] == {f"{n} + 1?" for n in range(55)}, "what is held out does not train"
    assert asked["train"] and asked["validation"] and not asked["train"] & asked["validation"]


def test_both_tasks_over_one_file_hold_the_same_questions_out(tmp_path):
    write(tmp_path / "q.jsonl", range(100))
    tasks = [build_task(name, {"path": str(tmp_path / "q.jsonl")}) for name in ("gsm8k", "math_orchestra")]
    assert tasks[0].splits == tasks[1].splits
