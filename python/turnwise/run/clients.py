"""Builds the client that a run samples with, by the name in ``rollout.client``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from turnwise.inference import (
    Endpoint,
    RoutingClient,
    TransformersClient,
    VLLMClient,
    VLLMProcessClient,
    VLLMServerClient,
)
from turnwise.inference.vllm.build import check_engine_args, vllm_or_raise
from turnwise.train.config.sampling import ServerConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import find_device
from turnwise.types import InferenceClient, ModelError

PROCESS_TIMEOUT = 600.0
"""Seconds after which an engine in a child process counts as dead, if ``request_timeout`` is unset."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of client. ``check`` tests that it can be built; ``build`` builds it for models and their tokenizer."""

    check: Callable[[TrainConfig], None]
    build: Callable[[TrainConfig, Any, Mapping[str, nn.Module]], InferenceClient]


def check_client(config: TrainConfig) -> None:
    """Raise ``ImportError`` if the client's package is missing, and ``ConfigError`` for settings that it can't use."""
    KINDS[config.rollout.client].check(config)


def build_client(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    """Build the client for ``models``, given by policy. It has its own weights, which the trainer keeps up to date.

    Raises ``ConfigError`` if it can't serve them.
    """
    return KINDS[config.rollout.client].build(config, tokenizer, models)


def _transformers(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    how: dict[str, Any] = {"max_batch_rows": config.rollout.max_batch_rows, "in_flight": config.loop.in_flight_updates}
    return TransformersClient(models, tokenizer, device=find_device(config.device), **how)


def _check_vllm(config: TrainConfig) -> None:
    vllm_or_raise()
    try:
        check_engine_args(config.rollout.vllm.engine_args)
    except ValueError as error:
        raise ConfigError(f"config key 'rollout.vllm.engine_args': {error}") from error


def _vllm(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    return _with_engines(VLLMClient, config, tokenizer, models, timeout=config.rollout.vllm.request_timeout)


def _vllm_process(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    vllm = config.rollout.vllm
    kind = partial(VLLMProcessClient, transfer=vllm.transfer)
    return _with_engines(kind, config, tokenizer, models, timeout=vllm.request_timeout or PROCESS_TIMEOUT)


def _with_engines(
    kind: Callable[..., InferenceClient],
    config: TrainConfig,
    tokenizer: Any,
    models: Mapping[str, nn.Module],
    timeout: float | None,
) -> InferenceClient:
    rollout = config.rollout
    try:
        return kind(
            models,
            tokenizer,
            max_num_seqs=rollout.max_batch_rows,
            kv_cache_bytes=int(rollout.vllm.kv_cache_gb * 2**30),
            in_flight=config.loop.in_flight_updates,
            timeout=timeout,
            engine_args=rollout.vllm.engine_args,
        )
    except ValueError as error:
        raise ConfigError(f"config key 'rollout.client' = {rollout.client!r}: {error}") from error


def _endpoint(url: str, server: ServerConfig) -> Endpoint:
    keys: dict[str, Any] = {"api_key_env": server.api_key_env, "api_key_file": server.api_key_file}
    return Endpoint(url, **keys, timeout=server.timeout, retries=server.retries, wait=server.wait)


def _check_server(config: TrainConfig) -> None:
    server = config.rollout.server
    try:
        for url in {server.url} if isinstance(server.url, str) else set(server.url.values()):
            endpoint = _endpoint(url, server)
            try:
                endpoint.thread.submit(endpoint.wait_until_healthy()).result()
            finally:
                endpoint.close()
    except (ValueError, OSError, ModelError) as error:
        raise ConfigError(f"config key 'rollout.server': {error}") from error


def _server(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    server = config.rollout.server
    urls = dict.fromkeys(models, server.url) if isinstance(server.url, str) else server.url
    if urls.keys() != models.keys():
        raise ConfigError(f"config key 'rollout.server.url' = {server.url!r}: expected one for each of {list(models)}")
    # One client per server, with the models that the server has.
    clients: dict[str, InferenceClient] = {}
    for url in dict.fromkeys(urls.values()):
        mine = {name: model for name, model in models.items() if urls[name] == url}
        endpoint = _endpoint(url, server)
        try:
            client = VLLMServerClient(
                endpoint,
                tokenizer,
                mine,
                in_flight=config.loop.in_flight_updates,
                folder=server.folder,
                transfer=server.transfer,
                seed=config.seed,
            )
        except ValueError as error:
            raise ConfigError(f"config key 'rollout.server' of {url}: {error}") from error
        clients |= dict.fromkeys(mine, client)
    return next(iter(clients.values())) if len(set(urls.values())) == 1 else RoutingClient(clients)


KINDS: dict[str, Kind] = {
    "transformers": Kind(lambda config: None, _transformers),
    "vllm": Kind(_check_vllm, _vllm),
    "vllm-process": Kind(_check_vllm, _vllm_process),
    "vllm-server": Kind(_check_server, _server),
}
"""Clients by the values of ``rollout.client``."""
