"""``turnwise init``: what it writes trains as it stands, and nothing is overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.cli import main as cli
from turnwise.cli.commands.init import find_examples
from turnwise.cli.options import EXIT_OK, EXIT_USAGE


def test_the_first_files_train(
    tmp_path: Path, narrow_model: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of a narrow model, with nothing else changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["init"]) == EXIT_OK
    printed = capsys.readouterr().out
    assert printed.splitlines() == ["wrote my_team.py", "wrote run.toml", "next: turnwise train run.toml"]
    assert len((tmp_path / "my_team.py").read_text().splitlines()) <= 40
    assert cli.main(["train", "run.toml", "--threads", "1", "--steps", "2"]) == EXIT_OK
    assert "held-out success" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "runs/my_team/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward/editor" in line] == [1, 2]


@pytest.mark.slow
def test_the_first_files_train_as_they_stand(tmp_path: Path) -> None:
    """From the two commands that ``turnwise init`` prints: the random team learns to write vowels."""

    def turnwise(*words: str) -> str:
        command = [sys.executable, "-P", "-m", "turnwise", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = turnwise("init")
    assert printed.splitlines() == ["wrote my_team.py", "wrote run.toml", "next: turnwise train run.toml"]
    assert "held-out success" in turnwise("train", "run.toml", "--threads", "1")
    lines = [json.loads(line) for line in (tmp_path / "runs/my_team/metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/editor"] for line in lines if "reward/editor" in line]
    assert len(rewards) == 20 and rewards[-1] > rewards[0] + 0.5


def test_examples_are_listed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "--list"]) == EXIT_OK
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"start", "sudoku", "vowels", "kuhn_poker"} <= set(listed)
    for name in listed:
        assert cli.main(["init", name, "--example", name]) == EXIT_OK
    assert (tmp_path / "vowels" / "vowels.py").read_text() == (find_examples() / "vowels.py").read_text()
    copied = {path.relative_to(tmp_path / "sudoku") for path in (tmp_path / "sudoku").rglob("*.toml")}
    assert copied == {path.relative_to(find_examples()) for path in (find_examples() / "sudoku").glob("*.toml")}
    assert "next: cd sudoku && turnwise train sudoku/prompt.toml" in capsys.readouterr().out
    assert cli.main(["train", "sudoku/sudoku/lora.toml", "--dry-run"]) == EXIT_OK, "`extends` finds its file"


def test_files_that_are_there_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("mine")
    assert cli.main(["init", str(tmp_path)]) == EXIT_USAGE
    assert f"{tmp_path / 'run.toml'}: already there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"] and (tmp_path / "run.toml").read_text() == "mine"


def test_a_mistyped_example_gets_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", str(tmp_path), "--example", "sudku"]) == EXIT_USAGE
    assert "--example='sudku': unknown; did you mean 'sudoku'?" in capsys.readouterr().err
