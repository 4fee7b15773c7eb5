"""``turnwise demo``: a team of two agents learns 4x4 sudoku on this machine, from random weights, without a download.

Warm start on imperfect demonstrations → held-out success → AT-GRPO with tree sampling → held-out success again.
The settings stand in ``demo.toml`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turnwise import __version__
from turnwise.cli.options import EXIT_INTERRUPTED, EXIT_OK
from turnwise.report import write_report
from turnwise.run.build import build_run
from turnwise.run.checks import tiny_model, warm_start_rows
from turnwise.run.clients import check_client
from turnwise.run.start import run_warm_start
from turnwise.tasks import build_task
from turnwise.train.checkpoint.progress import RunProgress
from turnwise.train.config.schema import TrainConfig
from turnwise.train.eval.evaluate import Evaluation, describe
from turnwise.train.log.run_log import RunLog, read_metrics
from turnwise.train.run_folder import refuse_running
from turnwise.train.validate import config_from_dict, load_config

ALONE = {"actors": ["proposer"], "max_turns": 1}
"""Options of the single agent of the comparison: the same warm-started weights and the same prompt, with one try."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the comparison."""

    name: str
    sampled_tokens: int
    result: Evaluation


def run(options: argparse.Namespace) -> int:
    if run_demo(options.out, options.seed, options.compare, options.client) is None:
        print("turnwise: interrupted; run the same command again to continue", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


def run_demo(
    out: Path = Path("runs/demo"), seed: int = 0, compare: bool = False, client: str = "transformers"
) -> dict[str, Any] | None:
    """Run the demo in the folder ``out`` and return its summary, also written to ``out/summary.json``.

    ``compare`` also trains a single agent with GRPO on as many sampled tokens as the team took. ``client`` is a name as
    in ``rollout.client``. A finished demo in ``out`` is replaced; an interrupted or killed one continues. Returns
    ``None`` after Ctrl-C.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # the demo prints its own lines
    console = Console(soft_wrap=True, highlight=False)
    say = console.print
    config = demo_config(out / "team", seed, client)
    check_client(config)
    # Warm start, then train the team, with an evaluation before and after.
    prepare(out, {"seed": seed, "client": client, "version": __version__}, say)
    say("[bold]1[/] supervised warm start on imperfect demonstrations")
    warm, seconds_warm_start = warm_started(config, out / "warm_start", console)
    before = held_out(variant(warm, out / "before", resume=False))
    say(f"  the warm-started team: held-out {describe(before)}, after {seconds_warm_start:.0f} s")
    say(f"[bold]2[/] AT-GRPO: each agent's branches are compared at each turn; the client {client!r} samples")
    say(f"  learning curve, greedy success on {config.eval.num_prompts} validation puzzles:")
    if (team := trained(warm)) is None:
        return None
    progress, after = team
    say(f"  stopped at {progress.finished(warm)}")
    say(f"  the trained team: held-out {describe(after)}, after {progress.seconds:.0f} s")
    # The table of contenders, with a trained single agent on request.
    alone = held_out(variant(warm, out / "before", task_options={**warm.task_options, **ALONE}))
    rows = [
        Contender("warm start, one agent alone", 0, alone),
        Contender("team, not trained", 0, before),
        Contender("team + AT-GRPO", progress.sampled_tokens, after),
    ]
    curves = {"team + AT-GRPO": warm.run_dir}
    if compare:
        say("[bold]3[/] one agent with GRPO, on as many sampled tokens")
        if (single := trained(single_agent(warm, out / "single", progress.sampled_tokens))) is None:
            return None
        rows.insert(1, Contender("one agent + GRPO", single[0].sampled_tokens, single[1]))
        curves["one agent + GRPO"] = out / "single"
    # Write and print the results.
    summary = summarized(rows, progress, before, after)
    summary |= {"seconds_warm_start": round(seconds_warm_start, 1), "seed": seed, "client": client}
    say(comparison(rows))
    drawn = plot(curves, out / "curve.png")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    say(closing_words(summary, warm.run_dir, drawn, out / "summary.json", write_report(warm.run_dir)))
    return summary


def held_out(config: TrainConfig) -> Evaluation:
    """Evaluate the weights that ``config`` starts from."""
    with closing(build_run(config)) as run:
        return run.evaluate()


def trained(config: TrainConfig) -> tuple[RunProgress, Evaluation] | None:
    """Train, and return the progress and the held-out success after it. ``None`` after Ctrl-C."""
    with closing(build_run(config)) as run:
        progress = run.train()
        return None if run.trainer.interrupted else (progress, run.evaluate())


def summarized(
    rows: Sequence[Contender], progress: RunProgress, before: Evaluation, after: Evaluation
) -> dict[str, Any]:
    """Return the contents of ``summary.json``: the team before and after, and all contenders."""
    return {
        "success_before": before.success,
        "success_after": after.success,
        "questions": after.episodes,
        "episodes": progress.episodes,
        "sampled_tokens": progress.sampled_tokens,
        "steps": progress.step,
        "seconds_training": round(progress.seconds, 1),
        "held_out": {
            row.name: {"success": row.result.success, "low": row.result.low, "high": row.result.high,
                       "sampled_tokens": row.sampled_tokens}
            for row in rows
        },
    }  # fmt: skip


def prepare(out: Path, demo: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Prepare ``out``: delete a finished or a different demo there, but keep this demo if it is unfinished.

    Raises ``ValueError`` for a folder with other files, and for one that a demo is writing.
    """
    marker = out / "demo.json"
    if out.is_dir() and any(out.iterdir()) and not marker.exists():
        raise ValueError(f"out={str(out)!r}: this folder holds other things; name a new one")
    wanted = json.dumps(demo)
    if marker.exists() and (marker.read_text() != wanted or (out / "summary.json").exists()):
        refuse_running(out)
        say(f"{out}: the demo that was there is deleted; --out names another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(wanted)


def demo_config(run_dir: Path, seed: int, client: str = "transformers") -> TrainConfig:
    """Load ``demo.toml`` with a run folder, a seed and a client."""
    with resources.as_file(resources.files("turnwise.cli.commands") / "demo.toml") as path:
        return load_config(path, {"run_dir": str(run_dir), "seed": seed, "rollout.client": client})


def warm_started(config: TrainConfig, folder: Path, console: Console) -> tuple[TrainConfig, float]:
    """Train the tiny model on demonstrations, save it in ``folder``, and return the config that starts there, and
    seconds.

    A finished warm start in ``folder`` is used as it is.
    """
    done = folder / "seconds.json"
    if not done.exists():
        started = time.perf_counter()
        task = build_task(config.task, {"seed": config.seed, **config.task_options})
        tokenizer, model = tiny_model(config, task)
        log = RunLog(folder, 0, console=console, progress=False)
        run_warm_start(config, warm_start_rows(config, task), task.actors, tokenizer, {"default": model}, log)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        done.write_text(json.dumps(time.perf_counter() - started))
    policies = {"default": {**config.policies["default"].model_dump(), "path": str(folder)}}
    changed = variant(config, config.run_dir, policies=policies, warm_start={"steps": 0})
    return changed, json.loads(done.read_text())


def single_agent(warm: TrainConfig, run_dir: Path, sampled_tokens: int) -> TrainConfig:
    """Return the config of one agent with GRPO, whose groups are as many episodes as the team's tree has branches."""
    rollout = warm.rollout.model_dump(exclude={"tree"})
    return variant(
        warm,
        run_dir,
        task_options={**warm.task_options, **ALONE},
        rollout={**rollout, "group_size": warm.rollout.branches, "branches": 1},
        credit={"rule": "grpo"},
        max_sampled_tokens=sampled_tokens,
        steps=100_000,
        eval={**warm.eval.model_dump(), "target_success": None},
    )


def variant(config: TrainConfig, run_dir: Path, **changes: Any) -> TrainConfig:
    """Return ``config`` with another run folder, and with whole sections replaced."""
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


def closing_words(summary: Mapping[str, Any], run_dir: Path, curve: str, file: Path, report: Path) -> str:
    """Return the last message of the demo: its results, and the files to look at."""
    before, after = summary["held_out"]["team, not trained"], summary["held_out"]["team + AT-GRPO"]
    minutes = (summary["seconds_warm_start"] + summary["seconds_training"]) / 60
    return (
        f"Held-out success went from {before['success']:.1%} ({before['low']:.1%} – {before['high']:.1%}) to "
        f"{after['success']:.1%} ({after['low']:.1%} – {after['high']:.1%}): {summary['steps']} steps of AT-GRPO, "
        f"{summary['sampled_tokens']:,} sampled tokens, {minutes:.1f} minutes with the warm start.\n"
        "Look next at\n"
        f"  the learning curve   {curve}\n"
        f"  what the team said   {report}, or `turnwise view {run_dir}`\n"
        f"  the figures          {file}\n"
        "  a run of your own    docs/training.md, and `turnwise train --help`"
    )


def plot(curves: Mapping[str, Path], path: Path) -> str:
    """Plot validation success over sampled tokens as a PNG, and return its path, or the reason why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "not drawn: matplotlib is missing; pip install 'turnwise[plot]'"
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, folder in curves.items():
        lines = [line for line in read_metrics(folder) if "validation" in line]
        axes.plot([line["total_sampled_tokens"] for line in lines], [line["validation"] for line in lines], label=name)
    axes.set(xlabel="sampled tokens", ylabel="success on validation puzzles (greedy)", xlim=(0, None), ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return str(path)
