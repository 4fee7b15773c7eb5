"""``make gpu-check`` as far as a machine without a GPU shows it: what is missing, stages, limits, the report."""

from __future__ import annotations

import json
import sys
import time
import zipfile
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
    stages = check.run_all(
        [
            python(check, "fails", "import sys; print('why'); sys.exit(3)"),
            python(check, "hangs", "import time; print('begun', flush=True); time.sleep(60)", limit=1),
            python(check, "idle", "print('0 passed')", needs=r"[1-9]\d* passed"),
            python(check, "works", "print('2 passed')", needs=r"[1-9]\d* passed"),
            check.Stage("absent", ["program-that-is-not-there"], 5),
        ],
        60,
    )
    results = list(stages)
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

    results = list(check.run_all([python(check, "a", "", limit=5), python(check, "b", "", limit=900)], 30, run))
    assert results[1].status == "ok"
    assert given[0] == 5 and 25 < given[1] <= 30
    (late,) = check.run_all([python(check, "c", "")], 1, run)
    assert late.status.startswith("not run") and len(given) == 2


def test_stages(check: Any) -> None:
    """Built for the GPU's own architecture; every stage fits; all of them are checked for having done something."""
    stages = check.stages("90", ["policy_loss"])
    names = [stage.name for stage in stages]
    assert names == [
        *("build", "import", "ops", "tests", "memcheck", "racecheck"),
        *("bench policy_loss", "ops triton", "tests triton"),
    ]
    assert any("90-real" in word for word in stages[0].command)
    assert all(stage.needs for stage in stages[1:])
    assert stages[0].limit + sum(stage.limit for stage in stages[1:4]) < 470
    for stage in stages[4:6]:  # instrumenting torch's kernels would take all the time there is
        assert "kernel_substring=turnwise" in stage.command
    spread = {stage.name: "worksteal" in stage.command for stage in check.stages("90", [], workers=8)}
    assert [name for name, side_by_side in spread.items() if side_by_side] == ["tests", "tests triton"]


def test_tests_that_take_too_long_say_what_failed(check: Any, tmp_path: Path) -> None:
    slow = tmp_path / "test_slow.py"
    slow.write_text("import time\ndef test_wrong(): assert 1 == 2, 'this one'\ndef test_slow(): time.sleep(60)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(slow)]
    (result,) = check.run_all([check.Stage("tests", command, 8)], 60)
    assert result.status == "still running after 8 s" and "this one" in result.output


def test_wheels_come_before_anybody_looks_for_what_is_missing(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that only a wheel brings is found, and by the stages too, beside what the caller's PYTHONPATH has."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "value = 7\n")
        wheel.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        wheel.writestr("brought-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("brought-1.0.dist-info/RECORD", "")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "already_here.py").touch()
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.setattr(check, "SITE", tmp_path / "site")
    monkeypatch.setattr(check, "MODULES", ("brought",))
    monkeypatch.setattr(check, "PROGRAMS", ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "gpu", lambda: MACHINE)
    uses = python(check, "ops", "import brought, already_here; print(brought.value)", needs="7")
    monkeypatch.setattr(check, "stages", lambda *_: [uses])
    options = ["--wheels", str(tmp_path / "wheels"), "--out", str(tmp_path / "out")]
    assert check.main(options) == 0, capsys.readouterr().out
    (log,) = (tmp_path / "out").glob("*.log")
    assert "== wheels: ok" in log.read_text() and "== ops: ok" in log.read_text()
    monkeypatch.setattr(check, "MODULES", ("brought", "module_that_is_not_there"))
    assert check.main(options) == 2
    assert "--wheels: pybind11" in capsys.readouterr().err


def test_programs_are_found_where_they_lie(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setattr(check, "PROGRAMS", ("nvcc", "program-that-is-not-there"))
    monkeypatch.setattr(check, "PLACES", (str(tmp_path / "bin"),))
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("PATH", "/nowhere")
    assert check.main([]) == 2
    said = capsys.readouterr().err
    assert "program-that-is-not-there on the PATH" in said and "nvcc on the PATH" not in said


def test_what_is_done_is_written_before_the_next_stage(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ends the check from outside finds the stages before in the report."""
    monkeypatch.setattr(check, "missing", lambda: [])
    monkeypatch.setattr(check, "gpu", lambda: MACHINE)
    look = f"import pathlib; print(next(pathlib.Path({str(tmp_path / 'out')!r}).glob('*.md')).read_text())"
    monkeypatch.setattr(check, "stages", lambda *_: [python(check, "build", ""), python(check, "ops", look)])
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert check.main(["--out", str(tmp_path / "out")]) == 0
    (log,) = (tmp_path / "out").glob("*.log")
    assert "| build | ok |" in log.read_text()


def test_the_guide_fetches_what_is_needed(check: Any) -> None:
    guide = (check.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = [line for line in guide.splitlines() if "pip download" in line]
    assert line.endswith(" -d wheels " + " ".join(check.WHEELS))
    modules = {name.replace("-", "_") for name in check.WHEELS}
    assert {"pytest", "hypothesis"} | set(check.MODULES) - {"torch", "triton", "numpy"} <= modules


def test_benches_of_what_a_gpu_does(check: Any) -> None:
    found = {path.stem.removeprefix("bench_") for path in (check.ROOT / "bench").glob("bench_*.py")} - check.NO_GPU
    on_gpus = {"group_advantage", "grouped_policy_loss", "linear_logprob", "policy_loss", "token_reward"}
    assert found == on_gpus


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
