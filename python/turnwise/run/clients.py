"""Builds the client that a run samples with, by the name in ``rollout.client``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from turnwise.inference import (
    Endpoint,
    PoolClient,
    RoutingClient,
    TransformersClient,
    VLLMClient,
    VLLMProcessClient,
    VLLMServerClient,
)
from turnwise.inference.server.client import transfer_to
from turnwise.inference.vllm.build import check_engine_args, vllm_or_raise
from turnwise.inference.weights.sync import SharedTransfer
from turnwise.run.tinker.checks import check_server
from turnwise.train.config.sampling import ServerConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import find_device
from turnwise.types import InferenceClient

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


def _addresses(config: TrainConfig, names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Return the policies that each group of servers has. Servers of one group share the requests.

    Raises ``ConfigError`` if a server is in two groups.
    """
    given = config.rollout.server.url
    by_policy = given if isinstance(given, dict) else dict.fromkeys(names, given)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, urls in by_policy.items():
        groups.setdefault((urls,) if isinstance(urls, str) else tuple(urls), []).append(name)
    repeated = [url for url, count in Counter(url for urls in groups for url in urls).items() if count > 1]
    if repeated:
        raise ConfigError(
            f"config key 'rollout.server.url' = {given!r}: expected each server once, or in equal lists of several "
            f"policies, got {repeated[0]!r} again"
        )
    return groups


def _endpoint(url: str, server: ServerConfig, **how: Any) -> Endpoint:
    keys: dict[str, Any] = {"api_key_env": server.api_key_env, "api_key_file": server.api_key_file}
    return Endpoint(url, **keys, timeout=server.timeout, retries=server.retries, wait=server.wait, **how)


def _check_server(config: TrainConfig) -> None:
    """Wait until one server of each group is well. The others of a group may come later."""
    server = config.rollout.server
    for urls in _addresses(config, ["default"]):
        try:
            endpoints = [_endpoint(url, server) for url in urls]
        except (ValueError, OSError) as error:
            raise ConfigError(f"config key 'rollout.server': {error}") from error
        waiting = [endpoint.thread.submit(endpoint.wait_until_healthy()) for endpoint in endpoints]
        errors = [future.exception() for future in waiting]
        for endpoint in endpoints:
            endpoint.close()
        if all(errors):
            raise ConfigError(f"config key 'rollout.server': {errors[0]}") from errors[0]


def _server(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    groups, url = _addresses(config, models), config.rollout.server.url
    if {name for names in groups.values() for name in names} != models.keys():
        raise ConfigError(f"config key 'rollout.server.url' = {url!r}: expected one for each of {list(models)}")
    # One client per group of servers, with the models that these have.
    clients: dict[str, InferenceClient] = {}
    for urls, names in groups.items():
        try:
            client = _group(urls, config, tokenizer, {name: models[name] for name in names})
        except ValueError as error:
            raise ConfigError(f"config key 'rollout.server' of {', '.join(urls)}: {error}") from error
        clients |= dict.fromkeys(names, client)
    return next(iter(clients.values())) if len(groups) == 1 else RoutingClient(clients)


def _group(
    urls: Sequence[str], config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]
) -> VLLMServerClient | PoolClient:
    """Build the client of one server, or of a pool of several."""
    server, several = config.rollout.server, len(urls) > 1
    how: dict[str, Any] = {"in_flight": config.loop.in_flight_updates, "folder": server.folder, "seed": config.seed}
    # A pool asks another server at once, where a single one is waited for.
    endpoints = {url: _endpoint(url, server, **({"patience": 0.0} if several else {})) for url in urls}
    if not several:
        return VLLMServerClient(endpoints[urls[0]], tokenizer, models, transfer=server.transfer, **how)
    shared = SharedTransfer(transfer_to([*endpoints.values()], server.transfer, server.folder))
    engines = {
        url: VLLMServerClient(endpoint, tokenizer, models, transfer=shared.lend(), **how)
        for url, endpoint in endpoints.items()
    }
    return PoolClient(
        engines, timeout=server.timeout, dead_after=server.dead_after, wait=server.timeout, seed=config.seed
    )


def _refuse_models(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    raise ConfigError("config key 'rollout.client' = 'tinker': expected learner.type = 'tinker': it samples no models")


KINDS: dict[str, Kind] = {
    "transformers": Kind(lambda config: None, _transformers),
    "vllm": Kind(_check_vllm, _vllm),
    "vllm-process": Kind(_check_vllm, _vllm_process),
    "vllm-server": Kind(_check_server, _server),
    "tinker": Kind(check_server, _refuse_models),
}
"""Clients by the values of ``rollout.client``."""
