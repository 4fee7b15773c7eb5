"""``turnwise bench`` and ``make bench``: the benches verify against their peers and report, failing ones too."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_USAGE

Load = Callable[[str], ModuleType]
BENCHES = sorted(p.stem.removeprefix("bench_") for p in (Path(__file__).parents[2] / "bench").glob("bench_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # verl's trainer has an environment of its own: make test-verl
    [pytest.param(name, marks=pytest.mark.needs("transfer_queue") if name == "verl" else ()) for name in BENCHES],
)
def test_each_bench_verifies_and_reports(
    load: Load, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Its smallest size: all methods give the same results, or it fails. Without compiling, which takes long."""
    if name not in (
        "verl",
        "growth",
    ):  # another environment; it counts imports
        monkeypatch.setattr(sys, "executable", request.getfixturevalue("warm_python"))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = load("run")
    options = run.parse([name, "--quick", "--rounds", "2", "--device", "cpu", "--report", "--out", str(tmp_path)])
    outcome = run.run_one(name, options, {})
    assert outcome.failure == ""
    assert outcome.text.count("| turnwise") >= 1 and outcome.rows
    for row in outcome.rows:
        assert row["bench"] == name and row["device"] == "cpu" and row["torch"] and "commit" in row
        assert row["method"] and all(value > 0 for key, value in row.items() if key in ("µs", "GB/s") and value)


def outcome(run: Any, **changes: Any) -> Any:
    row = {"machine": "AMD EPYC", "device": "cpu", "isa": "avx512", "torch": "2", "triton": None, "µs": 3.0}
    whole = run.Outcome("policy_loss", "python bench/bench_policy_loss.py", "## a table\n\n| µs |", [row], "")
    return whole._replace(**changes)


def test_report(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    run = load("run")
    text = run.report([outcome(run), outcome(run, name="other", text="", rows=[], failure="exit code 1: boom")])
    assert "machine AMD EPYC" in text and "torch 2" in text and "triton not installed" in text
    assert "python bench/bench_policy_loss.py" in text and "| µs |" in text
    assert "**other failed**: exit code 1: boom" in text
    with pytest.raises(SystemExit) as stop:
        load("run").parse(["nothing"])
    assert stop.value.code == 2 and "'nothing'" in capsys.readouterr().err


def test_one_that_fails_does_not_stop_the_next(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load("run")
    asked = []

    def pretend(name: str, options: Any, environment: dict[str, str]) -> Any:
        asked.append((name, environment))
        return outcome(run, name=name, failure="exit code 3: boom" if name == "group_advantage" else "")

    monkeypatch.setattr(run, "run_one", pretend)
    assert run.main(["group_advantage", "policy_loss", "--report", "--out", str(tmp_path)]) == 1
    # policy_loss again, as on a CPU without AVX-512
    assert asked == [("group_advantage", {}), ("policy_loss", {}), ("policy_loss", {"TURNWISE_ISA": "avx2"})]
    assert "bench group_advantage failed: exit code 3: boom" in capsys.readouterr().err
    (markdown,) = tmp_path.glob("*-amd-epyc.md")
    assert "**group_advantage failed**" in markdown.read_text()
    assert len([json.loads(line) for line in markdown.with_suffix(".json").read_text().splitlines()]) == 3


def test_a_busy_machine_is_said(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load("run")
    monkeypatch.setattr(run, "run_one", lambda name, options, environment: outcome(run, name=name))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for average, said in ((1.0, False), (3.0, True)):
        monkeypatch.setattr(os, "getloadavg", lambda a=average: (a, a, a))
        run.main(["group_advantage", "--report", "--out", str(tmp_path)])
        (markdown,) = tmp_path.glob("*.md")
        assert ("quote nothing" in markdown.read_text()) is said
        assert ("load 3.0 on 4 cores" in capsys.readouterr().err) is said


def test_time_limit(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load("run")
    (tmp_path / "bench_sleeper.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "NAMES", ["sleeper"])
    result = run.run_one("sleeper", run.parse(["sleeper", "--limit", "1"]), {})
    assert result.failure == "still running after 1 s" and "begun" in result.text


def test_turnwise_bench_finds_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the benches of the folder that it is called in, and passes their exit code on."""
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "bench_policy_loss.py").touch()
    (folder / "run.py").write_text("import json, sys; json.dump(sys.argv[1:], open('called.json', 'w')); sys.exit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("turnwise.__file__", str(tmp_path / "site" / "x" / "turnwise" / "__init__.py"))
    assert cli.main(["bench", "policy_loss", "--json"]) == 7
    assert json.loads((tmp_path / "called.json").read_text()) == ["policy_loss", "--json"]


def test_turnwise_bench_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("turnwise.__file__", str(tmp_path / "site" / "x" / "turnwise" / "__init__.py"))
    assert cli.main(["bench"]) == EXIT_USAGE
    assert "source checkout" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "bench" not in capsys.readouterr().out
