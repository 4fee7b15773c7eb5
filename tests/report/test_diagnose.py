"""``turnwise diagnose`` and ``turnwise status`` say what ails a run, with calls that show it; texts are data."""

from __future__ import annotations

import json

import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.report.diagnose import diagnose_run
from turnwise.report.status import read_status
from turnwise.train.health.diagnose import FACTS
from turnwise.train.health.history import Facts
from turnwise.train.log.run_log import RunLog
from turnwise.types import GenerateResult, Rollout

from .hand_made import HOSTILE, Words, call


@pytest.fixture
def run_dir(tmp_path):
    """Three steps in which the checker gives one hostile answer; its solver gives another each time."""
    log = RunLog(tmp_path, 5, rollouts_per_step=2)
    (tmp_path / FACTS).write_text(Facts({"solver": "default", "checker": "default"}).to_json())
    for step in range(1, 4):
        results = []
        for copy in range(2):
            calls = [
                call(Words(), "solver", 0, f"answer {step} {copy}", reward=1.0, advantage=0.0),
                call(Words(), "checker", 1, HOSTILE, reward=0.0, advantage=0.0),
            ]
            calls[1].prompt = [{"role": "user", "content": f"question {step}"}]
            rollout = Rollout(f"e{step}{copy}", "sudoku", {}, calls, {"solver": 1.0, "checker": 0.0})
            results.append(GenerateResult(rollout))
        own = {"answers/prompts/checker": 8, "answers/distinct/checker": 1, "answers/commonest/checker": 1.0}
        log.step(step, {**own, "checker/entropy": 0.01}, results)
    return tmp_path


def test_three_calls_show_a_diagnosis_and_their_texts_are_escaped(run_dir, capsys):
    assert cli.main(["diagnose", str(run_dir)]) == EXIT_OK
    first, *calls = capsys.readouterr().out.splitlines()
    assert first.startswith("step 3: actor 'checker': 100% of its answers to 8 different prompts are the same")
    assert "from the first step on" in first and first.endswith("See docs/diagnosis.md#one-answer")
    assert len(calls) == 3 and ["question 1" in each for each in calls].count(True) == 1, "each has another prompt"
    assert all(", checker: " in each and "reward 0" in each for each in calls)
    assert all(char.isprintable() for each in calls for char in each)
    assert cli.main(["diagnose", str(run_dir), "--json"]) == EXIT_OK
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["diagnosis"]["name"], found["diagnosis"]["since"], len(found["calls"])) == ("one-answer", 1, 3)


def test_a_healthy_run_a_run_of_before_and_a_folder_without_a_run(run_dir, tmp_path, capsys):
    (run_dir / FACTS).unlink()
    assert [each.diagnosis.actor for each in diagnose_run(run_dir)] == ["checker"], "its facts are guessed"
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    assert cli.main(["diagnose", str(run_dir)]) == EXIT_OK
    assert capsys.readouterr().out.startswith("no diagnosis yet: this run has 1 of the 3 steps")
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "reward": 1.0}}\n' for step in (1, 2, 3)))
    assert cli.main(["diagnose", str(run_dir)]) == EXIT_OK
    assert capsys.readouterr().out.startswith("no diagnosis: the metrics")
    (run_dir / FACTS).write_text("[]")
    assert cli.main(["diagnose", str(run_dir)]) == EXIT_USAGE
    assert FACTS in capsys.readouterr().err
    assert cli.main(["diagnose", str(tmp_path / "none")]) == EXIT_USAGE


def test_status_shows_each_diagnosis_whole_and_the_newest_other_warning(run_dir):
    log = RunLog(run_dir, 5)
    (found,) = [each.diagnosis for each in diagnose_run(run_dir)]
    log.warn(3, found.line, diagnosis=found.name, actor=found.actor)
    log.warn(2, "the first")
    log.warn(3, "the second")
    diagnosed, other = read_status(run_dir).warnings
    assert diagnosed == f"step 3: {found.line}" and other.startswith("step 3: the second (the newest of 3")
