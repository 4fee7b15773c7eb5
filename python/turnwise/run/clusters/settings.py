"""Checks the settings of ``[cluster]`` against the others of a run."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.train.config.cluster import ClusterConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.model.loading import sharing


def cluster_problems(config: TrainConfig) -> list[str]:
    """Return one line for each setting of ``[cluster]`` that does not fit the others."""
    cluster, alone = config.cluster, ClusterConfig()
    lines: list[str] = []
    if cluster.backend == "embedded":
        changed = sorted(cluster.model_dump(exclude_defaults=True))
        return [
            f"config section 'cluster.{name}': has no effect with cluster.backend = 'embedded': expected 'ray'"
            for name in changed
        ]
    if cluster.backend == "static":
        for name in ("learner", "engines", "address", "trust_network"):
            if getattr(cluster, name) != getattr(alone, name):
                lines.append(
                    f"config key 'cluster.{name}': has no effect with cluster.backend = 'static', which takes the "
                    "processes that you started: name engines in rollout.server.url, start ranks with torchrun"
                )
        return lines
    if config.learner.type != "local":
        lines.append(
            f"config key 'learner.type' = {config.learner.type!r}: expected 'local' with cluster.backend = 'ray'"
        )
    if cluster.arena.addresses:
        lines.append("config key 'cluster.arena.addresses': is for cluster.backend = 'static'; Ray starts the workers")
    if cluster.engines and config.rollout.client != "transformers":
        lines.append(
            f"config key 'rollout.client' = {config.rollout.client!r}: has no effect beside cluster.engines, which "
            "sample: expected no setting here"
        )
    if cluster.arena.count and not cluster.engines:
        lines.append("config key 'cluster.arena.count': workers need engines to sample from: set cluster.engines")
    lines += _problems_of_pools(config)
    return lines


def _problems_of_pools(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each pool whose policies have several bases. The client's check finds other mistakes."""
    groups = sharing(config.policies)
    for name, pool in config.cluster.engines.items():
        policies = set(pool.policies or config.policies)
        if policies <= config.policies.keys() and not any(policies <= set(group) for group in groups):
            yield (
                f"config key 'cluster.engines.{name}.policies' = {sorted(policies)}: an engine serves one base: "
                f"expected policies of one of {groups}"
            )
