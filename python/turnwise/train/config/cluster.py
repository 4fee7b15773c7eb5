"""Sections of the machines: the cluster's processes, shards of the models, and the learner, here or on a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from turnwise.settings.section import Effects, RunFacts, Section, refused
from turnwise.train.config.policies import sharing
from turnwise.utils.values import problem


class RoleConfig(Section):
    """Processes of one kind, and what each of them takes."""

    cpus: float = Field(default=1.0, ge=0)
    """CPU cores of each process."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of each process."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further resources of each process, by the cluster's names for them."""


class LearnerRolesConfig(RoleConfig):
    """The processes that train, which are also the ranks of ``[sharding]``; the first one runs the loop."""

    count: int = Field(default=1, ge=1)
    """Processes that train."""


class EnginesConfig(RoleConfig):
    """A pool of engines that sample for the same policies."""

    policies: list[str] = Field(default_factory=list)
    """Policies that the pool serves; by default all."""
    count: int = Field(default=1, ge=1)
    """Engines of the pool."""
    min_count: int = Field(default=1, ge=1)
    """Engines that must have resources before the run starts; the others join when there is room."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """Inference engine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of ``turnwise serve``, such as ``kv_cache_gb`` and ``engine_args``."""

    @model_validator(mode="after")
    def _check_min_count(self) -> Self:
        if self.min_count > self.count:
            raise ValueError(f"min_count = {self.min_count}: expected at most count = {self.count}")
        return self


class ArenaWorkersConfig(RoleConfig):
    """Processes that play episodes."""

    count: int = Field(default=0, ge=0)
    """Processes that play episodes; 0 plays them in the process of the loop."""
    episodes: int = Field(default=64, ge=1)
    """Episodes that one process plays at the same time."""
    addresses: list[str] = Field(default_factory=list)
    """Addresses of processes that were started by hand, for ``backend = "static"``."""


class FaultsConfig(Section):
    """Processes that die: how often they may, and when one counts as dead."""

    engine_restarts: int = Field(default=8, ge=0)
    """Restarts of all engines together, after which the run ends."""
    learner_restarts: int = Field(default=3, ge=0)
    """Restarts of the processes that train, which always restart together."""
    worker_restarts: int = Field(default=8, ge=0)
    """Restarts of all processes that play episodes together."""
    dead_after: float = Field(default=30.0, gt=0)
    """Seconds without a sign of life after which a process or a node counts as dead."""


class ClusterConfig(Section):
    """The processes of a run on several machines; see docs/cluster.md."""

    backend: Literal["embedded", "ray", "static"] = "embedded"
    """``embedded`` is one process, ``ray`` starts the others on a Ray cluster, ``static`` takes what you started."""
    address: str = "local"
    """Ray cluster: ``local`` starts one here, ``auto`` joins the one of RAY_ADDRESS, or host:port."""
    wait: float = Field(default=180.0, gt=0)
    """Seconds to wait until the cluster has resources for every process."""
    trust_network: bool = False
    """Join a Ray cluster that checks no token: anyone who reaches its ports can run code on it."""
    learner: LearnerRolesConfig = Field(default_factory=LearnerRolesConfig)
    engines: dict[str, EnginesConfig] = Field(default_factory=dict)
    """Pools of engines by name; without one, the process of the loop samples by ``rollout.client``."""
    arena: ArenaWorkersConfig = Field(default_factory=ArenaWorkersConfig)
    faults: FaultsConfig = Field(default_factory=FaultsConfig)

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        config, default = run.config, ClusterConfig()
        if run.task is not None and self.has_engines:
            yield from self._unserved_policies(config, key)
        if self.backend == "embedded":
            for name in sorted(self.model_dump(exclude_defaults=True)):
                yield problem(f"{key}.{name}", "has no effect with cluster.backend = 'embedded': expected 'ray'")
        elif self.backend == "static":
            for name in ("learner", "engines", "address", "trust_network"):
                if getattr(self, name) != getattr(default, name):
                    yield problem(
                        f"{key}.{name}",
                        "has no effect with cluster.backend = 'static', which takes the processes that you started: "
                        "name engines in rollout.server.url, start ranks with torchrun",
                    )
        else:
            if config.learner.type != "local":
                yield problem("learner.type", "expected 'local' with cluster.backend = 'ray'", config.learner.type)
            if self.arena.addresses:
                why = "is for cluster.backend = 'static'; Ray starts the workers"
                yield problem(f"{key}.arena.addresses", why)
            if self.engines and config.rollout.client != "transformers":
                why = "has no effect beside cluster.engines, which sample: expected no setting here"
                yield problem("rollout.client", why, config.rollout.client)
            if self.arena.count and not self.engines:
                yield problem(f"{key}.arena.count", "workers need engines to sample from: set cluster.engines")
            yield from self._several_bases(config, key)

    def _several_bases(self, config: Any, key: str) -> Iterator[str]:
        """Yield a line for each pool whose policies have several bases. The client's check finds other mistakes."""
        groups = sharing(config.policies)
        for name, pool in self.engines.items():
            policies = set(pool.policies or config.policies)
            if policies <= config.policies.keys() and not any(policies <= set(group) for group in groups):
                why = f"an engine serves one base: expected policies of one of {groups}"
                yield problem(f"{key}.engines.{name}.policies", why, sorted(policies))

    def _unserved_policies(self, config: Any, key: str) -> Iterator[str]:
        """Yield a line for the first policy that isn't in one pool."""
        names, pools = list(config.policies), self.pools(config.policies)
        for name in dict.fromkeys([*names, *(policy for policies in pools.values() for policy in policies)]):
            holders = [pool for pool, policies in pools.items() if name in policies]
            if name not in names or len(holders) != 1:
                where = " and ".join(map(repr, holders)) or "none"
                yield problem(
                    f"{key}.engines",
                    f"policy {name!r} is in {where}: expected each policy of the run, which are {names}, in one pool",
                )
                return

    def pools(self, policies: Iterable[str]) -> dict[str, list[str]]:
        """Return the policies of each pool of engines, by default all."""
        return {name: list(pool.policies or policies) for name, pool in self.engines.items()}

    @property
    def workers(self) -> int:
        """Number of processes that play episodes; 0 plays them in the process of the loop."""
        return 0 if self.backend == "embedded" else max(self.arena.count, len(self.arena.addresses))

    @property
    def has_engines(self) -> bool:
        """True if engines of the cluster sample, in place of ``rollout.client``."""
        return self.backend != "embedded" and bool(self.engines)


class ShardingConfig(Section):
    """Shards of the models over the processes that torchrun or Slurm starts; see docs/training.md."""

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type in which layers are gathered and computed; by default that of the weights. Gradients add up in float32."""
    offload: bool = False
    """Keep shards and optimizer in the CPU's memory."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the weights, each in shards over its part of the processes, so that only gradients cross the parts."""
    parallel: bool = False
    """Train policies that share no weights at the same time, each on an equal part of the processes."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds after which a process gives up waiting for another one in an update."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        if run.server is not None and self != ShardingConfig():
            yield problem(key, "no model is here: expected no setting", self.model_dump(exclude_defaults=True))
        if run.ranks == 1:
            return
        config, copies = run.config, self.replicas
        if run.ranks % copies:
            yield problem(f"{key}.replicas", f"expected a divisor of the {run.ranks} processes", copies)
        if self.parallel and copies > 1:
            yield "config keys 'sharding.parallel' and 'sharding.replicas': expected one of them, got both"
        groups = sharing({name: each for name, each in config.policies.items() if each.trainable})
        if self.parallel and not config.distill.top_k and groups and run.ranks % len(groups):
            yield problem(
                f"{key}.parallel",
                f"expected a number of processes that the {len(groups)} groups of weights divide "
                f"({', '.join('+'.join(names) for names in groups)}), got {run.ranks}",
                self.parallel,
            )
        if config.device == "cpu" and self.offload:
            yield problem(f"{key}.offload", "expected a GPU, got the device 'cpu'", self.offload)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """Properties of a kind of Tinker server: its treatment of rows and settings of an update."""

    means: bool = False
    """It averages over a row's tokens, those of the prompt included, and then over the rows; else it sums."""
    clips: bool = False
    """It clips the gradient's norm as the update sets it; else by its own settings, or never."""
    adam: bool = False
    """It takes betas, epsilon and weight decay from the update; else from its own settings."""
    reorders: bool = False
    """It may run an update before a pass that was sent earlier, unless that pass has been answered."""
    trains_its_sampler: bool = False
    """An update also changes the weights of samplers that were made before it."""
    shares_decay: bool = False
    """An update's weight decay also shrinks the other adapters."""

    @property
    def decides(self) -> tuple[str, ...]:
        """Keys of the optimizer that it takes from its own settings."""
        return (*(() if self.clips else ("max_grad_norm",)), *(() if self.adam else ("betas", "weight_decay")))


SERVERS = {
    "hosted": ServerKind(clips=True, adam=True),
    # SkyRL 0.3: skyrl/backends/skyrl_train_backend.py, read
    "skyrl": ServerKind(reorders=True),
    # SkyRL 0.3: skyrl/backends/jax.py, tested
    "skyrl-jax": ServerKind(means=True, adam=True, reorders=True, trains_its_sampler=True, shares_decay=True),
}
"""Kinds of servers, by ``learner.tinker.server``."""

ITS_OWN = "the server takes it from its own settings"


class TinkerConfig(Section):
    """A server of the Tinker API that has, trains and samples the adapters; see docs/tinker.md."""

    server: Literal["hosted", "skyrl", "skyrl-jax"] = "hosted"
    """Server: Tinker's own service, or SkyRL with its FSDP or Megatron backend, or with its JAX backend."""
    base_url: str | None = None
    """Address of the server; by default that of the hosted service."""
    base_model: str | None = None
    """The server's name of the base model; by default the ``path`` of the policies."""
    api_key_env: str = "TINKER_API_KEY"
    """Environment variable with the key. SkyRL checks none, but the SDK needs one that begins with ``tml-``."""
    timeout: float = Field(default=1800.0, gt=0)
    """Seconds that one answer may take."""
    patience: float = Field(default=60.0, gt=0)
    """Seconds that the server may be unreachable before the run ends."""

    at_resume: ClassVar[Effects] = {"base_model": refused("the checkpoint has adapters of it")}


class LearnerConfig(Section):
    """The learner, which has and trains the weights of the policies."""

    type: Literal["local", "tinker"] = "local"
    """``local`` trains here, or in shards over the processes of torchrun; ``tinker`` lets a server train."""
    tinker: TinkerConfig = Field(default_factory=TinkerConfig)

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        if self.is_remote and run.ranks > 1:
            why = "expected one process, as a server trains; start turnwise without torchrun"
            yield problem(f"{key}.type", why, self.type)
        paths = {settings.path for settings in run.config.policies.values()}
        if run.server is not None and len(paths) > 1:
            yield f"config keys 'policies.*.path' = {sorted(paths)}: expected one base model for all adapters"

    @property
    def is_remote(self) -> bool:
        """True if a server of the Tinker API has the weights."""
        return self.type == "tinker"

    @property
    def server(self) -> ServerKind:
        """Properties of the Tinker server."""
        return SERVERS[self.tinker.server]

    at_resume: ClassVar[Effects] = {"type": refused("the checkpoint is of the other kind")}
