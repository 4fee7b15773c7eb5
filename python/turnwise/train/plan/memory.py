"""Bytes per GPU: weights and cache of an engine; weights, gradients, Adam and activations of a rank."""

from __future__ import annotations

import math

from turnwise.train.plan.constants import GPU, Constants
from turnwise.train.plan.workload import Workload

STATES = 16
"""Bytes of the trainer per trained weight: weight, gradient, and Adam's two moments in float32, whatever computes."""


def engine_weight_bytes(workload: Workload, tensor_parallel: int) -> float:
    """Return the bytes of an engine's weights on one GPU, with adapters."""
    model = workload.model
    return (model.parameters + model.adapter_parameters) * model.weight_bytes / tensor_parallel


def cache_bytes(workload: Workload, tensor_parallel: int, rows: float, *, full_length: bool = False) -> float:
    """Return the bytes of keys and values of ``rows`` rows on one GPU, at their mean or at their ``full_length``."""
    model = workload.model
    tokens = workload.prompt + workload.response * (1 if full_length else 0.5)
    return rows * tokens * model.kv_bytes * max(1 / tensor_parallel, 1 / model.kv_heads)


def most_slots(workload: Workload, tensor_parallel: int, gpu: GPU, constants: Constants) -> int:
    """Return the most rows that an engine can sample at the same time, below 1 if its weights alone don't fit.

    Rows count at their mean length: vLLM holds back new rows if the cache is full.
    """
    free = constants.engine_memory_share * gpu.memory - engine_weight_bytes(workload, tensor_parallel)
    return math.floor(free / cache_bytes(workload, tensor_parallel, 1))


def training_bytes(workload: Workload, ranks: int, constants: Constants) -> float:
    """Return the bytes of one training GPU: its shard of weights, gradients and Adam, and activations."""
    model = workload.model
    # One process computes with a rounded copy; ranks round what they gather.
    rounded = model.train_bytes if ranks == 1 and model.train_bytes < 4 and not model.adapter_parameters else 0
    return _held(workload) / ranks + rounded * model.parameters + constants.activation_memory


def _held(workload: Workload) -> float:
    """Return the bytes of weights, gradients, Adam and reference on all ranks together."""
    model = workload.model
    if model.adapter_parameters:
        return model.parameters * model.train_bytes + STATES * model.adapter_parameters
    return (STATES + workload.reference * model.train_bytes) * model.parameters


def fewest_ranks(workload: Workload, gpu: GPU, constants: Constants) -> int | None:
    """Return the fewest training GPUs that hold the model; ``None`` if activations alone don't fit."""
    free = gpu.memory - constants.activation_memory
    if free > 0 and training_bytes(workload, 1, constants) > gpu.memory:
        return max(2, math.ceil(_held(workload) / free))
    return 1 if free > 0 else None
