"""Runs a config on a cluster: checks it, prepares what engines start from, and supervises the processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.cluster.commands import ROLE, commands_of
from turnwise.cluster.members import FOLDER
from turnwise.cluster.placement import describe, fit, roles_of
from turnwise.cluster.ray_backend import RayBackend
from turnwise.cluster.supervisor import Supervisor
from turnwise.run.checks import check_config, task_of, tiny_model
from turnwise.train.config.schema import TrainConfig
from turnwise.train.league import plays_past
from turnwise.train.league.build import groups_of
from turnwise.train.model.loading import TINY, check_models


def is_supervised(config: TrainConfig) -> bool:
    """True if this process is to start the run's processes, and is none of them."""
    return config.cluster.backend == "ray" and ROLE not in os.environ


def train_on_cluster(config: TrainConfig) -> int:
    """Train ``config`` on its Ray cluster, and return the exit code of the run's first process."""
    task = task_of(config)
    resolved, *_ = check_config(config, task, warm=False)
    with RayBackend(config.cluster) as backend:
        roles = roles_of(config.cluster)
        fit(roles, backend.nodes())
        models = _prepare_models(config, resolved, task)
        return Supervisor(config, backend, roles, commands_of(config, models)).run()


def placement_lines(config: TrainConfig) -> Iterator[str]:
    """Yield one line for each process of the run, with its node. Raises if the cluster can't hold them."""
    roles = roles_of(config.cluster)
    with RayBackend(config.cluster) as backend:
        yield from describe(roles, fit(roles, backend.nodes()))


def _prepare_models(config: TrainConfig, resolved: TrainConfig, task: Any) -> dict[str, Path]:
    """Write a folder with config and tokenizer for each pool; the trainer sends the weights."""
    from transformers import AutoConfig

    folders = {}
    for name, pool in config.cluster.engines.items():
        policies = {each: resolved.policies[each] for each in pool.policies or resolved.policies}
        first = next(iter(policies.values()))
        folder = folders[name] = (config.run_dir / FOLDER / "models" / name).absolute()
        tokenizer = check_models(policies, partial(tiny_model, config, task))
        model_config = (
            tiny_model(config, task)[1].config if first.path == TINY else AutoConfig.from_pretrained(first.path)
        )
        model_config.dtype = first.dtype
        model_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        adapters = [each.lora.rank for each in policies.values() if each.lora is not None]
        if adapters:
            past = config.league.opponents_per_step * groups_of(config) if plays_past(config) else 0
            pool.options.setdefault("adapter_slots", len(adapters) * (1 + past))
            pool.options.setdefault("adapter_rank", max(adapters))
    return folders
