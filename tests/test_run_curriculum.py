"""Whole runs with a curriculum from a config, and the errors of settings that have nothing to draw from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.run.build import build_run, train_from_config
from turnwise.run.checks import resolve_config, task_of
from turnwise.tasks import build_task
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.validate import config_from_dict, load_config

from .trained import SMALL, equal, lines_of, rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")

LEARNABLE = {"sampling": "learnability", "pool": 6, "window": 2, "uniform": 0.05}


def config_of(run_dir, **changes):
    return config_from_dict({**SMALL, "run_dir": str(run_dir), **changes})


def drawn_in(folder):
    return [(row["step"], row["meta"]["curriculum"]) for row in rows_of(folder, "rollouts.jsonl")]


@pytest.mark.parametrize("ahead", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_draws_the_same_questions(tmp_path, ahead):
    """Dynamic sampling draws up to two more batches a step, and with ``ahead`` beside the updates of earlier steps."""
    changes = {
        "curriculum": LEARNABLE,
        "rollout": {"prompts_per_step": 2, "branches": 2},
        "filter": {"dynamic_sampling_rounds": 2},
        "reward": {"overlong_buffer": 1, "overlong_penalty": 0.5},
        "credit": {"rule": "task"},
        "loop": {"max_staleness": ahead, "deterministic": True},
        "log": {"rollouts_per_step": 99, "progress": False},
    }
    whole = train_from_config(config_of(tmp_path / "whole", steps=5, **changes))
    train_from_config(config_of(tmp_path / "parts", steps=2, **changes))
    parts = train_from_config(config_of(tmp_path / "parts", steps=5, **changes))
    lines = lines_of(tmp_path / "whole")
    assert lines == lines_of(tmp_path / "parts") and drawn_in(tmp_path / "whole") == drawn_in(tmp_path / "parts")
    assert whole.arena.state_dict()["stages"] == parts.arena.state_dict()["stages"]
    first, second = (dict(run.trainer.policies["default"].all_weights()) for run in (whole, parts))
    assert equal(first, second)
    seen = [line["curriculum/seen"] for line in lines]
    assert 0 < seen[0] <= seen[-1] <= 6 and all("extra_batches" in line for line in lines)
    drawn = {step: note["batch"] for step, note in drawn_in(tmp_path / "whole")}
    assert drawn == {step: step - 1 for step in range(1, 6)}
    knew = [any("p" in note for number, note in drawn_in(tmp_path / "whole") if number == step) for step in range(1, 6)]
    assert knew[: 1 + ahead] == [False] * (1 + ahead), "these batches start before any is packed"


def test_a_run_without_a_curriculum_has_none(tmp_path):
    run = build_run(config_of(tmp_path / "run", warm_start={"steps": 0}))
    assert "curriculum" not in run.arena.stages and run.arena.state_dict()["stages"] == {}
    [request, *_] = run.arena.get_batch()
    assert request.meta == {} and request == run.task.requests(1, 2, 1)[0]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"task": "kuhn_poker", "curriculum": LEARNABLE},
            r"'curriculum.sampling' = 'learnability': task 'kuhn_poker' has",
        ),
        ({"curriculum": {"sampling": "learnability"}}, r"'curriculum.pool': task 'sudoku' draws .*a number"),
        (
            {"task": "proposer_solver", "curriculum": LEARNABLE},
            r"makes its own questions: expected curriculum.sampling",
        ),
        ({"task": "split_clues", "curriculum": {**LEARNABLE, "gate": 0.6}}, r"gate=0.6: all questions have level 0"),
        ({"curriculum": {"gate": 0.6}}, r"gate has no effect with sampling = 'task'"),
        ({"curriculum": {**LEARNABLE, "uniform": 0}}, r"curriculum.uniform"),
    ],
)
def test_settings_that_draw_from_nothing_are_refused(tmp_path, changes, error):
    with pytest.raises(ConfigError, match=error):
        build_run(config_of(tmp_path / "run", **{**changes, "rollout": {}, "warm_start": {"steps": 0}}))


def test_the_example_fits_together():
    config, problems = load_config(Path(__file__).parents[1] / "examples" / "curriculum.toml"), Problems()
    resolve_config(config, task_of(config), problems)
    assert not problems.lines and config.curriculum.pool == 600 and config.task_options["blanks"] == [1, 10]


def test_pools_of_shipped_tasks_have_levels_and_never_a_held_out_question(tmp_path):
    sudoku = build_task("sudoku", {"blanks": [2, 5]})
    pool = sudoku.question_pool(20)
    assert pool == sudoku.question_pool(20) and {request.meta["level"] for request in pool} == {2, 3, 4, 5}
    assert all(request.meta["level"] == request.artifact["puzzle"].count("_") for request in pool)
    held_out = {request.artifact["puzzle"] for request in sudoku.eval_requests("eval", 50)}
    assert not held_out & {request.artifact["puzzle"] for request in pool}

    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}", "level": f"Level {n % 3}"} for n in range(60)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gsm8k = build_task("gsm8k", {"path": str(path)})
    train = gsm8k.splits["train"]
    pool = gsm8k.question_pool(None)
    assert [request.artifact["question"] for request in pool] == [question.question for question in train]
    assert [request.meta["level"] for request in pool] == [question.level for question in train]
    assert {question.level for question in train} == {0, 1, 2} and len(gsm8k.question_pool(7)) == 7
    with pytest.raises(ValueError, match=r"n=99: the train split .* has \d+ questions"):
        gsm8k.question_pool(99)


def test_a_task_of_ones_own_lists_its_questions(tmp_path, monkeypatch):
    (tmp_path / "sums_by_level.py").write_text(
        "from turnwise.tasks import OwnTask\n\n\n"
        "class Sums(OwnTask):\n"
        "    name = 'sums'\n"
        "    success_metric = 'right/solver'\n"
        "    system_prompts = {'solver': ''}\n\n"
        "    def questions(self):\n"
        "        return [f'{a} + {b}' for a in range(8) for b in range(8)]\n\n"
        "    def level(self, question):\n"
        "        return len(question.split(' + ')[0])\n\n"
        "    def episodes(self, tree=None):\n"
        "        return {}\n"
    )
    monkeypatch.chdir(tmp_path)
    task = task_of(TrainConfig(task="sums_by_level:Sums"))
    pool = task.question_pool(None)
    assert {request.artifact["question"] for request in pool} == set(task.draw("train", len(pool), 0))
    assert len(task.question_pool(5)) == 5 and {request.meta["level"] for request in pool} == {1}
