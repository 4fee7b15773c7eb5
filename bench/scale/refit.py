"""Fits the constants of the model to a run's own ``metrics.jsonl`` and ``rollouts.jsonl``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scale.constants import GPU, Constants
from scale.formula import Split, engine_speed, sync_seconds, training_seconds
from scale.workload import Workload

from turnwise.train.config.cluster import ClusterConfig, EnginesConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.log.run_log import read_metrics

SLOTS = 256
"""Slots of an engine whose settings don't say how many: the default of ``turnwise serve``."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants and workload that a run measured.

    ``changed`` has a line for each number, with its old and its new value; ``kept`` one for each that the run doesn't
    tell.
    """

    constants: Constants
    workload: Workload
    changed: list[str]
    kept: list[str]
    measured_workload: bool
    """Whether tokens and calls are the run's."""


def split_of(config: TrainConfig, gpus: int | None = None) -> Split:
    """Return the split that ``[cluster]`` of ``config`` asks for; with no pool of engines, one of one GPU.

    Raises ``ValueError`` for more than one pool, and if it needs more than ``gpus``.
    """
    cluster: ClusterConfig = config.cluster
    if len(cluster.engines) > 1:
        raise ValueError(f"cluster.engines: {len(cluster.engines)} pools ({', '.join(cluster.engines)}): expected one")
    pool = next(iter(cluster.engines.values()), EnginesConfig())
    arguments = pool.options.get("engine_args", {})
    tensor_parallel = int(arguments.get("tensor_parallel_size", max(1, round(pool.gpus))))
    slots = pool.options.get("max_num_seqs", SLOTS if cluster.engines else config.rollout.max_batch_rows)
    split = Split(pool.count, tensor_parallel, cluster.learner.count, int(slots), config.loop.max_staleness)
    if gpus is not None and split.gpus > gpus:
        raise ValueError(f"cluster: engines and learner take {split.gpus} GPUs: expected at most --gpus {gpus}")
    return split


def refit(run_dir: Path, config: TrainConfig, workload: Workload, gpu: GPU, constants: Constants) -> Fit:
    """Fit ``constants`` to the run in ``run_dir``, whose own settings are ``config`` and ``workload``.

    Each number is a median over the steps, without the first one if there are three. The run's GPUs count as ``gpu``:
    on others, efficiencies are those of another kind of GPU. Raises ``FileNotFoundError`` without ``metrics.jsonl``,
    and ``ValueError`` for a run without a trained step.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "metrics.jsonl").is_file():
        raise FileNotFoundError(2, "No such file", str(run_dir / "metrics.jsonl"))
    rows = [row for row in read_metrics(run_dir) if "seconds_update" in row]
    if not rows:
        raise ValueError(f"run_dir={str(run_dir)!r}: expected a run with a trained step in metrics.jsonl")
    rows = rows[1:] if len(rows) > 2 else rows
    source, split = str(run_dir), split_of(config)
    changed: list[str] = []
    kept: list[str] = []

    # The workload: tokens of the recorded calls, and calls per episode from all sampled tokens.
    calls = [step for row in read_metrics(run_dir, "rollouts.jsonl") for step in _calls(row)]
    sampled = _median(rows, "sampled_tokens")
    if calls and sampled:
        response = fmean(len(step["completion_token_ids"]) for step in calls)
        prompt = fmean(len(step["prompt_token_ids"]) for step in calls)
        measured = {"prompt": prompt, "response": response, "calls": sampled / (response * workload.episodes)}
        for name, value in measured.items():
            changed.append(f"{name} {getattr(workload, name):.6g} -> {value:.6g}")
        longest = None if workload.longest is None else max(workload.longest, response)
        workload = replace(workload, prompt=prompt, response=response, longest=longest, calls=measured["calls"])
    else:
        kept.append("prompt, response, calls: rollouts.jsonl has no recorded calls")

    new: dict[str, float] = {}
    said: dict[str, str] = {}
    # Seconds of the update, without those of the sync, which the loop counts with it. A pool adds up its engines' own.
    if (unique := _median(rows, r"(.*/)?unique_token_share")) is not None:
        new["unique_token_share"] = unique
    sync = _median(rows, "inference/sync_seconds")
    sync = None if sync is None else sync / split.engines
    update = (_median(rows, "seconds_update") or 0.0) - (sync or 0.0)
    known = replace(
        constants, **{name: getattr(constants, name).measured(value, source) for name, value in new.items()}
    )
    if update > 0:
        modelled = training_seconds(workload, split.training, gpu, known)
        new["train_flops_share"] = constants.train_flops_share * modelled / update
        said["train_flops_share"] = f": {update * split.training / workload.trained_tokens:.3g} GPU-seconds a token"
    else:
        kept.append(f"train_flops_share: seconds_update has no seconds besides the sync's ({sync:.3g} s)")
    if sync:
        modelled = sync_seconds(workload, split.tensor_parallel, constants)
        new["sync_scale"] = constants.sync_scale * sync / modelled
        said["sync_scale"] = f": {sync:.3g} s a sync"
    else:
        kept.append("sync_scale: the run's client doesn't report inference/sync_seconds")

    # Tokens per second of an engine while it has requests; the tail is in them.
    rate = _median(rows, "inference/tokens_per_second")
    if rate is None and not split.max_staleness and (seconds := _median(rows, "seconds_rollout")) and sampled:
        rate = sampled / seconds / split.engines
    if rate:
        most = min(float(split.slots), ((split.max_staleness or 0) + 1) * workload.episodes / split.engines)
        running = _median(rows, "inference/running")
        count = min(most, running) if running else most
        modelled = count / engine_speed(workload, split.tensor_parallel, gpu, constants).seconds(count)
        new["sampling_efficiency"] = constants.sampling_efficiency * rate / modelled
        said["sampling_efficiency"] = f": {rate:,.0f} tokens/s of an engine with {count:,.0f} rows"
        new["tail"], said["tail"] = 1.0, ": it is in the measured rate"
    else:
        kept.append("sampling_efficiency: the run's client doesn't report inference/tokens_per_second")

    fitted = {name: getattr(constants, name).measured(value, source) for name, value in new.items()}
    changed += [
        f"{name} {getattr(constants, name):.4g} -> {value:.4g}{said.get(name, '')}" for name, value in fitted.items()
    ]
    return Fit(replace(constants, **fitted), workload, changed, kept, bool(calls and sampled))


def _median(rows: Rows, pattern: str) -> float | None:
    """Return the median over steps of the mean of all metrics whose name matches; ``None`` if there are none."""
    values = []
    for row in rows:
        found = [value for name, value in row.items() if re.fullmatch(pattern, name) and value is not None]
        if found:
            values.append(fmean(found))
    return median(values) if values else None


def _calls(rollout: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield each model call of a recorded episode and its children."""
    yield from rollout["steps"]
    for child in rollout["children"]:
        yield from _calls(child)
