"""Builds the client that a run samples with: of the cluster's engines, or by the name in ``rollout.client``."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from turnwise.cluster.members import FOLDER, Members, members_file
from turnwise.inference import (
    Endpoint,
    PoolClient,
    RoutingClient,
    TransformersClient,
    VLLMClient,
    VLLMProcessClient,
    VLLMServerClient,
)
from turnwise.inference.pool.follower import Follower
from turnwise.inference.server.client import transfer_to
from turnwise.inference.server.routed import RoutedPool
from turnwise.inference.server.server import is_well
from turnwise.inference.vllm.build import check_engine_args, vllm_or_raise
from turnwise.inference.weights.sync import SharedTransfer
from turnwise.run.tinker.checks import check_server
from turnwise.train.config.cluster import EnginesConfig
from turnwise.train.config.sampling import ServerConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import find_device
from turnwise.types import InferenceClient, ModelError
from turnwise.utils.shared_names import KEY_VARIABLE

PROCESS_TIMEOUT = 600.0
"""Seconds after which an engine in a child process counts as dead, if ``request_timeout`` is unset."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of client. ``check`` tests that it can be built; ``build`` builds it for models and their tokenizer."""

    check: Callable[[TrainConfig], None]
    build: Callable[[TrainConfig, Any, Mapping[str, nn.Module]], InferenceClient]


def check_client(config: TrainConfig) -> None:
    """Raise ``ImportError`` if the client's package is missing, and ``ConfigError`` for settings that it can't use."""
    if not config.cluster.has_engines:
        KINDS[config.rollout.client].check(config)
        return
    cluster, router = config.cluster, config.rollout.server.router
    _pools(config, config.policies)
    if router is not None and len(cluster.engines) > 1:
        raise ConfigError(
            f"config key 'rollout.server.router' = {router!r}: expected one pool, got {[*cluster.engines]}"
        )
    batched = [name for name, pool in cluster.engines.items() if not _is_exact(pool)]
    if config.loop.deterministic and batched:
        raise ConfigError(
            f"config key 'loop.deterministic' = True: answers of the engines {batched[0]!r} depend on their batch; use "
            "engine = 'transformers' with options.max_batch_rows = 1"
        )


def build_client(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    """Build the client for ``models``, given by policy. It has its own weights, which the trainer keeps up to date.

    Raises ``ConfigError`` if it can't serve them.
    """
    build = _cluster if config.cluster.has_engines else KINDS[config.rollout.client].build
    return build(config, tokenizer, models)


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
    if config.rollout.server.router is not None and len(groups) > 1:
        raise ConfigError(
            f"config key 'rollout.server.router': expected one group of servers behind it, got {len(groups)}"
        )
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
    server = config.rollout.server
    if len(urls) > 1 or server.router is not None:
        # A pool asks another server at once, where a single one is waited for.
        engines = Engines(
            config, tokenizer, models, partial(_endpoint, server=server, patience=0.0), server.folder, urls
        )
        return engines.pool({url: engines.connect(url) for url in urls}, server.dead_after)
    how: dict[str, Any] = {"in_flight": config.loop.in_flight_updates, "folder": server.folder, "seed": config.seed}
    return VLLMServerClient(_endpoint(urls[0], server), tokenizer, models, transfer=server.transfer, **how)


# -- pools of engines --------------------------------------------------------------------------------------------------
class Engines:
    """Connects to the engines of one pool, which get the same weights by one transfer. ``folder`` may hold them.

    ``others`` are addresses of engines that may connect later.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Any,
        models: Mapping[str, nn.Module],
        endpoint: Callable[[str], Endpoint],
        folder: str | None,
        others: Sequence[str] = (),
    ) -> None:
        self._others = others
        self._config, self._tokenizer, self._models = config, tokenizer, models
        self._endpoint, self._folder = endpoint, folder
        self._suffix = secrets.token_hex(4)  # all engines name adapters alike, as a router may choose any
        self._transfer: SharedTransfer | None = None

    def connect(self, url: str) -> VLLMServerClient:
        """Make the client of the engine at ``url``."""
        endpoint, name = self._endpoint(url), self._config.rollout.server.transfer
        joins = self._transfer is not None
        if self._transfer is None or self._transfer.closed:  # also if all engines had left
            as_files = name == "safetensors" or self._config.rollout.server.folder is not None
            files = self._folder if as_files else None  # adapters are files in any case
            self._transfer = SharedTransfer(transfer_to([url, *self._others], name, files))
        return VLLMServerClient(
            endpoint,
            self._tokenizer,
            self._models,
            in_flight=self._config.loop.in_flight_updates,
            folder=self._folder,
            transfer=self._transfer.lend(joins),
            suffix=self._suffix,
            seed=self._config.seed,
        )

    def pool(self, engines: Mapping[str, VLLMServerClient], dead_after: float) -> PoolClient:
        """Make the pool of ``engines``, or the one behind the router of ``rollout.server``."""
        server, seed = self._config.rollout.server, self._config.seed
        how: dict[str, Any] = {
            "timeout": server.timeout,
            "dead_after": dead_after,
            "wait": server.timeout,
            "seed": seed,
        }
        if server.router is None:
            return PoolClient(engines, **how)
        through = self._endpoint(server.router)
        through.patience = server.timeout  # there is no other one to ask
        return RoutedPool(through, engines, **how)


def _cluster(config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module]) -> InferenceClient:
    """Build the clients of the cluster's pools, which follow the members of the run.

    Raises ``ModelError`` if no engine of a pool is well within ``cluster.wait`` seconds.
    """
    clients: dict[str, InferenceClient] = {}
    deadline = time.monotonic() + config.cluster.wait
    for pool, names in _pools(config, models).items():
        try:
            client = _followed(pool, config, tokenizer, {name: models[name] for name in names}, deadline)
        except ValueError as error:
            raise ConfigError(f"config key 'cluster.engines.{pool}': {error}") from error
        clients |= dict.fromkeys(names, client)
    distinct = {id(client) for client in clients.values()}
    return next(iter(clients.values())) if len(distinct) == 1 else RoutingClient(clients)


def _followed(
    pool: str, config: TrainConfig, tokenizer: Any, models: Mapping[str, nn.Module], deadline: float
) -> PoolClient:
    """Build the client of a pool from its first engine that is well. The others join as the run's members say."""
    cluster, server = config.cluster, config.rollout.server
    keyed = partial(Endpoint, api_key_env=KEY_VARIABLE, timeout=server.timeout, retries=server.retries, patience=0.0)
    # On other hosts, engines read adapters from the run's folder, which all of them see.
    here = cluster.backend == "ray" and cluster.address == "local"
    folder = server.folder or (None if here else str(config.run_dir / FOLDER / "weights"))
    engines = Engines(config, tokenizer, models, keyed, folder)
    read = partial(_members, config.run_dir, pool)
    while not (well := {name: url for name, url in read()[1].items() if is_well(url, 2.0)}):
        if time.monotonic() > deadline:
            raise ModelError(
                f"no engine of pool {pool!r} was well within cluster.wait = {cluster.wait:g} seconds; "
                f"{members_file(config.run_dir)} lists {dict(read()[1]) or 'none'}"
            )
        time.sleep(0.2)
    client = engines.pool({name: engines.connect(url) for name, url in well.items()}, cluster.faults.dead_after)
    Follower(client, read, engines.connect, well)
    return client


def _members(run_dir: Path, pool: str) -> tuple[int, Mapping[str, str]]:
    """Return the epoch of the run's members, -1 before the first one, and the addresses of a pool's engines by name."""
    try:
        members = Members.read(run_dir)
    except FileNotFoundError:
        return -1, {}
    return members.epoch, members.engines.get(pool, {})


def _pools(config: TrainConfig, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the policies of each of the cluster's pools. Raises ``ConfigError`` unless each policy is in one pool."""
    names, pools = list(names), config.cluster.engines
    served = {name: list(pool.policies) or names for name, pool in pools.items()}
    for name in {*names, *(policy for policies in served.values() for policy in policies)}:
        holders = [pool for pool, policies in served.items() if name in policies]
        if name not in names or len(holders) != 1:
            raise ConfigError(
                f"config key 'cluster.engines': policy {name!r} is in {' and '.join(map(repr, holders)) or 'none'}: "
                f"expected each policy of the run, which are {names}, in one pool"
            )
    return served


def _is_exact(pool: EnginesConfig) -> bool:
    """True if an answer of the pool's engines doesn't depend on its batch."""
    return pool.engine == "transformers" and pool.options.get("max_batch_rows") == 1


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
