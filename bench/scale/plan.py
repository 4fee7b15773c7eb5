"""Model the seconds of a step on a cluster, and find the best split of its GPUs; measures nothing.

    python bench/scale/plan.py CONFIG.toml --gpus 64 [--section.key value ...]

An option with a dot overrides a key of the config, as in ``turnwise train``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from scale.constants import GPU, GPUS, Constants
from scale.formula import predict
from scale.memory import cache_bytes, training_bytes
from scale.refit import Fit, refit, split_of
from scale.search import Plan, search, smallest_cluster
from scale.workload import Workload, workload_of

from turnwise.cli.options import split_overrides
from turnwise.run.checks import resolve_config, task_of, tiny_model
from turnwise.tasks import task_type
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import CONFIG_FILE, Problems, raw_settings
from turnwise.train.validate import read_config
from turnwise.utils.registry import announce_code

WORKER_LOAD = 0.5
"""Share of a core that the calls of one arena worker may take, or of the loop's process before it needs workers."""


@dataclass(frozen=True, slots=True)
class Report:
    """The printed numbers and settings."""

    workload: Workload
    sources: dict[str, str]
    gpus: int
    gpu: GPU
    constants: Constants
    fit: Fit | None
    configured: Plan | None
    plans: Sequence[Plan]
    efficiency: Sequence[float]
    """Throughput per GPU of each plan, over that of the best plan for ``smallest`` GPUs."""
    smallest: int
    sections: Sequence[dict[str, Any]]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "config": {"help": "config file: see docs/training.md", "type": Path, "metavar": "CONFIG.toml"},
    "--gpus": {"help": "GPUs of the cluster", "type": int, "required": True, "metavar": "N"},
    "--gpu": {"help": "kind of GPU (default: h100)", "choices": tuple(GPUS), "default": "h100"},
    "--run": {"help": "run whose metrics and episodes replace constants", "type": Path, "metavar": "RUN_DIR"},
    "--prompt-tokens": {"help": "mean tokens of a prompt (default: 1024)", "type": float, "metavar": "N"},
    "--response-tokens": {"help": "mean tokens of a completion (default: its limit)", "type": float, "metavar": "N"},
    "--calls": {"help": "mean model calls of an episode (default: one per actor)", "type": float, "metavar": "N"},
    "--max-staleness": {"help": "most staleness to try (default: 4, or the config's)", "type": int, "metavar": "K"},
    "--json": {"help": "print JSON, for scripts", "action": "store_true"},
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    for name, settings in ARGUMENTS.items():
        parser.add_argument(name, **settings)
    try:
        words, overrides = split_overrides(sys.argv[1:] if argv is None else argv, {*ARGUMENTS, "-h", "--help"})
        options = parser.parse_args(words)
        announce_code(raw_settings(options.config, overrides))
        report = make_report(options, read_config(options.config, overrides, task_type=task_type))
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error))
    print(json.dumps(to_json(report), indent=1) if options.json else render(report))


def make_report(options: argparse.Namespace, config: TrainConfig) -> Report:
    """Search the plans for ``config``."""
    if options.max_staleness is not None and options.max_staleness < 0:
        raise ValueError(f"--max-staleness={options.max_staleness!r}: expected a count >= 0")
    given = {name: getattr(options, f"{name}_tokens") for name in ("prompt", "response")} | {"calls": options.calls}
    config, workload, sources = _workload(config, **given)
    gpu, constants, fit = GPUS[options.gpu], Constants(), None
    if options.run is not None:
        announce_code(raw_settings(options.run / CONFIG_FILE))
        run_config, run_workload, _ = _workload(read_config(options.run / CONFIG_FILE, task_type=task_type))
        fit = refit(options.run, run_config, run_workload, gpu, constants)
        constants = fit.constants
        # Tokens and calls that the user doesn't give come from the run.
        missing = [name for name, value in given.items() if value is None] if fit.measured_workload else []
        measured = {name: getattr(fit.workload, name) for name in missing}
        longest = max(workload.longest or 0.0, measured.get("response", workload.response))
        workload = replace(workload, **measured, longest=longest)
        sources |= dict.fromkeys(missing, f"measured in {options.run}")
    most = max(4, config.loop.max_staleness) if options.max_staleness is None else options.max_staleness
    staleness = range(most + 1)
    plans = search(workload, options.gpus, gpu, constants, staleness=staleness)
    smallest, base = smallest_cluster(workload, options.gpus, gpu, constants, staleness=staleness)
    per_gpu = base.predicted.tokens_per_second / smallest
    efficiency = [plan.predicted.tokens_per_second / options.gpus / per_gpu for plan in plans]
    configured = None
    if config.cluster.engines:
        split = split_of(config, options.gpus)
        configured = Plan(split, predict(workload, split, gpu, constants))
    sections = [section_of(plan, config, workload, gpu, constants) for plan in plans]
    return Report(
        workload, sources, options.gpus, gpu, constants, fit, configured, plans, efficiency, smallest, sections
    )


def _workload(config: TrainConfig, **given: float | None) -> tuple[TrainConfig, Workload, dict[str, str]]:
    """Return ``config`` with a policy for each actor, its workload, and where that has its numbers from."""
    task, problems = task_of(config), Problems()
    config, actors = resolve_config(config, task, problems)
    problems.raise_any()
    return config, *workload_of(config, partial(tiny_model, config, task), actors, **given)


def section_of(plan: Plan, config: TrainConfig, workload: Workload, gpu: GPU, constants: Constants) -> dict[str, Any]:
    """Return the settings of ``plan``, to be merged into the config file."""
    split, tensor_parallel, ahead = plan.split, plan.split.tensor_parallel, plan.split.max_staleness or 0
    pool = next(iter(config.cluster.engines), "main")
    # vLLM gets the memory that weights leave, but no more than its rows can fill.
    left = constants.engine_memory_share * gpu.memory - workload.model.engine_bytes(tensor_parallel)
    cache = min(left, cache_bytes(workload, tensor_parallel, split.slots, full_length=True))
    options: dict[str, Any] = {"max_num_seqs": split.slots, "kv_cache_gb": round(cache / 2**30, 1) or 0.1}
    if tensor_parallel > 1:
        options["engine_args"] = {"tensor_parallel_size": tensor_parallel}
    settings: dict[str, Any] = {
        "cluster": {
            "backend": "ray",
            "learner": {"count": split.training, "gpus": 1.0},
            "engines": {pool: {"count": split.engines, "gpus": float(tensor_parallel), "options": options}},
        },
        "loop": {"max_staleness": ahead, "in_flight_updates": ahead > 0},
    }
    # The loop's own process plays the episodes until their calls take too much of a core.
    load = workload.rows / plan.predicted.step * constants.seconds_per_call
    running = math.ceil((ahead + 1) * workload.episodes)
    if load > WORKER_LOAD:
        workers = math.ceil(load / WORKER_LOAD)
        settings["cluster"]["arena"] = {"count": workers, "episodes": math.ceil(running / workers)}
    if running > config.rollout.max_concurrency:
        settings["rollout"] = {"max_concurrency": running}
    return settings


# ---------------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------------
def render(report: Report) -> str:
    """Write the report as text."""
    work, model, sources = report.workload, report.workload.model, report.sources
    trained = f"adapters of {model.adapter_parameters:,.0f}" if model.adapter_parameters else "all"
    lines = [
        f"modelled, not measured: a step on {report.gpus} {report.gpu.name}",
        "",
        f"model       {model.parameters:,.0f} parameters, {trained} trained; a token's cache has "
        f"{model.kv_bytes:,.0f} bytes",
        f"episodes    {work.episodes} a step: {work.groups} prompts x {work.group_size}",
        f"calls       {work.calls:g} per episode ({sources['calls']})",
        f"prompt      {work.prompt:,.0f} tokens ({sources['prompt']})",
        f"completion  {work.response:,.0f} tokens ({sources['response']}), the longest "
        f"{work.longest or work.response:,.0f}",
    ]
    if report.fit is not None:
        lines += ["", "refitted:", *(f"  {line}" for line in report.fit.changed)]
        lines += ["not refitted:", *(f"  {line}" for line in report.fit.kept)] if report.fit.kept else []
    if report.configured is not None:
        lines += ["", "as configured:", *_describe(report, report.configured)]
    for number, plan in enumerate(report.plans):
        lines += ["", f"plan {number + 1}:", *_describe(report, plan)]
        lines += [
            f"  scaling     {report.efficiency[number]:.2f} of the throughput per GPU of the best plan for "
            f"{report.smallest} GPUs"
        ]
        lines += [
            "",
            "  merge into the config:",
            "",
            *(f"    {line}".rstrip() for line in tomli_w.dumps(report.sections[number]).splitlines()),
        ]
    lines += ["", "constants:", *(f"  {row}" for row in _constants(report))]
    return "\n".join(lines)


def _describe(report: Report, plan: Plan) -> list[str]:
    split, predicted = plan.split, plan.predicted
    idle = report.gpus - split.gpus
    engines = f"{split.engines} engines of {split.tensor_parallel} GPU{'s' * (split.tensor_parallel > 1)}"
    weights = report.workload.model.engine_bytes(split.tensor_parallel)
    cache = cache_bytes(report.workload, split.tensor_parallel, predicted.rows_per_engine)
    train = training_bytes(report.workload, split.training, report.constants)
    return [
        f"  split       {engines}, {split.training} GPUs train{f', {idle} idle' if idle else ''}",
        f"  settings    {split.slots} rows per engine, max_staleness {split.max_staleness}",
        f"  step        {predicted.step:,.1f} s: sampling {predicted.sampling:,.1f}, one batch "
        f"{predicted.latency:,.1f}, training {predicted.training:,.1f}, sync {predicted.sync:,.1f} s",
        f"  throughput  {predicted.tokens_per_second:,.0f} sampled tokens/s",
        f"  bottleneck  {predicted.bottleneck}",
        f"  memory      engine {weights / 1e9:.1f} + {cache / 1e9:.1f} GB (cache), training {train / 1e9:.1f} GB a GPU",
    ]


def _constants(report: Report) -> list[str]:
    gpu = [(f"{report.gpu.name}.{name}", getattr(report.gpu, name)) for name in ("memory", "memory_bandwidth", "flops")]
    rows = [*gpu, *report.constants.rows()]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value:<8.4g} {value.unit:<14} {value.mark}: {value.source}" for name, value in rows]


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as plain data."""
    gpu = {name: getattr(report.gpu, name) for name in ("memory", "memory_bandwidth", "flops")}
    constants = [
        {"name": name, "value": float(value), "unit": value.unit, "mark": value.mark, "source": value.source}
        for name, value in (*((f"{report.gpu.name}.{key}", value) for key, value in gpu.items()),
                            *report.constants.rows())
    ]  # fmt: skip

    def plain(plan: Plan) -> dict[str, Any]:
        return {"split": asdict(plan.split), "predicted": asdict(plan.predicted)}

    return {
        "modelled": True,
        "gpus": report.gpus,
        "gpu": report.gpu.name,
        "workload": asdict(report.workload),
        "sources": report.sources,
        "refitted": None if report.fit is None else {"changed": report.fit.changed, "kept": report.fit.kept},
        "configured": None if report.configured is None else plain(report.configured),
        "plans": [
            {**plain(plan), "scaling_efficiency": efficiency, "against_gpus": report.smallest, "settings": section}
            for plan, efficiency, section in zip(report.plans, report.efficiency, report.sections, strict=True)
        ],
        "constants": constants,
    }


if __name__ == "__main__":
    main()
