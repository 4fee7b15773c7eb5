"""The demo from end to end with a handful of steps; what it reaches with all of them is printed by ``make demo``."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from turnwise.cli.commands import demo
from turnwise.run.build import Run
from turnwise.tasks.base import split_of
from turnwise.tasks.sudoku.demonstrations import HABIT
from turnwise.tasks.sudoku.grid import BLANK, DIGITS, ROWS, sudoku_puzzles
from turnwise.train.log.run_log import read_metrics
from turnwise.train.loop import Trainer
from turnwise.train.validate import config_from_dict

TINY = {
    "threads": 1,
    "health": {"start_questions": 0},
    "steps": 2,
    "warm_start": {"steps": 2, "batch_size": 8},
    "rollout": {"prompts_per_step": 2, "branches": 2, "tree": {"select": "first"}},
    "eval": {"every": 1, "num_prompts": 4},
}


@pytest.fixture
def tiny_demo(monkeypatch):
    def config(run_dir, seed, client):
        return config_from_dict(
            {**TINY, "run_dir": str(run_dir), "seed": seed, "rollout": {**TINY["rollout"], "client": client}}
        )

    monkeypatch.setattr(demo, "demo_config", config)


def test_demo_leaves_summary_curve_and_table(tmp_path, tiny_demo, capsys):
    out = tmp_path / "demo"
    summary = demo.run_demo(out, seed=3, compare=True)
    assert summary == json.loads((out / "summary.json").read_text())
    wanted = [
        "success_before",
        "success_after",
        "episodes",
        "sampled_tokens",
        "seconds_warm_start",
        "seconds_training",
        "seed",
    ]
    assert set(wanted) <= set(summary)
    assert (summary["seed"], summary["episodes"], summary["questions"]) == (3, 4, 4)
    assert summary["client"] == "transformers"
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "the client 'transformers' samples" in printed
    assert list(summary["held_out"]) == [
        "warm start, one agent alone",
        "one agent + GRPO",
        "team, not trained",
        "team + AT-GRPO",
    ]
    for row in summary["held_out"]:
        assert row in printed
    # the curve grows in the terminal: the start and both steps, of the team and of the single agent
    points = [line.split() for line in printed.splitlines() if line.lstrip().startswith("step") and "▐" in line]
    assert [int(point[1]) for point in points[:3]] == [0, 1, 2] and len(points) >= 6
    before, after = summary["held_out"]["team, not trained"], summary["held_out"]["team + AT-GRPO"]
    assert f"went from {before['success']:.1%}" in printed and f"to {after['success']:.1%}" in printed
    for place in (out / "curve.png", out / "summary.json", out / "team" / "report.html"):
        assert place.exists() and str(place) in printed
    assert f"turnwise view {out / 'team'}" in printed and "docs/training.md" in printed
    # both contenders were paid for with as many sampled tokens, up to one step's worth
    team, single = (read_metrics(out / name) for name in ("team", "single"))
    assert single[-1]["total_sampled_tokens"] >= team[-1]["total_sampled_tokens"]
    assert all(line["total_sampled_tokens"] < team[-1]["total_sampled_tokens"] for line in single[:-1])
    # the single agent plays whole episodes, the team trees
    assert "metric/tree/branches" in team[-1] and "metric/tree/branches" not in single[-1]


def test_the_demo_ends_where_success_holds(tmp_path, tiny_demo, monkeypatch, capsys):
    """One agent, for comparison, gets its tokens whatever it reaches."""
    settings = {**TINY, "steps": 9, "eval": {"every": 1, "num_prompts": 4, "target_success": 0.5}}
    monkeypatch.setattr(demo, "demo_config", lambda out, *_: config_from_dict({**settings, "run_dir": str(out)}))
    evaluate = Trainer.evaluate

    async def better(trainer, *rest, **options):
        return replace(await evaluate(trainer, *rest, **options), success=0.25 * trainer.progress.step)

    monkeypatch.setattr(Trainer, "evaluate", better)
    summary = demo.run_demo(tmp_path / "demo", compare=True)
    assert summary["steps"] == 3, "at steps 2 and 3 success was at least 0.5"
    assert "stopped at eval.target_success = 0.5: validation success is 50.0% and 75.0%" in capsys.readouterr().out
    team, single = (read_metrics(tmp_path / "demo" / name) for name in ("team", "single"))
    assert single[-1]["total_sampled_tokens"] >= team[-1]["total_sampled_tokens"]


@pytest.mark.slow
def test_a_finished_demo_is_replaced_and_equal_seeds_give_equal_demos(tmp_path, tiny_demo):
    first = demo.run_demo(tmp_path / "demo", seed=0)
    second = demo.run_demo(tmp_path / "demo", seed=0)
    for timing in ("seconds_warm_start", "seconds_training"):
        assert first.pop(timing) > 0 and second.pop(timing) > 0
    assert first == second


@pytest.mark.slow
def test_an_interrupted_demo_goes_on(tmp_path, tiny_demo, monkeypatch):
    whole = demo.run_demo(tmp_path / "whole", seed=0)
    out = tmp_path / "demo"
    train = Run.train

    def stop_at_once(run):
        run.trainer._stop.request()
        return train(run)

    monkeypatch.setattr(Run, "train", stop_at_once)
    assert demo.run_demo(out, seed=0) is None
    assert not (out / "summary.json").exists()
    monkeypatch.setattr(Run, "train", train)
    seconds = (out / "warm_start" / "seconds.json").read_text()
    parts = demo.run_demo(out, seed=0)
    assert (out / "warm_start" / "seconds.json").read_text() == seconds
    assert {**parts, "seconds_warm_start": 0, "seconds_training": 0} == {
        **whole, "seconds_warm_start": 0, "seconds_training": 0,
    }  # fmt: skip


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds other things"):
        demo.run_demo(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_the_shipped_settings_are_read():
    config = demo.demo_config("somewhere", 5)
    assert (config.task, config.seed, str(config.run_dir)) == ("sudoku", 5, "somewhere")
    assert config.rollout.branches > 1 and config.credit.rule == "at_grpo" and config.eval.num_prompts >= 200
    assert config.eval.target_success > 0.9 and config.eval.hold >= 2
    floor = entropy_of_fills(config.task_options["blanks"], config.task_options["quality"])
    # At the floor nothing is left to learn from, so the warm start would never stop early.
    assert config.warm_start.target_loss > 1.2 * floor > 0


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


def test_no_evaluated_puzzle_is_trained_on():
    from turnwise.tasks import build_task

    task = build_task("sudoku")
    held_out = {r.artifact["puzzle"] for split in ("eval", "validation") for r in task.eval_requests(split, 200)}
    assert len(held_out) == 400
    trained = {r.artifact["puzzle"] for step in range(60) for r in task.requests(step, 64, 1)}
    assert not held_out & trained
    assert {split_of(puzzle) for puzzle in trained} == {"train"}
