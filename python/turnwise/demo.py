"""``turnwise demo``: a team of two agents learns 4x4 sudoku on this machine, from random weights, without a download.

Warm start on imperfect demonstrations → held-out success → AT-GRPO with tree sampling → held-out success again.
The settings stand in ``demo.toml`` beside this file.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turnwise.run import Run, build_run, describe, load_models, run_warm_start
from turnwise.tasks import build_task
from turnwise.train.config import TrainConfig, config_from_dict, load_config
from turnwise.train.evaluate import Evaluation
from turnwise.train.run_log import RunLog, read_metrics

ALONE = {"actors": ["proposer"], "max_turns": 1}
"""The single agent of the comparison: the same warm-started weights and the same prompt, alone, with one try."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the comparison."""

    name: str
    sampled_tokens: int
    result: Evaluation


def run_demo(out: Path = Path("runs/demo"), seed: int = 0, compare: bool = False) -> dict[str, Any]:
    """Run the demo in the folder ``out``, afresh, and return its summary (also written to ``out/summary.json``).

    ``compare`` also trains a single agent with GRPO on as many sampled tokens as the team took.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # the demo's own lines tell what happens
    console = Console()
    shutil.rmtree(out, ignore_errors=True)
    config = demo_config(out / "team", seed)
    console.print(
        f"[bold]1[/] warm start: {config.warm_start.steps} steps on imperfect demonstrations", highlight=False
    )
    warm, seconds_warm_start = warm_started(config, out / "warm_start")
    team = build_run(warm, log=RunLog(warm.run_dir, warm.steps, console=console))
    before = team.evaluate()
    console.print(f"  the untrained team, {describe(before)}, after {seconds_warm_start:.0f} s", highlight=False)
    console.print("[bold]2[/] AT-GRPO: each agent's branches are compared at each turn", highlight=False)
    started = time.perf_counter()
    progress = team.train()
    seconds_training = time.perf_counter() - started
    after = team.evaluate()
    console.print(f"  the trained team, {describe(after)}, after {seconds_training:.0f} s", highlight=False)
    alone = build_run(variant(warm, out / "alone", task_options=ALONE, steps=0))
    rows = [
        Contender("warm start, one agent alone", 0, alone.evaluate()),
        Contender("team, not trained", 0, before),
        Contender("team + AT-GRPO", progress.sampled_tokens, after),
    ]
    curves = {"team + AT-GRPO": warm.run_dir}
    if compare:
        console.print("[bold]3[/] one agent with GRPO, on as many sampled tokens", highlight=False)
        single = single_agent(warm, out / "single", progress.sampled_tokens, console)
        rows.insert(1, Contender("one agent + GRPO", single.train().sampled_tokens, single.evaluate()))
        curves["one agent + GRPO"] = single.config.run_dir
    summary = {
        "success_before": before.success,
        "success_after": after.success,
        "questions": after.episodes,
        "episodes": progress.episodes,
        "sampled_tokens": progress.sampled_tokens,
        "steps": progress.step,
        "seconds_warm_start": round(seconds_warm_start, 1),
        "seconds_training": round(seconds_training, 1),
        "seed": seed,
        "held_out": {
            row.name: {"success": row.result.success, "low": row.result.low, "high": row.result.high,
                       "sampled_tokens": row.sampled_tokens}
            for row in rows
        },
    }  # fmt: skip
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    console.print(comparison(rows))
    console.print(f"curve: {plot(curves, before.success, out / 'curve.png')}", highlight=False)
    console.print(f"summary: {out / 'summary.json'}", highlight=False)
    return summary


def demo_config(run_dir: Path, seed: int) -> TrainConfig:
    """``demo.toml`` with a folder and a seed."""
    with resources.as_file(resources.files("turnwise") / "demo.toml") as path:
        return load_config(path, {"run_dir": str(run_dir), "seed": seed})


def warm_started(config: TrainConfig, folder: Path) -> tuple[TrainConfig, float]:
    """Train the tiny model on demonstrations into ``folder``; returns the config that starts there, and seconds."""
    started = time.perf_counter()
    task = build_task(config.task, {"seed": config.seed, **config.task_options})
    tokenizer, models = load_models(config, task)
    run_warm_start(config, task, tokenizer, models, lambda line: None)
    models["default"].save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    policies = {"default": {**config.policies["default"].model_dump(), "path": str(folder)}}
    changed = variant(config, config.run_dir, policies=policies, warm_start={"steps": 0})
    return changed, time.perf_counter() - started


def single_agent(warm: TrainConfig, run_dir: Path, sampled_tokens: int, console: Console) -> Run:
    """One agent under GRPO: groups are whole episodes of one puzzle, as many as the team's tree has branches."""
    rollout = {**warm.rollout.model_dump(), "copies": warm.rollout.branches, "branches": 1}
    config = variant(
        warm,
        run_dir,
        task_options={**warm.task_options, **ALONE},
        rollout=rollout,
        credit={"rule": "grpo"},
        max_sampled_tokens=sampled_tokens,
        steps=100_000,
        max_seconds=None,
    )
    return build_run(config, log=RunLog(run_dir, config.steps, console=console))


def variant(config: TrainConfig, run_dir: Path, **changes: Any) -> TrainConfig:
    """``config`` in another folder, with whole sections replaced."""
    return config_from_dict({**config.model_dump(mode="json"), "run_dir": str(run_dir), **changes})


def comparison(rows: list[Contender]) -> Table:
    table = Table(title="Held-out success, greedy", title_justify="left")
    table.add_column("")
    for name in ("sampled tokens", "success", "95% interval"):
        table.add_column(name, justify="right")
    for row in rows:
        interval = f"{row.result.low:.1%} – {row.result.high:.1%}"
        table.add_row(row.name, f"{row.sampled_tokens:,}", f"{row.result.success:.1%}", interval)
    return table


def plot(curves: Mapping[str, Path], start: float, path: Path) -> str:
    """Validation success over sampled tokens as a PNG; returns its path, or the reason why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "not drawn: matplotlib is missing; pip install 'turnwise[plot]'"
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, folder in curves.items():
        lines = [line for line in read_metrics(folder) if "validation" in line]
        axes.plot([line["total_sampled_tokens"] for line in lines], [line["validation"] for line in lines], label=name)
    axes.axhline(start, color="grey", linestyle=":", label="team, not trained (held-out)")
    axes.set(xlabel="sampled tokens", ylabel="success on validation puzzles (greedy)", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)
    return str(path)
