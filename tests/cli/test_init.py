"""``turnwise init``: what it writes trains as it stands, and nothing is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.cli import main as cli
from turnwise.cli.make import find_examples
from turnwise.cli.options import EXIT_OK, EXIT_USAGE

from ..report.test_page import Elements
from ..trained import rows_of


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
    rows = rows_of(tmp_path / "runs/my_team")
    assert [row["step"] for row in rows if "reward/editor" in row] == [1, 2]
    page = Elements((tmp_path / "runs/my_team/report.html").read_text(encoding="utf-8"))
    data = json.loads(page.scripts[0])
    assert data["curves"]["step"] == [row["step"] for row in rows] and data["episodes"]


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
    assert cli.main(["init", str(tmp_path), "--example", "sudku"]) == EXIT_USAGE
    assert "--example='sudku': unknown; did you mean 'sudoku'?" in capsys.readouterr().err
