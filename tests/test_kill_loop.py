"""The short form of ``tests/kill_loop.py``: a few kills -9 of real runs, each resumed and compared bit for bit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("warm_python")

SCRIPT = Path(__file__).with_name("kill_loop.py")


MODES = [("sync", 2), ("async", 1), ("lora", 1), ("league", 2), ("two ranks", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kills"), MODES)
def test_a_run_killed_and_resumed_equals_one_left_alone(mode, kills, tmp_path, warm_python, monkeypatch):
    """Of two ranks one is killed, and torchrun restarts both."""
    monkeypatch.setenv("PYTHON_EXEC", warm_python)  # with which torchrun starts the ranks
    how = ["--ranks", "2"] if mode == "two ranks" else ["--mode", mode]
    python = sys.executable if mode == "two ranks" else warm_python
    command = [python, "-P", str(SCRIPT), "--kills", str(kills), *how, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def kill_loop():
    spec = importlib.util.spec_from_file_location("kill_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def folder_of_a_run(run, *, steps=(1, 2), loss=0.5, weights=b"w", seconds=1.0, moments=b"m", seed=0):
    for folder in ("policies/default", "checkpoints/step_00000002"):
        (run / folder).mkdir(parents=True)
    rows = [{"step": step, "loss": loss, "seconds_update": seconds} for step in steps]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "rollouts.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    (run / "policies/default/model.safetensors").write_bytes(weights)
    (run / "checkpoints/step_00000002/optimizer.safetensors").write_bytes(moments)
    (run / "checkpoints/step_00000002/manifest.json").write_text(
        json.dumps({"progress": {"seconds": seconds}, "settings": f"run_dir = '{run}'\nseed = {seed}"})
    )
    return run


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, []),
        ({"seconds": 2.0}, []),
        ({"steps": (1, 2, 2)}, ["metrics.jsonl: steps [1, 2, 2]", "rollouts.jsonl: steps [1, 2, 2]"]),
        ({"steps": (2,)}, ["metrics.jsonl: steps [2]", "rollouts.jsonl: steps [2]"]),
        ({"loss": 0.5000001}, ["metrics.jsonl, step 1", "metrics.jsonl, step 2"]),
        ({"weights": b"v"}, ["policies/default/model.safetensors differs"]),
        ({"moments": b"n"}, ["checkpoints/step_00000002/optimizer.safetensors differs"]),
        ({"seed": 1}, ["checkpoints/step_00000002/manifest.json differs"]),
    ],
)
def test_the_comparison_finds_what_it_should(kill_loop, tmp_path, changed, told):
    whole, other = folder_of_a_run(tmp_path / "whole"), folder_of_a_run(tmp_path / "other", **changed)
    found = list(kill_loop.differences(whole, other))
    assert len(found) == len(told) and all(line.startswith(start) for line, start in zip(found, told, strict=True))
