"""``make gpu-check`` as far as a machine without a GPU shows it: gaps, stages, limits, the report."""

from __future__ import annotations

import json
import sys
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
    """The script on a machine that has everything, with its folders in ``tmp_path``."""
    module = load("gpu_check")
    monkeypatch.setattr(module, "BUILD", tmp_path)
    monkeypatch.setattr(module, "SITE", tmp_path / "site")
    monkeypatch.setattr(module, "MODULES", ())
    monkeypatch.setattr(module, "PROGRAMS", ())
    monkeypatch.setattr(module, "gpu", lambda: MACHINE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return module


def python(check: Any, name: str, code: str, **options: Any) -> Any:
    return check.Stage(name, [sys.executable, "-c", code], options.pop("limit", 20), **options)


def log_of(folder: Path) -> str:
    (log,) = folder.glob("*.log")
    return log.read_text()


def test_gaps_are_named(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs are found beside the interpreter too, where no PATH names them."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "PROGRAMS", ("nvcc", "absent-program"))
    monkeypatch.setattr(check, "PLACES", (str(tmp_path / "bin"),))
    monkeypatch.setattr(check, "MODULES", ("torch", "absent_module"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert check.main([]) == 2
    said = capsys.readouterr().err
    for gap in ("a GPU that PyTorch sees", "absent-program on the PATH", "absent_module", "--wheels: pybind11"):
        assert gap in said
    assert "nvcc on the PATH" not in said


@pytest.mark.slow
def test_a_failed_stage_stops_nothing(check: Any, tmp_path: Path) -> None:
    """A stage that hangs is ended with its children, as Ctrl-C would, so that pytest still says what failed."""
    late, slow = tmp_path / "late", tmp_path / "test_slow.py"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(late)!r}).touch()"
    hangs = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    slow.write_text("import time\ndef test_wrong(): assert 1 == 2, 'this one'\ndef test_slow(): time.sleep(60)\n")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(slow)]
    stages = [
        python(check, "fails", "import sys; print('why'); sys.exit(3)"),
        python(check, "hangs", hangs, limit=1),
        python(check, "idle", "print('0 passed')", needs=r"[1-9]\d* passed"),
        python(check, "works", "print('2 passed')", needs=r"[1-9]\d* passed"),
        check.Stage("absent", ["absent-program"], 5),
        check.Stage("tests", tests, 8),
    ]
    results = list(check.run_all(stages, 60))
    assert [r.status.split(",")[0] for r in results] == [
        "exit code 3", "still running after 1 s", "exited with 0", "ok", "absent-program is not on the PATH",
        "still running after 8 s",
    ]  # fmt: skip
    assert "why" in results[0].output and "begun" in results[1].output and "this one" in results[5].output
    assert not late.exists()


def test_stages_share_the_time(check: Any) -> None:
    given = []

    def run(stage: Any, limit: float) -> Any:
        given.append(limit)
        return check.Result(stage.name, "ok", 0.0, "")

    list(check.run_all([python(check, "a", "", limit=5), python(check, "b", "", limit=900)], 30, run))
    assert given[0] == 5 and 25 < given[1] <= 30
    (late,) = check.run_all([python(check, "c", "")], 1, run)
    assert late.status.startswith("not run") and len(given) == 2


def test_stages(check: Any) -> None:
    """The build is for the GPU's own architecture, every other stage must print something, and what is worth most comes
    first in each part."""
    benches = ["policy_loss", "trainer"]
    parts = check.stages("90", benches, workers=8)
    begin, last = ["build", "import"], ["training", "ops triton", "tests triton"]
    checks = ["ops", "compile", "bench policy_loss", "tests", "memcheck", "racecheck"]
    assert {part: [stage.name for stage in each] for part, each in parts.items()} == {
        "kernels": [*begin, *checks],
        "trainer": [*begin, "bench trainer", *last],
    }
    every = {stage.name: stage for part in parts.values() for stage in part}
    assert any("90-real" in word for word in every["build"].command)
    assert all(stage.needs for name, stage in every.items() if name != "build")
    for name in ("memcheck", "racecheck"):
        assert "kernel_substring=turnwise" in every[name].command and "worksteal" not in every[name].command
    assert [name for name, stage in every.items() if "worksteal" in stage.command] == [
        "tests", "training", "tests triton"
    ]  # fmt: skip
    assert {name.split()[0] for name in every} - {"bench"} < set(check.GROUPS)
    assert check.parse(["kernels"]).seconds == check.parse([]).seconds / 2 == check.SECONDS <= 420
    found = {path.stem.removeprefix("bench_") for path in (check.ROOT / "bench").glob("bench_*.py")} - check.NO_GPU
    ops = {"group_advantage", "grouped_policy_loss", "linear_logprob", "policy_loss", "token_rewards"}
    assert found == {*ops, "trainer"}


def test_benches_compile_beside_one_another_before_any_is_timed(check: Any, tmp_path: Path) -> None:
    """Their rows don't count, and the timed runs find the same caches."""
    (compiling,) = (s for s in check.stages("90", ["a", "b", "trainer"])["kernels"] if s.name == "compile")
    assert compiling.command[2].count("--rounds 1") == 2 and "trainer" not in compiling.command[2]
    assert compiling.command[2].endswith("& wait") and "/dev/null" in compiling.command[2]
    timed = [s for s in check.stages("90", ["a"])["kernels"] if s.name == "bench a"]
    assert all(compiling.environment[name] == timed[0].environment[name] for name in check.CACHES)


def test_a_rehearsal_runs_the_same_benches_without_a_gpu(check: Any, tmp_path: Path) -> None:
    """Each row says so, in the table and in the JSON lines, and no GPU or nvcc is asked for."""
    stages = check.rehearsed(["trainer", "policy_loss"])
    assert [stage.name for stage in stages] == ["build", "import", "ops", "tests", "bench trainer", "bench policy_loss"]
    assert any("TURNWISE_CUDA=OFF" in word for word in stages[0].command)
    assert all({"--quick", "cpu"} <= set(stage.command) for stage in stages if stage.name.startswith("bench"))
    machine = {"gpu": "rehearsal", "rehearsal": True}
    bench = check.Result("bench trainer", "ok", 1.0, "## Title\n\n| method | s |\n|---|---|\n| turnwise | 1 |\n")
    path = check.write(tmp_path, machine, [check.Result("build", "ok", 2.0, ""), bench], [])
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    assert all(line.startswith(("| rehearsal |", "|---|---|")) for line in lines) and len(lines) == 7
    assert len({line.count("|") for line in lines[:4]}) == 1, "a column more in each line"
    rows = [json.loads(line) for line in path.with_suffix(".json").read_text().splitlines()]
    assert rows and all(row["rehearsal"] is True for row in rows)
    gaps = check.missing(rehearsal=True)
    assert not any("GPU" in gap or "nvcc" in gap for gap in gaps)


def test_wheels_and_the_report(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels are installed before the gaps are counted and serve every stage, beside the caller's PYTHONPATH. A stage
    finds those before it in the report."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "value = 7\n")
        wheel.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        wheel.writestr("brought-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("brought-1.0.dist-info/RECORD", "")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "already_here.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.setattr(check, "MODULES", ("brought",))
    out = tmp_path / "out"
    show = f"next(pathlib.Path({str(out)!r}).glob('*.md')).read_text()"
    look = f"import brought, already_here, pathlib; print(brought.value, {show})"
    todo = [python(check, "build", ""), python(check, "ops", look, needs="^7"), python(check, "bench x", "")]
    monkeypatch.setattr(check, "stages", lambda *_: {"kernels": todo, "trainer": []})
    given = ["kernels", "--wheels", str(tmp_path / "wheels"), "--out", str(out)]
    assert check.main([*given, "--stages", "build", "ops"]) == 0
    assert [path.name.split("-", 3)[3] for path in sorted(out.glob("*.md"))] == ["nvidia-h200-kernels.md"]
    log = log_of(out)
    assert "== wheels: ok" in log and "== ops: ok" in log and "| build | ok |" in log and "bench x" not in log
    # A wheel of turnwise needs no build.
    wheel = tmp_path / "wheels" / "brought-1.0-py3-none-any.whl"
    monkeypatch.setattr(check, "install", lambda *_: [sys.executable, "-c", ""])
    wheel.rename(wheel.with_name("turnwise-1.0-py3-none-any.whl"))
    todo[1] = python(check, "ops", "")
    assert check.main(given) == 0 and "== build" not in log_of(out)


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


def test_the_guide_fetches_what_is_needed(check: Any) -> None:
    guide = (check.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (line,) = [line for line in guide.splitlines() if "pip download" in line]
    assert line.endswith(" -d wheels " + " ".join(check.WHEELS))
    for wrong in (["--stages", "party"], ["--wheels", "/nowhere"], ["all"]):
        with pytest.raises(SystemExit):
            check.parse(wrong)
