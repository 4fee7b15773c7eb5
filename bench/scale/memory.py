"""Bytes per GPU: the cache of an engine; the states and activations of a rank."""

from __future__ import annotations

import math

from scale.constants import GPU, Constants
from scale.workload import Workload


def cache_bytes(workload: Workload, tensor_parallel: int, rows: float, *, full_length: bool = False) -> float:
    """Return the bytes of keys and values of ``rows`` rows on one GPU, at their mean or at their ``full_length``."""
    model = workload.model
    tokens = workload.prompt + workload.response * (1 if full_length else 0.5)
    return rows * tokens * model.kv_bytes * max(1 / tensor_parallel, 1 / model.kv_heads)


def most_slots(workload: Workload, tensor_parallel: int, gpu: GPU, constants: Constants) -> int:
    """Return the most rows that an engine can sample at the same time, below 1 if its weights alone don't fit.

    Rows count at their mean length: vLLM holds back new rows if the cache is full.
    """
    free = constants.engine_memory_share * gpu.memory - workload.model.engine_bytes(tensor_parallel)
    return math.floor(free / cache_bytes(workload, tensor_parallel, 1))


def training_bytes(workload: Workload, ranks: int, constants: Constants) -> float:
    """Return the bytes of one training GPU: its shard of weights, gradients and Adam, and activations."""
    return workload.model.rank_bytes(ranks, reference=workload.reference) + constants.activation_memory


def fewest_ranks(workload: Workload, gpu: GPU, constants: Constants) -> int | None:
    """Return the fewest training GPUs that hold the model; ``None`` if activations alone don't fit."""
    free = gpu.memory - constants.activation_memory
    if free > 0 and training_bytes(workload, 1, constants) > gpu.memory:
        return max(2, math.ceil(workload.model.state_bytes(reference=workload.reference) / free))
    return 1 if free > 0 else None
