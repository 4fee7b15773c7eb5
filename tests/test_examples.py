"""The examples run, and say what they claim."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from turnwise.run.build import train_from_config
from turnwise.train.validate import load_config

from .trained import rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")

EXAMPLES = Path(__file__).parents[1] / "examples"
SUDOKU = sorted((EXAMPLES / "sudoku").glob("*.toml"))
SHORT: dict[str, object] = {
    "steps": 3,
    "threads": 1,
    "health.start_questions": 0,
    "warm_start.steps": 4,
    "warm_start.batch_size": 8,
    "rollout.prompts_per_step": 3,
    "rollout.branches": 4,
    "eval.every": 2,
    "eval.num_prompts": 4,
    "checkpoint.every": 2,
    # A model that can't write a grid yet ties every group; the reward itself, below 0 then, still moves weights.
    "credit.rule": "episodic",
}
TEAM = ["proposer", "reviser"]
WEIGHTS = {"single": ["default"], "prompt": ["default"], "lora": TEAM, "full": TEAM}


def checked(folder: Path) -> list[dict]:
    """The metrics of a short run in which no episode failed."""
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "validation" in rows[2]
    assert all(row.get("episodes/failed", 0) == 0 for row in rows)
    return rows


def run_example(folder: Path, name: str, *arguments: str) -> str:
    """What the example prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_drop_in(tmp_path: Path) -> None:
    """Both ways of one training step give the same losses and gradients, and the model learns."""
    printed = run_example(tmp_path, "drop_in.py")
    assert "losses and gradients agree" in printed


@pytest.mark.slow
def test_vowels(tmp_path: Path) -> None:
    """A game of one's own, in no more than 40 lines, is learned."""
    lines = (EXAMPLES / "vowels.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    printed = run_example(tmp_path, "vowels.py", "12")
    # The untrained model writes 6%.
    assert int(printed.rpartition(":")[2].strip(" %\n")) >= 25


@pytest.mark.slow
def test_train_loop(tmp_path: Path) -> None:
    """The loop without the trainer fits on two pages, and its reward rises."""
    assert len((EXAMPLES / "train_loop.py").read_text(encoding="utf-8").splitlines()) <= 120
    printed = run_example(tmp_path, "train_loop.py", "15")
    first, last = map(float, printed.splitlines()[-1].removeprefix("reward rose from ").split(" to "))
    assert first < 0.1 and last > 0.2, printed


@pytest.mark.slow
@pytest.mark.needs("trl")
def test_trl_trie(tmp_path: Path) -> None:
    """TRL's trainer has its own loss and gradient with log-probs from the trie of its batch."""
    printed = run_example(tmp_path, "trl_trie.py")
    assert "loss and gradient are TRL's" in printed


@pytest.mark.parametrize(
    "name", ["plan_path", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sokoban", "code_duel"))]
)
def test_teams_that_walk_or_write(name: str, tmp_path: Path) -> None:
    """Three steps: both actors' calls train, and no episode fails."""
    given = {**SHORT, "run_dir": str(tmp_path / "run")}
    if name == "code_duel":
        # No reward of an episode is below 0 here, so without a program in sight nothing would train.
        given["credit.rule"] = "constant"
    config = load_config(EXAMPLES / f"{name}.toml", given)
    run = train_from_config(config)
    lines = checked(tmp_path / "run")
    trained = {actor.id for actor in run.task.actors for line in lines if line.get(f"samples/{actor.id}")}
    assert trained == {actor.id for actor in run.task.actors}


def test_each_level_has_both_loops() -> None:
    assert [path.stem for path in SUDOKU] == sorted(name + kind for name in WEIGHTS for kind in ("", "_async"))


@pytest.mark.parametrize(
    "path",
    [p if p.stem == "lora_async" else pytest.param(p, marks=pytest.mark.slow) for p in SUDOKU],
    ids=lambda p: p.stem,
)
def test_sudoku_at_every_level(path: Path, tmp_path: Path) -> None:
    """Three steps of each: every policy learns, the loop is the one that the file names, the whole folder is there."""
    config = load_config(path, {**SHORT, "run_dir": str(tmp_path / "run")})
    run = train_from_config(config)
    level, _, kind = path.stem.partition("_")
    policies = run.trainer.policies
    assert list(policies) == WEIGHTS[level]
    assert all(policy.version > 0 for policy in policies.values())
    assert checked(tmp_path / "run")[-1]["staleness_max"] == (1 if kind else 0)
    assert sorted(folder.name for folder in (tmp_path / "run" / "policies").iterdir()) == sorted(policies)
    if level in ("lora", "full"):
        first, second = (dict(policy.weights()) for policy in policies.values())
        assert any(not torch.equal(first[name], second[name]) for name in first), "each learns for itself"
