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
from turnwise.train.validate import config_from_dict

KEY = "tml-no-server-here-checks-it"
MODULES = Path(__file__).parent / "modules"
CACHE = Path(__file__).parents[3] / ".cache" / "jax"
"""Compiled programs, which later runs of the tests find."""

SUDOKU = {"blanks": [3, 5], "quality": 0.6, "answers": 4}


def warm_base(folder: Path) -> Path:
    """Write a model after a supervised start on half-right demonstrations, without any reinforcement learning."""
    config = config_from_dict(
        {
            "task_options": SUDOKU,
            "run_dir": str(folder / "run"),
            "steps": 0,
            "threads": 1,
            "warm_start": {"steps": 160, "batch_size": 48, "lr": 2.5e-3, "held_out": 0},
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
        folder = Path(sys.executable).parent
        environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(folder.parent),
            "PYTHONPATH": str(MODULES),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(CACHE),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
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
                self.__exit__()
                raise RuntimeError(f"the server did not start: {(self.folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.5)
        return self

    def __exit__(self, *_: Any) -> None:
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
