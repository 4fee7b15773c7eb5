"""``make gpu-check`` as far as a machine without a GPU shows it: what is missing, stages, limits, the report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

MACHINE = {"gpu": "NVIDIA H200", "architecture": "90", "torch": "2.11"}


@pytest.fixture
def check(load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load("gpu_check")
    monkeypatch.setattr(module, "BUILD", tmp_path)
    return module


def python(check: Any, name: str, code: str, **options: Any) -> Any:
    return check.Stage(name, [sys.executable, "-c", code], options.pop("limit", 20), **options)


def test_without_a_gpu_it_says_what_is_missing(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "PROGRAMS", ("nvcc-that-is-not-there",))
    monkeypatch.setattr(check, "MODULES", ("torch", "module_that_is_not_there"))
    assert check.main([]) == 2
    said = capsys.readouterr().err
    for gap in ("a GPU that PyTorch sees", "nvcc-that-is-not-there on the PATH", "module_that_is_not_there"):
        assert gap in said


def test_a_failing_stage_stops_nothing(check: Any) -> None:
    results = check.run_all(
        [
            python(check, "fails", "import sys; print('why'); sys.exit(3)"),
            python(check, "hangs", "import time; print('begun', flush=True); time.sleep(60)", limit=1),
            python(check, "idle", "print('0 passed')", needs=r"[1-9]\d* passed"),
            python(check, "works", "print('2 passed')", needs=r"[1-9]\d* passed"),
            check.Stage("absent", ["program-that-is-not-there"], 5),
        ],
        60,
    )
    assert [r.status.split(",")[0] for r in results] == [
        "exit code 3",
        "still running after 1 s",
        "exited with 0",
        "ok",
        "program-that-is-not-there is not on the PATH",
    ]
    assert "why" in results[0].output and "begun" in results[1].output


def test_a_hanging_stage_takes_its_children_along(check: Any, tmp_path: Path) -> None:
    late = tmp_path / "late"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(late)!r}).touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    (result,) = check.run_all([python(check, "hangs", parent, limit=1)], 60)
    assert result.status == "still running after 1 s"
    time.sleep(3)
    assert not late.exists()


def test_stages_share_the_time(check: Any) -> None:
    given = []

    def run(stage: Any, limit: float) -> Any:
        given.append(limit)
        return check.Result(stage.name, "ok", 0.0, "")

    assert (
        check.run_all([python(check, "a", "", limit=5), python(check, "b", "", limit=900)], 30, run)[1].status == "ok"
    )
    assert given[0] == 5 and 25 < given[1] <= 30
    (late,) = check.run_all([python(check, "c", "")], 1, run)
    assert late.status.startswith("not run") and len(given) == 2


def test_stages(check: Any) -> None:
    """Built for the GPU's own architecture; every stage fits; all of them are checked for having done something."""
    stages = check.stages("90", None, ["policy_loss"])
    names = [stage.name for stage in stages]
    assert names == [
        *("build", "import", "ops", "tests", "memcheck", "racecheck"),
        *("bench policy_loss", "ops triton", "tests triton"),
    ]
    assert any("90-real" in word for word in stages[0].command)
    assert all(stage.needs for stage in stages[1:])
    assert stages[0].limit + sum(stage.limit for stage in stages[1:4]) < 470


def test_report(check: Any, tmp_path: Path) -> None:
    (tmp_path / "policy_loss.json").write_text('{"bench": "policy_loss", "µs": 1.0}\n', encoding="utf-8")
    results = [
        check.Result("build", "ok", 30.0, ""),
        check.Result("tests", "exit code 1", 20.0, "1 failed, 30 passed"),
        check.Result("bench policy_loss", "ok", 9.0, "noise\n## policy_loss\n\n| shape |\n|---|\n| [8, 256] |"),
    ]
    path = check.write(tmp_path / "out", MACHINE, results, ["policy_loss"])
    text = path.read_text()
    assert path.name.endswith("-nvidia-h200.md")
    assert "gpu NVIDIA H200" in text and "| tests | exit code 1 | 20 |" in text and "1 failed, 30 passed" in text
    assert "| [8, 256] |" in text and "noise" not in text
    rows = [json.loads(line) for line in path.with_suffix(".json").read_text().splitlines()]
    assert [row.get("stage") or row["bench"] for row in rows] == ["build", "tests", "bench policy_loss", "policy_loss"]


def test_options(check: Any, tmp_path: Path) -> None:
    assert check.parse(["--stages", "build", "benches"]).stages == ["build", "benches"]
    for wrong in (["--stages", "party"], ["--wheels", str(tmp_path)]):
        with pytest.raises(SystemExit):
            check.parse(wrong)
