"""An engine in a process of its own without vLLM: a TransformersClient behind the routes of ``turnwise serve``.

``python engine_server.py FOLDER PORT`` serves the model and tokenizer in FOLDER until its standard input ends. Each row
is computed alone, so an answer doesn't depend on its batch. :class:`EngineServers` starts several and kills them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


class EngineServers:
    """``count`` engines of the model in ``folder``, each at one of ``urls`` for good."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.folder = folder
        self.ports = [_free_port() for _ in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes: list[Any] = [None] * count

    def start(self, *engines: int) -> None:
        """Start these engines (all, unless some are named), and return once they answer."""
        chosen = engines or range(len(self.urls))
        for engine in chosen:
            self.processes[engine] = subprocess.Popen(
                [sys.executable, "-P", __file__, str(self.folder), str(self.ports[engine])],
                stdin=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
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

    def kill(self, engine: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.processes[engine].send_signal(how)
        if how == signal.SIGKILL:
            self.processes[engine].wait()

    def flip(self, engine: int) -> None:
        """Let one bit of all weights that arrive from now on be another."""
        urllib.request.urlopen(f"{self.urls[engine]}/flip", timeout=5).close()

    def __enter__(self) -> EngineServers:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        for engine, process in enumerate(self.processes):
            self.kill(engine)
            process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- in the engine's process -------------------------------------------------------------------------------------------
class Engine:
    """Answers requests as a vLLM server with turnwise's worker does. ``labels`` has the label of each reload."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from turnwise.inference import TransformersClient
        from turnwise.inference.common.http import LoopThread

        model = AutoModelForCausalLM.from_pretrained(folder)
        self.client = TransformersClient(model, AutoTokenizer.from_pretrained(folder), max_batch_rows=1)
        self.config = model.config
        self.labels, self.label = {0: "default"}, "default"
        self.thread = LoopThread("engine")

    def script(self) -> Any:
        from fake_server import Say

        models = {"data": [{"id": "tiny", "max_model_len": self.config.max_position_embeddings}]}
        return {
            "/health": Say({}),
            "/v1/models": Say(models),
            "/weight_info": lambda body: Say({"weight_version": self.label}),
            "/update_weight_version": self.set_label,
            "/collective_rpc": self.call,
            "/pause": lambda body: self.run(self.client.pause()) or Say({}),
            "/resume": lambda body: self.run(self.client.resume()) or Say({}),
            "/reset_prefix_cache": Say({"success": True}),
            "/inference/v1/generate": self.generate,
            "/flip": self.flip,
        }

    def run(self, work: Any) -> Any:
        return self.thread.submit(work).result()

    def set_label(self, body: Any) -> Any:
        from fake_server import Say

        self.label = body["new_version"]
        self.labels[self.client.version("default")] = self.label
        return Say({"success": True})

    def call(self, body: Any) -> Any:
        from fake_server import Say

        from turnwise.inference.weights.sync import TransferError, open_weights

        if body["method"] == "turnwise_describe":
            model = {"vocabulary": self.config.vocab_size, "dtype": "float32", "model": {}, "adapters": []}
            return Say({"results": [model]})
        try:
            with open_weights(body["args"][0]) as weights:
                self.client.load_weights("default", weights.items(), len(self.labels))
        except TransferError as error:
            return Say({"error": {"message": str(error)}}, 500)
        return Say({"results": [None]})

    def flip(self, body: Any) -> Any:
        from contextlib import contextmanager

        from fake_server import Say

        from turnwise.inference.weights import sync

        def flip_in(opened: Any) -> Any:
            @contextmanager
            def flipped(handle: Any) -> Any:
                with opened(handle) as weights:
                    next(iter(weights.values())).view(-1)[:1].view(dtype=sync.torch.uint8)[0] ^= 1
                    yield weights

            return flipped

        sync._OPENERS.update({kind: flip_in(opened) for kind, opened in sync._OPENERS.items()})
        return Say({})

    def generate(self, body: Any) -> Any:
        from fake_server import Say

        from turnwise.types import ModelRequest, Sampling

        asked = body["sampling_params"]
        sampling = Sampling(
            temperature=asked["temperature"],
            max_tokens=asked["max_tokens"],
            stop_token_ids=tuple(asked["stop_token_ids"]),
            seed=asked["seed"],
        )
        [response] = self.run(self.client.generate([ModelRequest(body["token_ids"], sampling)]))
        ids = response.completion_token_ids
        content = [
            {"token_id": token, "logprob": logprob} for token, logprob in zip(ids, response.logprobs, strict=True)
        ]
        [(_, version)] = response.policy_versions
        choice = {
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": response.finish_reason,
            "weight_versions": [{"start": 0, "end": len(ids), "version": self.labels[version]}],
        }
        return Say({"choices": [choice]})


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from fake_server import FakeServer

    torch.set_num_threads(1)
    server = FakeServer(Engine(sys.argv[1]).script(), int(sys.argv[2]))
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
