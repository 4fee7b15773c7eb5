"""Runs a config on a cluster: prepares the files that engines start from, and supervises the processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.cluster.commands import ROLE, commands_of
from turnwise.cluster.host import ClusterLost
from turnwise.cluster.members import FOLDER
from turnwise.cluster.placement import describe, fit, roles_of
from turnwise.cluster.ray_backend import RayBackend
from turnwise.cluster.supervisor import Supervisor
from turnwise.inference.common.model_files import read_config
from turnwise.run.checks import check_config, check_questions, resolve_config, task_of, tiny_model
from turnwise.run.models import model_of
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.league.build import groups_of
from turnwise.train.model.loading import TINY, check_models
from turnwise.utils.output import tell

EXIT_LATER = 75
"""Exit code of a run that lost its cluster, and can continue on another: EX_TEMPFAIL of sysexits.h."""


def is_supervised(config: TrainConfig) -> bool:
    """Return True if this process starts the run's processes, and isn't one of them."""
    return config.cluster.backend == "ray" and ROLE not in os.environ


def train_on_cluster(config: TrainConfig) -> int:
    """Train ``config`` on its Ray cluster, and return the exit code of the run's first rank, or :data:`EXIT_LATER`."""
    task = task_of(config)
    resolved, *_ = check_config(config, task, warm=False)
    check_questions(resolved, task)
    with RayBackend(config.cluster) as backend:
        roles = roles_of(config.cluster)
        fit(roles, backend.nodes())
        models = _prepare_models(config, resolved, task)
        try:
            return Supervisor(config, backend, roles, commands_of(config, models)).run()
        except ClusterLost as error:
            tell(f"{error}; the same command goes on from the newest checkpoint")
            return EXIT_LATER


def placement_lines(config: TrainConfig) -> Iterator[str]:
    """Yield one line for each process of the run, with its node and its bytes on each GPU, or in memory if it has none.

    Raises :class:`~turnwise.cluster.placement.NoRoom` if the cluster can't hold them.
    """
    roles = roles_of(config.cluster)
    with RayBackend(config.cluster) as backend:
        yield from describe(roles, fit(roles, backend.nodes()), _bytes_of(config))


def _bytes_of(config: TrainConfig) -> dict[str, str]:
    """Describe the bytes of a rank and of an engine of each pool, by the kind or the pool's name."""
    task, problems = task_of(config), Problems()
    resolved, _ = resolve_config(config, task, problems)
    problems.raise_any()
    try:
        model = model_of(resolved, partial(tiny_model, config, task))
    except ConfigError as error:
        return dict.fromkeys(("rank", *config.cluster.engines), f"bytes unknown: {error}")
    states = model.rank_bytes(config.cluster.learner.count, reference=config.loss.kl.coef > 0)
    sizes = {"rank": f"{_mib(states)} of weights, gradients, Adam"}
    for name, pool in config.cluster.engines.items():
        weights = _mib(model.engine_bytes(int(max(pool.gpus, 1))))
        cache = "" if pool.engine == "transformers" else f", {pool.options.get('kv_cache_gb', 1.0)} GiB of cache"
        sizes[name] = f"{weights} of weights{cache}"
    return sizes


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _prepare_models(config: TrainConfig, resolved: TrainConfig, task: Any) -> dict[str, Path]:
    """Write a folder with config and tokenizer for each pool; the trainer sends the weights."""
    folders = {}
    for name, pool in config.cluster.engines.items():
        policies = {each: resolved.policies[each] for each in pool.policies or resolved.policies}
        first = next(iter(policies.values()))
        folder = folders[name] = (config.run_dir / FOLDER / "models" / name).absolute()
        tokenizer = check_models(policies, partial(tiny_model, config, task)).common()
        if first.path == TINY:
            model = tiny_model(config, task)[1]
            model_config = model.config
            model_config.architectures = [type(model).__name__]  # vLLM asks for it
        else:
            model_config = read_config(first.path)
        model_config.dtype = first.dtype
        model_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        adapters = [each.lora.rank for each in policies.values() if each.lora is not None]
        if adapters:
            past = config.league.opponents_per_step * groups_of(config) if config.league.share else 0
            pool.options.setdefault("adapter_slots", len(adapters) * (1 + past))
            pool.options.setdefault("adapter_rank", max(adapters))
    return folders
