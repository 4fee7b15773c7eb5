"""The demo from end to end with a handful of steps; what it reaches with all of them is printed by ``make demo``."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from turnwise.cli import main as cli
from turnwise.cli.run import demo
from turnwise.run.build import Run
from turnwise.tasks import build_task
from turnwise.tasks.base import split_of
from turnwise.tasks.sudoku.grid import BLANK, DIGITS, ROWS, sudoku_puzzles
from turnwise.tasks.sudoku.prompts import HABIT
from turnwise.train.log.lines import read_metrics
from turnwise.train.validate import config_from_dict

pytestmark = pytest.mark.usefixtures("narrow_model")

TINY = {
    "threads": 1,
    "health": {"start_questions": 0},
    "steps": 2,
    "warm_start": {"steps": 2, "batch_size": 8},
    "eval": {"every": 1, "num_prompts": 4},
}
ROLLOUT = {
    "split_clues": {"prompts_per_step": 2, "group_size": 2},
    "sudoku": {"prompts_per_step": 2, "branches": 2, "tree": {"select": "first"}},
}
ALWAYS, ON_REQUEST = demo.PARTS


def tiny_config(part, run_dir, seed, client, **changes):
    rollout = {**ROLLOUT[part.task], "client": client}
    settings = {**TINY, "task": part.task, "run_dir": str(run_dir), "seed": seed, "rollout": rollout}
    return config_from_dict({**settings, **changes})


@pytest.fixture
def tiny_demo(monkeypatch):
    monkeypatch.setattr(demo, "demo_config", tiny_config)


def without_timings(summary):
    parts = summary["parts"].items()
    return {**summary, "parts": {task: {k: v for k, v in part.items() if "seconds" not in k} for task, part in parts}}


def check_equal_tokens(folder):
    """Both contenders were paid for with as many sampled tokens, up to one step's worth."""
    team, single = (read_metrics(folder / name) for name in ("team", "alone"))
    assert single[-1]["total_sampled_tokens"] >= team[-1]["total_sampled_tokens"]
    assert all(line["total_sampled_tokens"] < team[-1]["total_sampled_tokens"] for line in single[:-1])
    return team, single


def test_demo_leaves_summary_curves_and_tables(tmp_path, tiny_demo, capsys):
    out = tmp_path / "demo"
    summary = demo.run_demo(out, seed=3, compare=True)
    assert summary == json.loads((out / "summary.json").read_text())
    assert (summary["seed"], summary["client"]) == (3, "transformers")
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.count("the client 'transformers' samples") == 2
    assert list(summary["parts"]) == ["split_clues", "sudoku"]
    for part in demo.PARTS:
        found, folder = summary["parts"][part.task], out / part.task
        assert (found["episodes"], found["questions"], found["steps"]) == (8 if part is ALWAYS else 4, 4, 2)
        assert found["seconds_warm_start"] > 0 and found["seconds_training"] > 0 and found["sampled_tokens"] > 0
        assert list(found["held_out"]) == [f"{part.agent}, untrained", part.agent, demo.UNTRAINED, demo.TEAM]
        assert all(row in printed for row in found["held_out"]) and part.about in printed
        before, after = found["held_out"][demo.UNTRAINED], found["held_out"][demo.TEAM]
        assert f"{part.task}: held-out success went from {before['success']:.1%}" in printed
        assert f"to {after['success']:.1%}" in printed
        team, single = check_equal_tokens(folder)
        # the single agent plays whole episodes; the team of the second part plays trees
        assert ("metric/tree/branches" in team[-1]) == (part is ON_REQUEST) and "metric/tree/branches" not in single[-1]
        report = folder / "team" / "report.html"
        assert report.exists() and str(report) in printed
    # the curve grows in the terminal: the start and both steps, of the team and of the single agent, in both parts
    points = [line.split() for line in printed.splitlines() if line.lstrip().startswith("step") and "▐" in line]
    assert [int(point[1]) for point in points[:3]] == [0, 1, 2] and len(points) >= 12
    for place in (out / "curve.png", out / "summary.json"):
        assert str(place) in printed
    assert f"turnwise view {out / 'sudoku' / 'team'}" in printed and "docs/training.md" in printed


@pytest.mark.slow
def test_a_finished_demo_is_replaced_and_equal_seeds_give_equal_demos(tmp_path, tiny_demo):
    first, second = (demo.run_demo(tmp_path / "demo", seed=0) for _ in range(2))
    assert without_timings(first) == without_timings(second)
    parts = first["parts"]  # the agent with half the view needs no request
    assert ALWAYS.agent in parts["split_clues"]["held_out"] and (tmp_path / "demo/split_clues/alone").exists()
    assert ON_REQUEST.agent not in parts["sudoku"]["held_out"] and not (tmp_path / "demo/sudoku/alone").exists()


@pytest.mark.slow
def test_an_interrupted_demo_goes_on(tmp_path, tiny_demo, monkeypatch):
    whole = demo.run_demo(tmp_path / "whole", seed=0)
    out = tmp_path / "demo"
    train = Run.train

    def stop_in_the_second_part(run):
        if run.config.task == ON_REQUEST.task:
            run.trainer._stop.request()
        return train(run)

    monkeypatch.setattr(Run, "train", stop_in_the_second_part)
    assert demo.run_demo(out, seed=0) is None
    assert not (out / "summary.json").exists()
    monkeypatch.setattr(Run, "train", train)
    seconds = [(out / part.task / "warm_start" / "seconds.json").read_text() for part in demo.PARTS]
    continued = demo.run_demo(out, seed=0)
    assert [(out / part.task / "warm_start" / "seconds.json").read_text() for part in demo.PARTS] == seconds
    assert without_timings(continued) == without_timings(whole)


def run_tiny_demo(out):
    demo.PARTS, demo.demo_config = (ALWAYS,), tiny_config
    return cli.main(["demo", "--out", out, "--traceback"])


@pytest.mark.slow
def test_the_first_of_two_processes_prints_and_writes(tmp_path):
    """That they train as one process does is shown by ``tests/test_run_ranks.py``."""
    script, out = tmp_path / "tiny_demo.py", tmp_path / "demo"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_demo import run_tiny_demo\nraise SystemExit(run_tiny_demo(sys.argv[1]))\n"
    )
    ran = subprocess.run(
        [*(sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), script, out],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("the trained team: held-out") == 1, "rank 0 alone prints"
    assert [row["step"] for row in read_metrics(out / ALWAYS.task / "team")] == [0, 1, 2], "and writes"


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds other files"):
        demo.run_demo(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("part", demo.PARTS, ids=lambda part: part.task)
def test_the_shipped_settings_are_read(part):
    config = demo.demo_config(part, "somewhere", 5, "vllm")
    assert (config.task, config.seed, str(config.run_dir)) == (part.task, 5, "somewhere")
    assert config.rollout.client == "vllm"
    assert config.credit.rule == "at_grpo" and config.eval.num_prompts >= 200
    alone = demo.single_agent(part, config, "alone", 1000)
    assert [actor.id for actor in build_task(alone.task, alone.task_options).actors] == part.alone["actors"]
    assert alone.rollout.group_size == config.rollout.group_size * config.rollout.branches == 8
    assert (alone.max_sampled_tokens, alone.eval.target_success) == (1000, None), (
        "it gets its tokens, whatever it reaches"
    )


def test_the_sudoku_team_has_something_to_learn_from_and_is_evaluated_on_other_puzzles():
    config = demo.demo_config(ON_REQUEST, "somewhere", 5)
    team = build_task("sudoku", config.task_options)
    assert len(team.actors) * team.options.max_turns == ON_REQUEST.alone["max_turns"], "its agent has as many calls"
    assert config.rollout.branches > 1
    assert config.eval.target_success > 0.9 and config.eval.hold >= 2
    floor = entropy_of_fills(config.task_options["blanks"], config.task_options["quality"])
    # At the floor nothing is left to learn from, so the warm start would never stop early.
    assert config.warm_start.target_loss > 1.2 * floor > 0
    # No evaluated puzzle is trained on.
    task = build_task("sudoku")
    held_out = {r.artifact["puzzle"] for split in ("eval", "validation") for r in task.eval_requests(split, 200)}
    assert len(held_out) == 400
    trained = {r.artifact["puzzle"] for step in range(60) for r in task.requests(step, 64, 1)}
    assert not held_out & trained
    assert {split_of(puzzle) for puzzle in trained} == {"train"}


def entropy_of_fills(blanks, quality):
    """Return the entropy of a proposer's demonstrated reply to a puzzle, in nats per token."""
    puzzles, total = sudoku_puzzles("train", 200, 0, tuple(blanks)), 0.0
    for puzzle, row in itertools.product(puzzles, ROWS):
        givens, right = ("".join(grid[cell] for cell in row) for grid in (puzzle.givens, puzzle.solution))
        missing = [digit for digit in DIGITS if digit not in givens]
        orders = list(itertools.permutations(missing))
        chances = Counter({right: quality})
        for order in orders:
            left = iter(order)
            chances["".join(next(left) if given == BLANK else given for given in givens)] += (1 - quality) * (
                HABIT * (order == tuple(missing)) + (1 - HABIT) / len(orders)
            )
        total -= sum(chance * math.log(chance) for chance in chances.values())
    return total / len(puzzles) / 20  # four rows of four digits, three newlines, the end
