"""The commands of a run's processes: ranks, engines and arena workers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turnwise.cluster.host import ProcessCommand
from turnwise.cluster.members import FOLDER, log_file
from turnwise.cluster.placement import Kind, Role
from turnwise.cluster.supervisor import Place
from turnwise.train.config.features import required_options
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import to_toml
from turnwise.utils.files import KEY_VARIABLE, make_private, replace_text

ROLE = "TURNWISE_CLUSTER_ROLE"
"""Environment variable with the role of a process that a supervisor started."""

PASSED = ("HF_", "HUGGING", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "GOMP_",
          "KMP_", "VLLM_", "TURNWISE_", "WANDB_", "PYTHON", "TRITON_")  # fmt: skip
"""Prefixes of the variables that the processes of a run get from the supervisor's environment."""


def write_config(config: TrainConfig) -> Path:
    """Write the config that all processes of the run read, and return the file."""
    path = (config.run_dir / FOLDER / "config.toml").absolute()
    make_private(config.run_dir)
    path.parent.mkdir(exist_ok=True)
    replace_text(path, to_toml(config))
    return path


def commands_of(
    config: TrainConfig, models: Mapping[str, Path | str], key: str = ""
) -> dict[Kind, Callable[[Place], ProcessCommand]]:
    """Return the functions that make the command of each kind of process.

    ``models`` has a folder with config and tokenizer for each pool of engines. ``key`` is the secret of the run, by
    default a new one.
    """
    file, secret = write_config(config), (key or secrets.token_urlsafe(32)) + "\n"
    shared = {name: value for name, value in os.environ.items() if name.startswith(PASSED) and name != KEY_VARIABLE}
    shared["PYTHONUNBUFFERED"] = "1"

    def command(role: Role, arguments: list[str], env: Mapping[str, str] = {}) -> ProcessCommand:
        variables = {**shared, **env, ROLE: role.name}
        log = log_file(config.run_dir, role.name).absolute()
        return ProcessCommand(["--secret", KEY_VARIABLE, *arguments], variables, os.getcwd(), log, secret)

    def rank(place: Place) -> ProcessCommand:
        count, env = config.cluster.learner.count, {}
        if count > 1:
            env = {
                "RANK": str(place.role.number), "WORLD_SIZE": str(count), "LOCAL_RANK": "0",
                "MASTER_ADDR": place.address, "MASTER_PORT": str(place.port),
            }  # fmt: skip
        return command(place.role, ["train", str(file)], env)

    def engine(place: Place) -> ProcessCommand:
        pool = config.cluster.engines[place.role.pool]
        address = ["--host", place.address, "--port", str(place.port), "--api-key-env", KEY_VARIABLE, "--restarts", "0"]
        options = [word for name, value in pool.options.items() for word in _as_options(name, value)]
        if asked := {f"enable_return_{option}": True for option in required_options(config)}:
            options += _as_options("engine_args", asked)
        what = ["serve", str(models[place.role.pool]), "--engine", pool.engine, "--dummy-weights"]
        return command(place.role, [*what, *address, *options])

    def worker(place: Place) -> ProcessCommand:
        address = ["--host", place.address, "--port", str(place.port)]
        return command(place.role, ["worker", str(file), *address])

    return {"rank": rank, "engine": engine, "worker": worker}


def _as_options(name: str, value: Any) -> list[str]:
    """Return the words of an option of ``turnwise serve``; ``engine_args`` become pairs of ``--engine-arg``."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, Mapping):
        return [word for key, each in value.items() for word in (flag.removesuffix("s"), f"{key}={each}")]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]
