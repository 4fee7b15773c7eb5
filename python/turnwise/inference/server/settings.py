"""Settings of a served model, and the command that starts its server: vLLM's, or that of the transformers engine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turnwise.inference.common.http import aiohttp_or_raise, key_from_environment
from turnwise.inference.common.model_files import read_config
from turnwise.inference.server.answers import TIES
from turnwise.inference.vllm.worker import computes_on_cpu
from turnwise.types.model_calls import MAX_TOP_K

RESERVED = {
    "api_key", "async_scheduling", "enable_lora", "enable_prompt_tokens_details", "enable_scale_out",
    "generation_config", "host", "kv_cache_memory_bytes", "logprobs_mode", "lora_modules", "max_logprobs",
    "max_lora_rank", "max_loras", "max_num_seqs", "middleware", "model", "port", "worker_extension_cls",
}  # fmt: skip
"""Options of vLLM's server that :class:`ServeSettings` decides."""

OF_ENGINE: dict[str, dict[str, Any]] = {
    "vllm": {"kv_cache_gb": 1.0},
    "transformers": {},
}
"""Settings that only one of the engines takes, and their defaults."""

BATCH_SIZES = {"vllm": 256, "transformers": 512}
"""The default of ``max_batch_size`` for each engine."""

RETURN_EXPERTS = "enable_return_routed_experts"
"""Name in ``engine_args``: answers have the experts that a mixture of experts chose."""

TRANSFORMERS_ARGS = ("device", "dtype", RETURN_EXPERTS)
"""Names in ``engine_args`` that the transformers engine takes."""

NO_EXPERTS_ON_CPU = (
    "vLLM's CPU build can't return the experts that a mixture chose: that needs its Model Runner V2, which needs a "
    "Triton that this build lacks. Sample with the transformers engine, or on a GPU"
)

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of an engine's adapters that vLLM accepts."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of a served model. Raises ``ValueError`` for settings that can't be served.

    Example: ``ServeSettings("Qwen/Qwen3-0.6B", kv_cache_gb=4, engine_args={"max_model_len": 4096})``
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port."""

    api_key_env: str | None = None
    """Environment variable with the key that every route except ``/health`` needs. Without it the server makes a key,
    and writes it to a file that only its user can read."""

    allowed_hosts: Sequence[str] = ()
    """Names that clients may use, in addition to addresses, ``localhost``, ``host`` and this machine's name."""

    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    """Names and folders of LoRA adapters to serve from the start."""

    adapter_slots: int = 0
    """Further adapters, of rank up to ``adapter_rank``, that clients can load."""

    adapter_rank: int = 16
    engine: Literal["vllm", "transformers"] = "vllm"
    """The program that computes. The transformers engine needs only aiohttp as a further package."""

    dummy_weights: bool = False
    """Start with random weights, for a client that sends its own. ``model`` then needs no weights."""

    kv_cache_gb: float = 1.0
    max_batch_size: int | None = None
    """The most completions at the same time; by default that of the engine in :data:`BATCH_SIZES`. With 1 an answer of
    the transformers engine does not depend on its batch."""

    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further options of vLLM's server, such as ``dtype`` (by default the dtype of the model's files). The transformers
    engine takes ``dtype``, ``device`` and ``enable_return_routed_experts``."""

    restarts: int = 5
    """The most restarts in a row of a server that dies."""

    start_timeout: float = 600.0
    """Seconds that the server has to load its model."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port!r}: expected 0 to 65535")
        if self.engine not in OF_ENGINE:
            raise ValueError(f"engine={self.engine!r}: expected one of {', '.join(OF_ENGINE)}")
        for engine, only in OF_ENGINE.items():
            for name, default in only.items():
                if engine != self.engine and getattr(self, name) != default:
                    raise ValueError(f"{name}={getattr(self, name)!r}: expected engine={engine!r}, got {self.engine!r}")
        for name in ("kv_cache_gb", "max_batch_size", "start_timeout", "adapter_rank"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: expected more than 0")
        for name in ("restarts", "adapter_slots"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a count >= 0")
        if taken := sorted(RESERVED & {name.replace("-", "_") for name in self.engine_args}):
            raise ValueError(f"engine_args[{taken[0]!r}]: the server sets this one itself")
        if self.engine == "transformers" and (unknown := sorted(self.engine_args.keys() - {*TRANSFORMERS_ARGS})):
            raise ValueError(f"engine_args[{unknown[0]!r}]: expected one of {', '.join(TRANSFORMERS_ARGS)}")
        asked = {name.replace("-", "_"): value for name, value in self.engine_args.items()}
        if self.engine == "vllm" and asked.get(RETURN_EXPERTS) and computes_on_cpu():
            raise ValueError(f"engine_args[{RETURN_EXPERTS!r}]: expected False, as {NO_EXPERTS_ON_CPU}")
        for name, folder in self.adapters.items():
            if not (Path(folder) / "adapter_config.json").is_file():
                raise ValueError(f"adapters[{name!r}]={str(folder)!r}: expected a folder with adapter_config.json")
        if self.api_key_env is not None:
            key_from_environment(self.api_key_env)
        for name in self.allowed_hosts:
            if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
                raise ValueError(f"allowed_hosts: {name!r}: expected a host's name without a port, such as 'gpu1'")

    @property
    def batch_size(self) -> int:
        """The most completions at the same time."""
        return BATCH_SIZES[self.engine] if self.max_batch_size is None else self.max_batch_size


def server_command(settings: ServeSettings, port: int) -> list[str]:
    """The command that starts the server of ``settings``."""
    return COMMANDS[settings.engine](settings, port)


def _transformers_command(settings: ServeSettings, port: int) -> list[str]:
    aiohttp_or_raise()
    names = ("model", "host", "engine", "max_batch_size", "dummy_weights", "adapter_slots", "adapter_rank")
    given = {name: getattr(settings, name) for name in names}
    adapters = {name: str(folder) for name, folder in settings.adapters.items()}
    options = json.dumps({**given, "port": port, "adapters": adapters, "engine_args": dict(settings.engine_args)})
    return [sys.executable, "-P", "-m", "turnwise.inference.transformers_server.launch", options]


def _vllm_command(settings: ServeSettings, port: int) -> list[str]:
    """vLLM's server, with the options that turnwise's clients need."""
    from turnwise.inference.vllm.worker import EXTENSION

    dtype = settings.engine_args.get("dtype")
    if dtype is None:
        # By default, vLLM computes float32 models in half precision.
        dtype = getattr(read_config(settings.model).get_text_config(), "dtype", None)
    options: dict[str, Any] = {
        "model": settings.model,
        "host": settings.host,
        "port": port,
        "enable_scale_out": True,  # tokens in, tokens out
        "enable_prompt_tokens_details": True,  # hits of the prefix cache
        "generation_config": "vllm",  # the model folder's file would change sampling without the request's knowledge
        "logprobs_mode": "processed_logprobs",  # those of log_softmax(logits / temperature) over the kept tokens
        "max_logprobs": MAX_TOP_K + TIES,
        "async_scheduling": False,  # a token computed while weights change would belong to neither version
        "worker_extension_cls": EXTENSION,
        "kv_cache_memory_bytes": int(settings.kv_cache_gb * 2**30),
        "max_num_seqs": settings.batch_size,
        **({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}),
        **({"load_format": "dummy"} if settings.dummy_weights else {}),
        "disable_uvicorn_access_log": True,
        "middleware": "turnwise.inference.server.launch.RequestGate",
        **_lora_options(settings),
        **_latent_options(settings, dtype),
        **{name.replace("-", "_"): value for name, value in settings.engine_args.items()},
    }
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}")
    adapters = [f"{name}={folder}" for name, folder in settings.adapters.items()]
    words += ["--lora-modules", *adapters] if adapters else []
    return [sys.executable, "-P", "-m", "turnwise.inference.server.launch", *words]


COMMANDS: dict[str, Callable[[ServeSettings, int], list[str]]] = {
    "vllm": _vllm_command,
    "transformers": _transformers_command,
}
"""The command of each engine's server, for a port."""


def _latent_options(settings: ServeSettings, dtype: Any) -> dict[str, Any]:
    """Let vLLM's CPU build compute latent attention (DeepSeek-V3) as it should (vLLM 0.32).

    Queries rotate in PyTorch: the build's own kernel takes each token's heads for one row, so it rotates other numbers.
    On a CPU with AMX it prefers kernels that take bfloat16 alone, and ends with other weights.
    """
    if not computes_on_cpu():
        return {}
    if not hasattr(read_config(settings.model).get_text_config(), "kv_lora_rank"):
        return {}
    options: dict[str, Any] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    return options if str(dtype).endswith("bfloat16") else {**options, "attention_backend": "CPU_MLA"}


def _lora_options(settings: ServeSettings) -> dict[str, Any]:
    slots = len(settings.adapters) + settings.adapter_slots
    if not slots:
        return {}
    configs = [json.loads((Path(at) / "adapter_config.json").read_text()) for at in settings.adapters.values()]
    largest = max([config["r"] for config in configs] + ([settings.adapter_rank] if settings.adapter_slots else []))
    if largest > ADAPTER_RANKS[-1]:
        raise ValueError(f"lora.rank={largest}: expected at most {ADAPTER_RANKS[-1]}, which is what vLLM serves")
    served = next(rank for rank in ADAPTER_RANKS if rank >= largest)
    # vLLM's CPU kernels apply the adapter in the last slot to rows without an adapter, so that slot stays empty.
    return {"enable_lora": True, "max_loras": slots + 1, "max_lora_rank": served}
