"""Engines without vLLM, and what tests do to them: kill, stop, and falsify weights.

``python engine_server.py SETTINGS`` is the server of ``turnwise serve --engine transformers``, except that SIGUSR1 lets
one bit of all weights that arrive from then on be another.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from turnwise.inference.common.http import Endpoint
from turnwise.inference.server.launch import HOSTS, KEY
from turnwise.inference.server.settings import ServeSettings, server_command
from turnwise.utils.processes import end_group

KEY_VARIABLE = "TURNWISE_TEST_ENGINE_KEY"
"""The variable of this process with the engines' key."""


class EngineServers:
    """``count`` transformers engines of the model in ``folder``, each at one of ``urls`` for good.

    Each row is computed alone, so an answer doesn't depend on its batch. ``settings`` are further ones of
    :class:`ServeSettings`.
    """

    def __init__(self, folder: Path, count: int = 2, **settings: Any) -> None:
        self.settings = {"model": str(folder), "engine": "transformers", "max_batch_size": 1, **settings}
        self.ports = [free_port() for _ in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes: list[Any] = [None] * count
        os.environ.setdefault(KEY_VARIABLE, "sesame")

    def start(self, *engines: int) -> None:
        """Start these engines (all, unless some are named), and return once they answer."""
        chosen = engines or range(len(self.urls))
        for engine in chosen:
            *_, options = server_command(ServeSettings(**self.settings), self.ports[engine])
            self.processes[engine] = subprocess.Popen(
                [sys.executable, "-P", __file__, options],
                stdin=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", KEY: os.environ[KEY_VARIABLE], HOSTS: ""},
                start_new_session=True,
            )
        for engine in chosen:
            while not self.is_well(engine):
                assert self.processes[engine].poll() is None, "the engine ended before it answered"
                time.sleep(0.02)

    def is_well(self, engine: int) -> bool:
        try:
            with urllib.request.urlopen(f"{self.urls[engine]}/health", timeout=5):
                return True
        except OSError:
            return False

    def endpoint(self, engine: int, **settings: Any) -> Endpoint:
        """An endpoint with the engines' key. ``settings`` are arguments of :class:`Endpoint`."""
        return Endpoint(self.urls[engine], api_key_env=KEY_VARIABLE, **settings)

    def label(self, engine: int) -> str:
        """The label of the weights that the engine has."""
        endpoint = self.endpoint(engine)
        try:
            return endpoint.thread.submit(endpoint.ask("GET", "/weight_info")).result()["weight_version"]
        finally:
            endpoint.close()

    def kill(self, engine: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.processes[engine].send_signal(how)
        if how == signal.SIGKILL:
            self.processes[engine].wait()

    def flip(self, engine: int) -> None:
        """Let one bit of all weights that arrive from now on be another."""
        self.kill(engine, signal.SIGUSR1)
        time.sleep(0.1)  # a signal takes a moment

    def __enter__(self) -> EngineServers:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if process is not None and process.returncode is None:
                end_group(process, patience=0.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def engine_here(model: Any, **settings: Any) -> Iterator[tuple[Endpoint, Any]]:
    """Serve ``model`` from a thread of this process: an endpoint with the key, and the engine behind it."""
    from turnwise.inference.common.http import LoopThread
    from turnwise.inference.transformers_server.engine import TransformersEngine
    from turnwise.inference.transformers_server.launch import start
    from turnwise.inference.transformers_server.routes import Routes

    os.environ.setdefault(KEY_VARIABLE, "sesame")
    engine, port, thread = TransformersEngine(model, "tiny", **settings), free_port(), LoopThread("engine")

    with patch.dict(os.environ, {KEY: os.environ[KEY_VARIABLE], HOSTS: ""}):
        runner = thread.submit(start(Routes(engine), "127.0.0.1", port)).result()
    thread.at_end += [engine.go_on, runner.cleanup]
    endpoint = Endpoint(f"http://127.0.0.1:{port}", api_key_env=KEY_VARIABLE, timeout=30.0)
    try:
        yield endpoint, engine
    finally:
        endpoint.close()
        thread.stop()


# -- in the engine's process -------------------------------------------------------------------------------------------
def flip(*signal_and_frame: Any) -> None:
    from turnwise.inference.weights import sync

    def flip_in(opened: Any) -> Any:
        @contextmanager
        def flipped(handle: Any) -> Iterator[Any]:
            with opened(handle) as weights:
                next(iter(weights.values())).view(-1)[:1].view(dtype=sync.torch.uint8)[0] ^= 1
                yield weights

        return flipped

    sync._OPENERS.update({kind: flip_in(opened) for kind, opened in sync._OPENERS.items()})


if __name__ == "__main__":
    from turnwise.inference.transformers_server.launch import main

    signal.signal(signal.SIGUSR1, flip)
    main()
