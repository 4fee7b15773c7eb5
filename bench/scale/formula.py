"""The throughput model: seconds of a step from a workload, a split of the GPUs, and constants.

An engine of ``tp`` GPUs that samples ``n`` rows takes ``t(n)`` seconds for one token of each::

    t(n) = weights / (tp * bandwidth) + n * (kv of the mean row / (tp * bandwidth) + 2 P / (tp * flops)) + overhead

A batch of ``R`` rows of ``L`` tokens then takes, with ``E`` engines of at most ``B`` rows and ``G`` training GPUs::

    sampling = tail * R * L * t(n) / (E * n)                  at full speed: all engines have n = B rows
    training = FLOPs per weight and token * P * tokens * unique share / (G * flops)
    sync     = bytes / wire + bytes / (tp * load) + overhead  one collective; one by one: E * tp * bytes / wire
    stop     = (1 - hidden) * sync                            trainer and engines wait for that long

The loop may sample ``k`` batches ahead (``max_staleness``), so batch ``b + k + 1`` starts when batch ``b`` has trained,
and no more than ``(k + 1) * R`` rows run at a time. Three things bound a step::

    step >= training + stop
    step >= sampling + stop
    step >= (latency + training + stop) / (k + 1)             latency: calls of L tokens, then the longest one

Without the last bound, ``k`` unlimited, this is the design's ``max(sampling, training) + stop``. The model has no
prefill, no time of environments, and no failures; :mod:`scale.cluster` has failures and routing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from scale.constants import GPU, Constants
from scale.workload import Workload


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a cluster's GPUs between engines and training.

    Example: ``Split(engines=38, tensor_parallel=1, training=26, slots=128, max_staleness=1)``
    """

    engines: int
    tensor_parallel: int
    """GPUs of an engine."""
    training: int
    """GPUs that train, each with one rank."""
    slots: int = 128
    """Most rows that an engine samples at the same time."""
    max_staleness: int | None = None
    """Batches that sampling may be ahead; ``None``: any number, so that engines are always full."""

    def __post_init__(self) -> None:
        for name in ("engines", "tensor_parallel", "training", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected at least 1")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness!r}: expected a count >= 0, or None")

    @classmethod
    def of_share(cls, gpus: int, share: float, tensor_parallel: int = 1, **settings: int | None) -> Self:
        """Split ``gpus`` so that at most the ``share`` of them samples; those that fill no engine stay idle."""
        sampling = math.floor(share * gpus)
        return cls(sampling // tensor_parallel, tensor_parallel, gpus - sampling, **settings)  # type: ignore[arg-type]

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.engines * self.tensor_parallel + self.training


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Seconds that an engine takes for one token of each of its rows: ``base + rows * per_row``."""

    base: float
    per_row: float

    def seconds(self, rows: float) -> float:
        return self.base + rows * self.per_row


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one step, and the parts of them."""

    step: float
    sampling: float
    """Sampling of a batch at full speed: all engines have as many rows as they can get."""
    training: float
    sync: float
    stop: float
    """Part of the sync for which trainer and engines wait."""
    latency: float
    """From the first request of a batch to its last answer: calls of the mean length, the last one the longest."""
    rows_per_engine: float
    """Mean rows that an engine samples at the same time."""
    tokens_per_second: float
    """Sampled tokens of the whole cluster per second."""
    bottleneck: str
    """What bounds the step: training, sampling, latency of a batch, or weight sync."""


def engine_speed(workload: Workload, tensor_parallel: int, gpu: GPU, constants: Constants) -> EngineSpeed:
    """Return the speed of an engine of ``tensor_parallel`` GPUs."""
    model, bandwidth = workload.model, gpu.memory_bandwidth
    kv_share = max(1 / tensor_parallel, 1 / model.kv_heads)
    read = (workload.prompt + workload.response / 2) * model.kv_bytes * kv_share / bandwidth
    multiply = 2 * model.parameters / (constants.decode_flops_share * gpu.flops * tensor_parallel)
    base = model.weight_bytes * model.parameters / (tensor_parallel * bandwidth) + constants.token_overhead
    return EngineSpeed(base / constants.sampling_efficiency, (read + multiply) / constants.sampling_efficiency)


def training_seconds(workload: Workload, ranks: int, gpu: GPU, constants: Constants) -> float:
    """Return the seconds of the update of one step on ``ranks`` GPUs."""
    flops = workload.train_flops * workload.model.parameters * workload.trained_tokens * constants.unique_token_share
    return flops / (ranks * gpu.flops * constants.train_flops_share)


def sync_seconds(workload: Workload, tensor_parallel: int, constants: Constants) -> float:
    """Return the seconds of a weight sync in one collective, which don't depend on the number of engines."""
    sent = workload.model.sent_bytes
    load = sent / (tensor_parallel * constants.load_bandwidth)
    return constants.sync_scale * (sent / constants.sync_bandwidth + load + constants.sync_overhead)


def one_by_one_seconds(workload: Workload, split: Split, constants: Constants) -> float:
    """Return the seconds in which one sender gives the weights to each GPU of each engine, one after the other."""
    return split.engines * split.tensor_parallel * workload.model.sent_bytes / constants.sync_bandwidth


def predict(workload: Workload, split: Split, gpu: GPU, constants: Constants) -> Prediction:
    """Predict the seconds of a step in the steady state."""
    speed = engine_speed(workload, split.tensor_parallel, gpu, constants)
    training = training_seconds(workload, split.training, gpu, constants)
    sync = sync_seconds(workload, split.tensor_parallel, constants)
    ahead = split.max_staleness
    stop = sync if ahead == 0 else (1 - constants.sync_hidden) * sync

    def sampling_of(rows: float) -> float:
        return constants.tail * workload.sampled_tokens * speed.seconds(rows) / (split.engines * rows)

    def latency_of(rows: float) -> float:
        longest = workload.response if workload.longest is None else workload.longest
        return ((workload.calls - 1) * workload.response + longest) * speed.seconds(rows)

    if ahead is None:
        rows = float(split.slots)
        sampling, latency = sampling_of(rows), latency_of(rows)
        step, bottleneck = max((training, "training"), (sampling, "sampling"))
        return _prediction(workload, step + stop, sampling, training, sync, stop, latency, rows, bottleneck)

    # As many rows run as start in a latency, so the rows per engine depend on the step, and the step on them.
    most = min(float(split.slots), (ahead + 1) * workload.episodes / split.engines)
    sampling, full, busy = sampling_of(most), sampling_of(float(split.slots)), training + stop

    def step_of(rows: float) -> tuple[float, str]:
        latency = latency_of(rows)
        if not ahead:
            return max((sampling + busy, "sampling"), (latency + busy, "latency of a batch"))
        # Engines stop once a step, so a batch takes latency * bound / (bound - stop): a quadratic equation for bound.
        linear = (ahead + 1) * stop + latency + busy
        bound = (linear + math.sqrt(linear**2 - 4 * (ahead + 1) * busy * stop)) / (2 * (ahead + 1))
        return max((busy, "training"), (full + stop, "sampling"), (bound, "latency of a batch"))

    low, rows = 0.0, most
    for _ in range(25):
        middle = (low + rows) / 2
        running = workload.sampled_tokens * speed.seconds(middle) / (step_of(middle)[0] * split.engines)
        low, rows = (middle, rows) if running > middle else (low, middle)
    step, bottleneck = step_of(rows)
    return _prediction(workload, step, sampling, training, sync, stop, latency_of(rows), rows, bottleneck)


def _prediction(
    workload: Workload,
    step: float,
    sampling: float,
    training: float,
    sync: float,
    stop: float,
    latency: float,
    rows: float,
    bottleneck: str,
) -> Prediction:
    bottleneck = "weight sync" if stop > step / 2 else bottleneck
    rate = workload.sampled_tokens / step
    return Prediction(step, sampling, training, sync, stop, latency, rows, rate, bottleneck)
