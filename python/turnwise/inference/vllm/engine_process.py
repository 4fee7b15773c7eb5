"""Code that runs inside a vLLM engine's own process: its main module, and worker methods that load new weights.

Python's spawn method starts a process by importing the parent's main module. Here that may be any script, with or
without a guard around its work. Engines don't need it, and get this module instead. It first ties the process to its
parent's life, so heavy imports wait until a method needs them.

vLLM mixes :class:`WorkerExtension` into its own worker class for every engine that is started with
``worker_extension_cls = EXTENSION``, in any process.
"""

from __future__ import annotations

import ctypes
import multiprocessing.spawn
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

EXTENSION = "turnwise.inference.vllm.engine_process.WorkerExtension"

COMPARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip
"""Fields of a model's configuration that must be equal for sender and receiver of weights."""

PARENT = "TURNWISE_ENGINE_PARENT"
"""The environment variable with the process id of an engine's parent."""

_PROCESS_NAME = "EngineCore"  # vLLM's name for it
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def as_main_module() -> Iterator[None]:
    """Give engines that start inside ``with`` this module as their main module.

    Other processes that start meanwhile keep theirs. Only one thread may be inside at a time, so hold a lock.
    """
    plain = multiprocessing.spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = plain(name)
        if name.startswith(_PROCESS_NAME):
            data.pop("init_main_from_path", None)
            data["init_main_from_name"] = __name__
        return data

    os.environ[PARENT] = str(os.getpid())
    multiprocessing.spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = plain
        del os.environ[PARENT]


def follow_parent() -> None:
    """Let this process die when the thread that started it ends.

    The process leads a new process group, so Ctrl-C reaches only the parent. Processes that it starts join the group,
    so that all can be killed at once.
    """
    os.setpgrp()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        os._exit(1)  # the parent ended before the line above


class WorkerExtension:
    """Methods that ``collective_rpc`` finds on a worker."""

    def turnwise_reload(self, handle: Mapping[str, Any]) -> None:
        """Replace all weights by those of ``handle``, in one call between two steps. Drops the worker's adapters.

        Raises :class:`TransferError` if the weights are gone, incomplete or were overwritten meanwhile. After a failure
        the caller must not let the engine generate until a reload succeeds. The caller also clears the prefix cache.
        """
        from turnwise.inference.vllm.reload import reload_worker
        from turnwise.inference.weights.sync import open_weights

        with open_weights(handle) as weights:
            reload_worker(self, weights)

    def turnwise_describe(self) -> dict[str, Any]:
        """Describe the model: ``vocabulary``, ``dtype``, ``model`` (its fields of :data:`COMPARED` by name), and
        ``adapters`` (their numbers)."""
        config = self.model_config.hf_text_config  # type: ignore[attr-defined]
        return {
            "vocabulary": config.vocab_size,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),  # type: ignore[attr-defined]
            "model": {name: getattr(config, name) for name in COMPARED if hasattr(config, name)},
            "adapters": sorted(self.list_loras()) if self.model_runner.lora_config else [],  # type: ignore[attr-defined]
        }

    def turnwise_adapter(self, number: int, name: str, folder: str) -> None:
        """Replace adapter ``number`` by the files in ``folder``."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, number, folder, load_inplace=True)
        self.add_lora(request)  # type: ignore[attr-defined]


if __name__ == "__mp_main__":
    follow_parent()
