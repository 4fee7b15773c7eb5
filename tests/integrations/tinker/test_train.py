"""Whole runs with SkyRL's real server: the sudoku team learns with an adapter for each agent, is killed and resumes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.cli.run.eval import evaluate_from_config
from turnwise.run.build import build_run, train_from_config
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.validate import config_from_dict

from .helpers import KEY, SUDOKU, Server, warm_base

TEAM = ("proposer", "reviser")


def config_of(server: Server, run_dir: Path, steps: int, **changes: Any) -> TrainConfig:
    return config_from_dict(
        {
            "task_options": SUDOKU,
            "run_dir": str(run_dir),
            "steps": steps,
            "threads": 1,
            "policy_sharing": "lora_per_actor",
            "policies": {"default": {"path": str(server.base), "lora": {"rank": 8}}},
            "learner": {"type": "tinker", "tinker": {"server": "skyrl-jax", "base_url": server.url, "patience": 5}},
            "rollout": {"client": "tinker", "prompts_per_step": 16, "branches": 4},
            "credit": {"rule": "at_grpo"},
            "update": {"lr": 3e-3, "min_lr_ratio": 0.1},
            "eval": {"num_prompts": 10},
            "checkpoint": {"every": 1},
            "log": {"progress": False},
            **changes,
        }
    )


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def start(config: TrainConfig, folder: Path) -> subprocess.Popen[str]:
    file = folder / "config.toml"
    file.write_text(to_toml(config))
    command = [sys.executable, "-P", "-m", "turnwise", "train", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)


def test_the_sudoku_team_learns_with_an_adapter_for_each_agent(tmp_path: Path) -> None:
    """From a base that has learned the form of the answers, and little more."""
    with Server(warm_base(tmp_path / "base", "sudoku", SUDOKU, steps=160), tmp_path) as server:
        learns(server, tmp_path)


def learns(server: Server, tmp_path: Path) -> None:
    config = config_of(server, tmp_path / "run", steps=24, eval={"every": 24, "num_prompts": 100})
    process = start(config, tmp_path)
    said, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, said
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert KEY not in said and not any(KEY.encode() in file.read_bytes() for file in files)
    first, *lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 25))
    for name in TEAM:
        trained = [line for line in lines if line.get(f"{name}/updates")]
        assert len(trained) >= 20
        # Sampler and trainer hold the same weights, of each version.
        assert max(line[f"{name}/sampler_trainer_logprob_max_diff"] for line in trained) < 1e-3
    assert lines[-1]["validation"] > first["validation"] + 0.06
    # The exported adapters are peft's, and make the base another model.
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name in TEAM:
        base = AutoModelForCausalLM.from_pretrained(server.base)
        ids = torch.tensor([[5, 40, 41, 42, 43, 1, 6]])
        with torch.no_grad():
            before = base(ids).logits
            adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "policies" / name)
            assert (adapted(ids).logits - before).abs().max() > 0.01
        assert len(adapted.peft_config["default"].target_modules) == 7
    # An evaluation of the run folder reads what was trained.
    assert evaluate_from_config(config).success == pytest.approx(lines[-1]["validation"], abs=0.02)


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, steps: int) -> None:
    deadline = time.monotonic() + 600
    while len(list_checkpoints(run_dir / "checkpoints")) == 0 or len(lines_of(run_dir)) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_killed_run_and_a_dead_server_resume(server: Server, tmp_path: Path) -> None:
    """Both come back: the server has the saved adapters with their optimizers, and the run has their paths."""
    small = {
        "task": "split_clues",
        "task_options": {},
        "rollout": {"client": "tinker", "prompts_per_step": 4, "branches": 2},
        "health": {"start_questions": 0},
        "credit": {"rule": "constant"},  # every sample trains, whatever it was worth
    }
    config = config_of(server, tmp_path / "run", steps=5, **small)
    process = start(config, tmp_path)
    wait_for_steps(process, config.run_dir, 1)
    server.kill()
    said, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, None) and server.url in said and "unreachable" in said
    server.start()
    done = len(lines_of(config.run_dir))
    process = start(config, tmp_path)
    wait_for_steps(process, config.run_dir, done + 1)
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate()
    assert "resumed from" in said
    train_from_config(config).close()
    lines = lines_of(config.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line[f"{name}/updates"] >= 1 for line in lines for name in ("reader", "writer"))
    held = json.loads((list_checkpoints(config.run_dir / "checkpoints")[-1] / "tinker.json").read_text())
    assert set(held["states"]) == {"reader", "writer"}


def test_an_unknown_base_model_names_those_of_the_server(server: Server, tmp_path: Path) -> None:
    learner = {"type": "tinker", "tinker": {"server": "skyrl-jax", "base_url": server.url, "base_model": "other"}}
    with pytest.raises(ConfigError, match=f"'learner.tinker.base_model' = 'other': the server has {server.base}"):
        build_run(config_of(server, tmp_path, 1, learner=learner))


def test_a_missing_key_is_told(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigError, match=r"'learner.tinker.api_key_env': .*'TINKER_API_KEY'.*SkyRL checks no key"):
        build_run(config_of(server, tmp_path, 1))
