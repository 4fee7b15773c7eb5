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

from turnwise.cli.commands.eval import evaluate_from_config
from turnwise.run.build import build_run
from turnwise.train.checkpoint.checkpoint import list_checkpoints
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.validate import config_from_dict

from .helpers import KEY, SUDOKU, Server

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
            "rollout": {"client": "tinker", "prompts_per_step": 8, "branches": 4},
            "credit": {"rule": "at_grpo"},
            "update": {"lr": 4e-3, "num_minibatches": 2},
            "eval": {"num_prompts": 3},
            "checkpoint": {"every": 1},
            "log": {"progress": False},
            **changes,
        }
    )


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def start(config: TrainConfig, folder: Path) -> subprocess.Popen[str]:
    file = folder / "config.toml"
    file.write_text(to_toml(config))
    command = [sys.executable, "-P", "-m", "turnwise", "train", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)


def test_the_sudoku_team_learns_with_an_adapter_for_each_agent(server: Server, tmp_path: Path) -> None:
    config = config_of(server, tmp_path / "run", steps=12)
    process = start(config, tmp_path)
    said, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, said
    assert KEY not in said and not any(
        KEY in file.read_text(errors="ignore") for file in (tmp_path / "run").glob("*.*")
    )
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    for name in TEAM:
        trained = [line for line in lines if line.get(f"{name}/updates")]
        assert len(trained) >= 6
        # Sampler and trainer are one model: of the first minibatch, all ratios are 1.
        assert max(line[f"{name}/sampler_trainer_logprob_max_diff"] for line in trained) < 1e-3
        reward = [line[f"reward/{name}"] for line in lines]
        assert sum(reward[-4:]) / 4 > sum(reward[:4]) / 4, reward
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
    # What was trained is what an evaluation of the run folder reads.
    assert evaluate_from_config(config).success >= 0


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, steps: int) -> None:
    deadline = time.monotonic() + 600
    while len(list_checkpoints(run_dir / "checkpoints")) == 0 or len(lines_of(run_dir)) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_killed_run_and_a_dead_server_resume(server: Server, tmp_path: Path) -> None:
    """Both come back: the server has the saved adapters with their optimizers, and the run has their paths."""
    with Server(server.base, tmp_path) as own:
        config = config_of(own, tmp_path / "run", steps=5)
        process = start(config, tmp_path)
        wait_for_steps(process, config.run_dir, 2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done = len(lines_of(config.run_dir))
        process = start(config, tmp_path)
        wait_for_steps(process, config.run_dir, done + 1)
    # The block's end has killed the server.
    said, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, None) and own.url in said and "unreachable" in said
    with Server(server.base, tmp_path, own.port):
        said, _ = start(config, tmp_path).communicate(timeout=600)
    assert "resumed from" in said
    assert [line["step"] for line in lines_of(config.run_dir)] == [1, 2, 3, 4, 5]
    held = json.loads((list_checkpoints(config.run_dir / "checkpoints")[-1] / "tinker.json").read_text())
    assert set(held["states"]) == set(TEAM)


REFUSED = [
    ({"rollout": {"client": "transformers"}}, "'rollout.client': expected 'tinker', not 'transformers'"),
    ({"loss": {"type": "gspo"}}, "'loss.type' = 'gspo': .*a GSPO: a Tinker server has no such loss"),
    ({"loss": {"kl": {"coef": 0.1}}}, r"'loss.kl.coef' = 0.1: its losses have no KL term: expected 0, or .*'reward'"),
    ({"loss": {"entropy_coef": 0.1}}, "'loss.entropy_coef' = 0.1: its losses have no entropy bonus"),
    ({"update": {"max_grad_norm": 0.5}}, "'update.max_grad_norm' = 0.5: the server takes it from its own settings"),
    ({"loop": {"max_staleness": 1}}, "'loop.max_staleness' = 1: expected 0: an update changes this server's samplers"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_the_server_can_not_do_is_refused_by_its_key(
    server: Server, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_run(config_of(server, tmp_path, 1, **changes))


def test_an_unknown_base_model_names_those_of_the_server(server: Server, tmp_path: Path) -> None:
    learner = {"type": "tinker", "tinker": {"server": "skyrl-jax", "base_url": server.url, "base_model": "other"}}
    with pytest.raises(ConfigError, match=f"'learner.tinker.base_model' = 'other': the server has {server.base}"):
        build_run(config_of(server, tmp_path, 1, learner=learner))


def test_a_missing_key_is_told(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigError, match=r"'learner.tinker.api_key_env': .*'TINKER_API_KEY'.*SkyRL checks no key"):
        build_run(config_of(server, tmp_path, 1))
