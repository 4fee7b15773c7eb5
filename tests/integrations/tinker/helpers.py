"""Starts SkyRL's server of the Tinker API on this CPU, with a tiny model that turnwise made."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from turnwise.run.build import train_from_config
from turnwise.tasks import build_task
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.validate import config_from_dict

KEY = "tml-no-server-here-checks-it"
MODULES = Path(__file__).parent / "modules"
CACHE = Path(__file__).parents[3] / ".cache" / "jax"
"""Compiled programs, which later runs of the tests find."""

SUDOKU = {"blanks": [3, 5], "quality": 0.6, "answers": 4}


def warm_base(folder: Path, task: str, options: dict[str, Any], steps: int, **sizes: int) -> Path:
    """Write a model after a supervised start on half-right demonstrations, without any reinforcement learning."""
    tokenizer = build_tokenizer(build_task(task, options).texts())
    for part in (tokenizer, build_model(tokenizer, max_position_embeddings=2048, **sizes)):
        part.save_pretrained(folder / "model")
    config = config_from_dict(
        {
            "task": task,
            "task_options": options,
            "run_dir": str(folder / "run"),
            "steps": 0,
            "threads": 1,
            "policies": {"default": {"path": str(folder / "model")}},
            "warm_start": {"steps": steps, "batch_size": 48, "lr": 2.5e-3, "held_out": 0},
            "eval": {"num_prompts": 1},
        }
    )
    train_from_config(config).close()
    return folder / "run" / "policies" / "default"


class Server:
    """SkyRL with its JAX backend, serving ``base``, as ``uv run -m skyrl.tinker.api`` starts it."""

    def __init__(self, base: Path, folder: Path, port: int | None = None) -> None:
        self.base, self.folder, self.port = base, folder, port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def start(self) -> None:
        folder = Path(sys.executable).parent
        environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(folder.parent),
            "PYTHONPATH": str(MODULES),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(CACHE),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            # What runs once need not run fast.
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
            "HF_HUB_OFFLINE": "1",
            "UV_OFFLINE": "1",
        }
        # Few shapes, so that little is compiled: fixed numbers of rows in a pass.
        backend = {
            "max_lora_adapters": 12,
            "max_lora_rank": 8,
            "train_micro_batch_size": 1,
            "sample_max_num_sequences": 32,
        }
        command = [
            "uv", "run", "--no-project", "--active", "-m", "skyrl.tinker.api", "--base-model", str(self.base),
            "--backend", "jax", "--backend-config", json.dumps(backend), "--host", "127.0.0.1",
            "--port", str(self.port),
            "--checkpoints-base", str(self.folder / "checkpoints"),
            "--database-url", f"sqlite:///{self.folder / 'tinker.db'}",
        ]  # fmt: skip
        self._log = (self.folder / "server.log").open("a")
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + 180
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the server did not start: {(self.folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=2):
                return True
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
