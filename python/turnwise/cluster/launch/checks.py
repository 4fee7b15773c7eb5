"""Refuses runs that could not start on the nodes that are asked for, or not go on there after a restart."""

from __future__ import annotations

import re

from turnwise.train.config.cluster import ClusterConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError

FAILED_FOR_NOW = 75
"""Exit code of ``turnwise train`` if the run can go on once its cluster has been started again."""


def check_size(config: TrainConfig, nodes: int, gpus_per_node: int, name: str = "nodes") -> None:
    """Raise ``ValueError`` if ``nodes`` with ``gpus_per_node`` can't hold the processes that must run.

    ``name`` is the user's name for ``nodes``.

    Raises :class:`ConfigError` for a config that would not resume after a restart.
    """
    for argument, value, least in ((name, nodes, 1), ("gpus_per_node", gpus_per_node, 0)):
        if value < least:
            raise ValueError(f"{argument}={value!r}: expected a count >= {least}")
    if not config.resume:
        raise ConfigError("config key 'resume' = false: expected true, as the run goes on when its cluster restarts")
    asked, there = gpus_of(config.cluster), nodes * gpus_per_node
    if asked > there:
        raise ValueError(
            f"{name}={nodes!r}, gpus_per_node={gpus_per_node!r}: the processes of [cluster] take {asked:g} GPUs, and "
            f"these nodes have {there}. Ask for more nodes, or for fewer processes"
        )


def gpus_of(cluster: ClusterConfig) -> float:
    """Return the GPUs of all processes that must run before the run starts."""
    counts = [(cluster.learner, cluster.learner.count), (cluster.arena, cluster.arena.count)]
    counts += [(pool, pool.min_count) for pool in cluster.engines.values()]
    return sum(role.gpus * count for role, count in counts)


def job_name(config: TrainConfig, longest: int) -> str:
    """Return a name for the job, after the run's folder: small letters, digits and dashes, as Kubernetes has them."""
    name = re.sub("[^a-z0-9]+", "-", f"turnwise-{config.run_dir.name}".lower())
    return name[:longest].strip("-")
