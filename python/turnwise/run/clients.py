"""Builds the client that a run samples with: of the cluster's engines, or by the name in ``rollout.client``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from turnwise.chat.tokenizers import own_copies
from turnwise.cluster.members import FOLDER, Members, members_file
from turnwise.inference import (
    Endpoint,
    PoolClient,
    RoutingClient,
    TransformersClient,
    VLLMClient,
    VLLMServerClient,
)
from turnwise.inference.pool.follower import Follower
from turnwise.inference.server.server import ServerFailed, is_healthy
from turnwise.inference.server.settings import NO_EXPERTS_ON_CPU
from turnwise.inference.vllm.worker import computes_on_cpu, vllm_or_raise
from turnwise.inference.weights.shared_transfer import SharedTransfer
from turnwise.inference.weights.sync import transfer_to
from turnwise.run.tinker import check_server
from turnwise.train.config.features import required, required_options
from turnwise.train.config.sampling import ServerConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, told_by_key
from turnwise.train.model.loading import find_device
from turnwise.types import InferenceClient, ModelError, Tokenizers
from turnwise.utils.files import KEY_VARIABLE, check_no_links
from turnwise.utils.values import problem

LOGS = "servers"
"""Folder of the logs of the servers that a run starts, inside the run folder."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of client. ``check`` tests that it can be built; ``build`` builds it for models and their tokenizers."""

    check: Callable[[TrainConfig], None]
    build: Callable[[TrainConfig, Tokenizers, Mapping[str, nn.Module]], InferenceClient]


def check_client(config: TrainConfig) -> None:
    """Raise ``ImportError`` if the client's package is missing, and ``ConfigError`` for settings that it can't use."""
    if not config.cluster.has_engines:
        KINDS[config.rollout.client].check(config)


def build_client(config: TrainConfig, tokenizer: Tokenizers, models: Mapping[str, nn.Module]) -> InferenceClient:
    """Build the client for ``models``, given by policy. The trainer keeps its weights up to date.

    The embedded client uses the memory of the trainer's weights, unless it samples while they train. Raises
    ``ConfigError`` if it can't serve them.
    """
    build = _cluster if config.cluster.has_engines else KINDS[config.rollout.client].build
    return build(config, tokenizer, models)


def _transformers(config: TrainConfig, tokenizer: Tokenizers, models: Mapping[str, nn.Module]) -> InferenceClient:
    # Past policies of a league begin as the live model itself, and then hold other weights.
    live = [name for name in models if name in config.policies] if config.loop.max_staleness == 0 else []
    with told_by_key("rollout.client", "transformers"):
        return TransformersClient(
            models,
            tokenizer,
            live=live,
            device=find_device(config.device),
            max_batch_rows=config.rollout.max_batch_rows,
            in_flight=config.loop.in_flight_updates,
            **required_options(config),
        )


def _check_vllm(config: TrainConfig) -> None:
    """Wait until one server of each group is healthy; its others may start later. Without servers, look for vLLM."""
    server = config.rollout.server
    if server.url is None:
        check_no_links(config.run_dir, config.run_dir / LOGS)  # someone else may have made the folder
        vllm_or_raise()
        if (asked := required(config).get("routed_experts")) is not None and computes_on_cpu():
            raise ConfigError(problem(asked, f"expected false, as {NO_EXPERTS_ON_CPU}", True))
        return
    for urls in server.groups(["default"]):
        with told_by_key("rollout.server", errors=(ValueError, OSError)):
            for url in urls:
                _endpoint(url, server).close()
        if not _await_first({url: url for url in urls}.copy, server.wait):
            hint = f", for {server.wait:g} seconds" if server.wait else "; is it started, and is this its address?"
            raise ConfigError(problem("rollout.server", f"{' and '.join(urls)} can't be reached{hint}"))


def _await_first(read: Callable[[], Mapping[str, str]], seconds: float) -> dict[str, str]:
    """Wait until an engine is healthy, up to ``seconds``; return the addresses of all healthy engines by name."""
    deadline = time.monotonic() + seconds
    while not (well := {name: url for name, url in read().items() if is_healthy(url, 2.0)}):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return well


def _vllm(config: TrainConfig, tokenizer: Tokenizers, models: Mapping[str, nn.Module]) -> InferenceClient:
    if config.rollout.server.url is not None:
        return _servers(config, tokenizer, models)
    rollout, server = config.rollout, config.rollout.server
    with told_by_key("rollout.client", rollout.client, (ValueError, ServerFailed)):
        return VLLMClient(
            models,
            tokenizer,
            max_num_seqs=rollout.max_batch_rows,
            kv_cache_gb=rollout.vllm.kv_cache_gb,
            in_flight=config.loop.in_flight_updates,
            timeout=server.timeout,
            dead_after=server.dead_after,
            attempts=server.retries + 1,
            transfer=server.transfer,
            engine_args=rollout.vllm.engine_args,
            grammars=config.gateway.get("structured") == "constrained",
            logs=config.run_dir / LOGS,
            seed=config.seed,
            **required_options(config),
        )


def _endpoint(url: str, server: ServerConfig) -> Endpoint:
    keys: dict[str, Any] = {"api_key_env": server.api_key_env, "api_key_file": server.api_key_file}
    return Endpoint(url, **keys, timeout=server.timeout)


def _servers(config: TrainConfig, tokenizer: Tokenizers, models: Mapping[str, nn.Module]) -> InferenceClient:
    groups = config.rollout.server.groups(models)
    # One client per group of servers, with the models that these have.
    clients: dict[str, InferenceClient] = {}
    for urls, names in groups.items():
        with told_by_key("rollout.server", list(urls)):
            client = _group(urls, config, tokenizer, {name: models[name] for name in names})
        clients |= dict.fromkeys(names, client)
    return next(iter(clients.values())) if len(groups) == 1 else RoutingClient(clients)


def _group(
    urls: Sequence[str], config: TrainConfig, tokenizer: Tokenizers, models: Mapping[str, nn.Module]
) -> PoolClient:
    """Build the client of the servers at ``urls``."""
    server = config.rollout.server
    endpoint, alone = partial(_endpoint, server=server), len(urls) == 1
    engines = Engines(config, tokenizer, models, endpoint, server.folder, urls, alone)
    return engines.pool({url: engines.connect(url) for url in urls}, server.dead_after)


# -- pools of engines --------------------------------------------------------------------------------------------------
class Engines:
    """Connects to the engines of one pool, which get the same weights by one transfer.

    ``folder`` is where transfers through files write them.
    ``others`` are addresses of engines that may connect later. An engine that stays ``alone`` takes weights from the
    trainer's own tensors; else the pool copies them, and its engines share a transfer that recognizes equal tensors.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Tokenizers,
        models: Mapping[str, nn.Module],
        endpoint: Callable[[str], Endpoint],
        folder: str | None,
        others: Sequence[str] = (),
        alone: bool = False,
    ) -> None:
        self._others, self._alone = others, alone
        self._config, self._tokenizers, self._models = config, own_copies(tokenizer), models
        self._endpoint, self._folder = endpoint, folder
        self._transfer: SharedTransfer | None = None

    def connect(self, url: str) -> VLLMServerClient:
        """Make the client of the engine at ``url``."""
        endpoint, name = self._endpoint(url), self._config.rollout.server.transfer
        joins = self._transfer is not None
        as_files = name == "safetensors" or self._config.rollout.server.folder is not None
        files = self._folder if as_files else None  # adapters are files in any case
        if not self._alone and (self._transfer is None or self._transfer.closed):  # also if all engines had left
            self._transfer = SharedTransfer(transfer_to([url, *self._others], name, files))
        shared = self._transfer
        return VLLMServerClient(
            endpoint,
            self._tokenizers,
            self._models,
            in_flight=self._config.loop.in_flight_updates,
            folder=self._folder,
            transfer=transfer_to([url], name, files) if shared is None else shared.lend(joins),
            seed=self._config.seed,
            **required_options(self._config),
        )

    def pool(self, engines: Mapping[str, VLLMServerClient], dead_after: float) -> PoolClient:
        """Make the pool of ``engines``."""
        server = self._config.rollout.server
        return PoolClient(
            engines,
            timeout=server.timeout,
            dead_after=dead_after,
            wait=server.timeout,
            attempts=server.retries + 1,
            keeps_weights=not self._alone,
            seed=self._config.seed,
        )


def _cluster(config: TrainConfig, tokenizer: Tokenizers, models: Mapping[str, nn.Module]) -> InferenceClient:
    """Build the clients of the cluster's pools, which follow the members of the run.

    Raises ``ModelError`` if no engine of a pool is healthy within ``cluster.wait`` seconds.
    """
    clients: dict[str, InferenceClient] = {}
    deadline = time.monotonic() + config.cluster.wait
    for pool, names in config.cluster.pools(models).items():
        with told_by_key(f"cluster.engines.{pool}"):
            client = _followed(pool, config, tokenizer, {name: models[name] for name in names}, deadline)
        clients |= dict.fromkeys(names, client)
    distinct = {id(client) for client in clients.values()}
    return next(iter(clients.values())) if len(distinct) == 1 else RoutingClient(clients)


def _followed(
    pool: str, config: TrainConfig, tokenizer: Tokenizers, models: Mapping[str, nn.Module], deadline: float
) -> PoolClient:
    """Build the client of a pool from its first healthy engine. The others join when the run's members list them."""
    cluster, server = config.cluster, config.rollout.server
    keyed = partial(Endpoint, api_key_env=KEY_VARIABLE, timeout=server.timeout)
    # On other hosts, engines read adapters from the run's folder, which all of them see.
    here = cluster.backend == "ray" and cluster.address == "local"
    folder = server.folder or (None if here else str(config.run_dir / FOLDER / "weights"))
    engines = Engines(config, tokenizer, models, keyed, folder)
    read = partial(_members, config.run_dir, pool)
    if not (well := _await_first(lambda: read()[1], deadline - time.monotonic())):
        raise ModelError(
            f"no engine of pool {pool!r} was healthy within cluster.wait = {cluster.wait:g} seconds; "
            f"{members_file(config.run_dir)} lists {dict(read()[1]) or 'none'}"
        )
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


def _reject_models(config: TrainConfig, tokenizer: Tokenizers, models: Mapping[str, nn.Module]) -> InferenceClient:
    raise ConfigError(problem("rollout.client", "expected learner.type = 'tinker': it samples no models", "tinker"))


KINDS: dict[str, Kind] = {
    "transformers": Kind(lambda config: None, _transformers),
    "vllm": Kind(_check_vllm, _vllm),
    "tinker": Kind(check_server, _reject_models),
}
"""Clients by the values of ``rollout.client``."""
