"""Several processes that train one run: joins those that torchrun or Slurm started, and shards the policies."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch

from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import find_device
from turnwise.train.model.policy import Policy
from turnwise.train.validate import contradictions
from turnwise.utils.values import problem

_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
"""torchrun's variables, and those that ``srun`` sets for each task."""
_PATIENCE = timedelta(days=7)
T = TypeVar("T")
_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of malloc.h."""


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


def expected_ranks(config: TrainConfig) -> int:
    """Return the number of processes that train ``config``: those of its cluster, of torchrun or ``srun``, or 1."""
    if config.cluster.backend == "ray":
        return config.cluster.learner.count
    variables = rank_variables(os.environ)
    return 1 if variables is None else int({**os.environ, **variables}["WORLD_SIZE"])


def join_ranks(config: TrainConfig) -> Any:
    """Join the processes of this run, and return their ``DeviceMesh``; ``None`` for a process by itself.

    Raises :class:`ConfigError` for settings that don't fit the device.
    """
    variables = rank_variables(os.environ)
    if variables is None:
        return None
    if problems := contradictions(config, expected_ranks(config)):
        raise ConfigError("\n".join(problems))
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.rendezvous import rendezvous

    os.environ.update(variables)
    size, copies = int(os.environ["WORLD_SIZE"]), config.sharding.replicas
    device = find_device(config.device).type
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif config.sharding.offload:
        raise ConfigError(problem("sharding.offload", f"expected a GPU, got the device {device!r}", True))
    else:
        _give_memory_back()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    # torchrun's ranks find each other in its store, which after a restart still holds the addresses of the dead ones.
    timeout = timedelta(seconds=config.sharding.timeout)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    if copies == 1:
        return init_device_mesh(device, (size,))
    return init_device_mesh(device, (copies, size // copies), mesh_dim_names=("copies", "shards"))


def _give_memory_back() -> None:
    """Let glibc return each large block when it is freed.

    It would keep blocks of up to 32 MiB, and the layers that a rank gathers and drops would fragment its heap to more
    than the whole model. Other C libraries don't need it.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def shard(policies: Mapping[str, Policy], config: TrainConfig, mesh: Any) -> Any:
    """Return the ``ShardedLearner`` of ``policies`` over ``mesh``. All ranks call it; they wait for the slowest."""
    from turnwise.train.learner.sharded import ShardedLearner

    settings = config.sharding
    dtype = None if settings.compute_dtype is None else getattr(torch, settings.compute_dtype)
    torch.manual_seed(config.seed + mesh.get_rank())  # each rank drops out other units
    options: dict[str, Any] = {"param_dtype": dtype, "offload": settings.offload}
    if not settings.parallel:
        return ShardedLearner(policies, config, mesh, **options)
    from torch.distributed.device_mesh import init_device_mesh

    from turnwise.train.learner.sharded import ParallelLearner, weight_groups

    groups, size = weight_groups(policies), mesh.size()
    if size % len(groups):
        why = f"expected a number of processes that the {len(groups)} groups of weights divide"
        raise ConfigError(problem("sharding.parallel", f"{why} ({', '.join(map('+'.join, groups))}), got {size}", True))
    shape = (len(groups), size // len(groups))
    parallel = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("groups", "shards"))
    return ParallelLearner(policies, config, parallel, groups, **options)


def announcer(mesh: Any) -> Callable[[T | None], T | None]:
    """Return a function that returns rank 0's argument on every rank of ``mesh``; the others call it with ``None``.

    They wait for rank 0, up to :data:`_PATIENCE`. Every rank calls this once, at the same time.
    """
    import torch.distributed as dist

    group = dist.new_group(mesh.mesh.flatten().tolist(), timeout=_PATIENCE, backend="gloo")

    def announce(value: T | None) -> T | None:
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=group)
        return values[0]

    return announce


def leave_ranks() -> None:
    """Leave the processes that :func:`join_ranks` joined."""
    import torch.distributed as dist

    dist.destroy_process_group()
