"""Several processes that train one run: joins those that torchrun or Slurm started, and shards the policies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import find_device
from turnwise.train.model.policy import Policy

_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
"""torchrun's variables, and those that ``srun`` sets for each task."""


def rank_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables of this process: its own, or those of an ``srun`` step; ``None`` if it is alone.

    Raises :class:`ConfigError` for a step of several tasks without ``MASTER_ADDR``, the node of rank 0.
    """
    if "RANK" in environment and int(environment.get("WORLD_SIZE", "1")) > 1:
        return {}
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1 or "RANK" in environment:
        return None
    if "MASTER_ADDR" not in environment:
        raise ConfigError(
            f"srun started {environment['SLURM_STEP_NUM_TASKS']} tasks, but MASTER_ADDR is not set: expected the node "
            "of task 0. Before srun: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        )
    return {name: environment[of] for name, of in _SLURM.items()} | {
        "MASTER_PORT": environment.get("MASTER_PORT", "29500")
    }


def join_ranks(config: TrainConfig) -> Any:
    """Join the processes of this run, and return their ``DeviceMesh``; ``None`` for a process by itself.

    Raises :class:`ConfigError` for settings that don't fit the device.
    """
    variables = rank_variables(os.environ)
    if variables is None:
        return None
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.update(variables)
    device = find_device(config.device).type
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif config.sharding.offload:
        raise ConfigError(f"config key 'sharding.offload' = True: expected a GPU, got the device {device!r}")
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=config.sharding.timeout))
    return init_device_mesh(device, (dist.get_world_size(),))


def device_of(config: TrainConfig, mesh: Any) -> torch.device:
    """Return the device of this process: with a GPU for each rank, the one that :func:`join_ranks` chose."""
    if mesh is None or mesh.device_type == "cpu":
        return find_device(config.device)
    return torch.device("cuda", torch.cuda.current_device())


def shard(policies: Mapping[str, Policy], config: TrainConfig, mesh: Any) -> Any:
    """Return the ``ShardedLearner`` of ``policies`` over ``mesh``. All ranks call it; they wait for the slowest."""
    from turnwise.train.learner.sharded import ShardedLearner

    settings = config.sharding
    dtype = None if settings.compute_dtype is None else getattr(torch, settings.compute_dtype)
    torch.manual_seed(config.seed + mesh.get_rank())  # each rank drops out other units
    return ShardedLearner(policies, config, mesh, param_dtype=dtype, offload=settings.offload)


def leave_ranks() -> None:
    """Leave the processes that :func:`join_ranks` joined."""
    import torch.distributed as dist

    dist.destroy_process_group()
