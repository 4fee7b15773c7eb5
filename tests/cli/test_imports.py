"""What the commands import: a look at a run or at a help text needs no torch, which takes seconds to load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.cli.main import COMMANDS
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import to_toml
from turnwise.train.log.run_log import RunLog
from turnwise.types import GenerateResult, Rollout

from ..report.hand_made import Words, call

HEAVY = {
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "triton", "peft", "vllm", "ray"),
    *("pandas", "scipy", "sklearn", "matplotlib", "datasets", "tensorboard", "wandb", "aiohttp", "httpx", "openai"),
}
"""No command of these tests imports them."""

MODELS = {"numpy", "pydantic", "turnwise.train.config.schema"}
"""What the classes of the config need: nothing imports it that doesn't read a config."""

WALK = """
import contextlib, io, json, sys
heavy, *rest = json.loads(sys.argv[1])
from turnwise.cli.main import main
found = {}
for words, code, unwanted in rest:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            ended = main(words)
        except SystemExit as end:
            ended = end.code
    assert ended == code, (words, ended, errors.getvalue())
    if imported := sorted({*heavy, *unwanted} & set(sys.modules)):
        found[" ".join(words)] = imported
        heavy = sorted({*heavy} - {*imported})
print(json.dumps(found))
"""
"""Runs commands in one process, and prints for each the unwanted modules that it was the first to import."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one step, one episode and a checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    step = call(Words(), "solver", 0, "it is four", reward=1.0, advantage=0.0)
    rollout = Rollout("e0", "sudoku", {"prompt": "4?"}, [step], {"solver": 1.0})
    RunLog(folder, 1).step(1, {"reward": 1.0}, [GenerateResult(rollout)])
    (folder / "config.toml").write_text(to_toml(TrainConfig(run_dir=folder, steps=1)))
    (folder / "checkpoints/step_00000001").mkdir(parents=True)
    (folder / "checkpoints/step_00000001/manifest.json").write_text('{"step": 1}')
    return folder


def walk(commands: list[tuple[list[str], int, set[str]]]) -> dict[str, list[str]]:
    plain = [sorted(HEAVY), *((words, code, sorted(unwanted)) for words, code, unwanted in commands)]
    done = subprocess.run([sys.executable, "-c", WALK, json.dumps(plain)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_commands_that_look_import_neither_torch_nor_transformers(run_dir: Path, tmp_path: Path) -> None:
    """All in one process, those that need least first: a module that is there stays."""
    own = tmp_path / "own.toml"
    own.write_text(f'task = "a_module_of_mine:Task"\nrun_dir = "{tmp_path}/own"\n')
    run = str(run_dir)
    light = [["--help"], ["init", "--list"], ["status", run], ["status", run, "--json"], ["view", run]]
    light += [[name, "--help"] for name, command in COMMANDS.items() if not command.overrides and name != "bench"]
    configured = [([name, "--help"], 0) for name, command in COMMANDS.items() if command.overrides]
    configured += [
        (["diagnose", run], 0),
        (["config"], 0),
        (["config", "update.lr"], 0),
        (["credit", run, "--rule", "grpo"], 0),
    ]
    configured += [(["demo", "--explain", "--out", str(tmp_path)], 0)]
    configured += [(["train", str(own), "--dry-run"], 0), (["train", str(own), "--update.lrr", "1"], 2)]
    assert len(light) + len(configured) > len(COMMANDS)
    commands: list[tuple[list[str], int, set[str]]] = [(words, 0, MODELS) for words in light]
    assert walk([*commands, *((words, code, set()) for words, code in configured)]) == {}


def test_the_walk_names_the_command_that_imports_something(run_dir: Path) -> None:
    found = walk([(["status", str(run_dir)], 0, set()), (["view", str(run_dir)], 0, {"turnwise.report.page"})])
    assert found == {f"view {run_dir}": ["turnwise.report.page"]}
