"""``turnwise demo``: teams of two agents learn on this machine, from random weights, without a download.

The first part is ``split_clues``: each agent of the team sees half of the question, as does one agent that trains for
comparison. The second part is 4x4 sudoku: a proposer and a reviser see the same question. Each part makes a warm start
on imperfect demonstrations, measures held-out success, trains by reinforcement learning, and measures again. Its
settings are in ``demo_<task>.toml`` in the folder of this file. Under torchrun the models that learn by reinforcement
are sharded, and rank 0 does the rest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise import __version__
from turnwise.cli.options import EXIT_INTERRUPTED, EXIT_OK
from turnwise.report import write_report
from turnwise.run.build import Run, build_run, follow_config
from turnwise.run.checks import tiny_model, warm_start_rows
from turnwise.run.clients import check_client
from turnwise.run.ranks import announcer, join_ranks, leave_ranks
from turnwise.run.start import run_warm_start
from turnwise.tasks import build_task
from turnwise.train.checkpoint.progress import RunProgress
from turnwise.train.config.schema import TrainConfig
from turnwise.train.eval.evaluate import Evaluation, describe
from turnwise.train.log.lines import read_rows
from turnwise.train.log.run_log import RunLog
from turnwise.train.run_lock import check_not_running
from turnwise.train.validate import config_from_dict, load_config
from turnwise.utils import output
from turnwise.utils.files import make_private

TEAM, UNTRAINED = "team, trained", "team, untrained"

Build = Callable[[TrainConfig], Run]
Announce = Callable[[TrainConfig | None], TrainConfig | None]
"""Passes the config of the next run from rank 0 to the others, and ``None`` at the end."""


@dataclass(frozen=True, slots=True)
class DemoPart:
    """One task of the demo. ``alone`` are the task options of one agent that trains with GRPO for comparison.

    ``always``: the agent also trains without ``--compare``.
    """

    task: str
    about: str
    agent: str
    alone: Mapping[str, Any]
    always: bool = False


PARTS = (
    DemoPart(
        "split_clues",
        "two agents see one row of digits each; one sends three digits, the other answers the larger of each pair",
        "one agent that sees half",
        {"actors": ["writer"]},
        always=True,
    ),
    DemoPart(
        "sudoku",
        "a proposer fills in a 4x4 sudoku, a reviser fixes it, for two rounds",
        "one agent with four tries",  # as many calls as the team has
        {"actors": ["proposer"], "max_turns": 4},
    ),
)


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of a part's comparison."""

    name: str
    sampled_tokens: int
    result: Evaluation


def run(options: argparse.Namespace) -> int:
    from transformers.utils import logging

    logging.disable_progress_bar()  # the demo prints its own lines
    build, announce = build_run, None
    mesh = join_ranks(demo_config(PARTS[0], options.out, options.seed, options.client))
    if mesh is not None:
        announce = announcer(mesh)
        if mesh.get_rank():
            return follow_demo(mesh, announce)
        build = partial(build_sharded, mesh, announce)
    done = run_demo(options.out, options.seed, options.compare, options.client, build)
    if announce is not None:
        announce(None)
        leave_ranks()
    if done is None:
        output.tell("interrupted; run the same command again to continue")
        return EXIT_INTERRUPTED
    return EXIT_OK


def build_sharded(mesh: Any, announce: Announce, config: TrainConfig) -> Run:
    """Build a run on rank 0 of ``mesh``, whose other ranks :func:`follow_demo`."""
    announce(config)
    return build_run(config, mesh=mesh)


def follow_demo(mesh: Any, announce: Announce) -> int:
    """Train every run of the demo with rank 0."""
    while (config := announce(None)) is not None:
        follow_config(config, mesh)
    leave_ranks()
    return EXIT_OK


def run_demo(
    out: Path = Path("runs/demo"),
    seed: int = 0,
    compare: bool = False,
    client: str = "transformers",
    build: Build = build_run,
) -> dict[str, Any] | None:
    """Run the demo in the folder ``out`` and return its summary, also written to ``out/summary.json``.

    ``compare`` also trains one agent in the parts that don't always do so, with GRPO on as many sampled tokens as the
    team took. ``client`` is a name as in ``rollout.client``. ``build`` builds the runs that train. A finished demo in
    ``out`` is replaced; an interrupted or killed one continues. Returns ``None`` after Ctrl-C.
    """
    console = output.console(soft_wrap=True)
    check_client(demo_config(PARTS[0], out, seed, client))
    wanted = {"seed": seed, "client": client, "compare": compare, "version": __version__}
    prepare(out, wanted, console.print)
    summary: dict[str, Any] = {"seed": seed, "client": client, "parts": {}}
    curves = {}
    for number, part in enumerate(PARTS, start=1):
        folder = out / part.task
        console.print(Text.assemble((f"{number}  {part.task}", "bold"), f": {part.about}"))
        done = run_part(part, demo_config(part, folder / "team", seed, client), compare or part.always, console, build)
        if done is None:
            return None
        summary["parts"][part.task] = done
        curves[part.task] = {"team": folder / "team"} | (
            {part.agent: folder / "alone"} if part.agent in done["held_out"] else {}
        )
    drawn = plot(curves, out / "curve.png")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    reports = [write_report(out / part.task / "team") for part in PARTS]
    console.print(closing_words(summary, out, drawn, reports))
    return summary


def run_part(
    part: DemoPart, config: TrainConfig, compare: bool, console: Console, build: Build
) -> dict[str, Any] | None:
    """Warm start and train the team of ``part``, then one agent with ``compare``; print and return their results.

    Returns ``None`` after Ctrl-C.
    """
    say, out = console.print, config.run_dir.parent
    say("  supervised warm start on imperfect demonstrations")
    warm, seconds_warm_start = warm_started(config, out / "warm_start", console)
    before = held_out(variant(warm, out / "before", resume=False))
    say(f"  the warm-started team: held-out {describe(before)}, after {seconds_warm_start:.0f} s")
    compared = (
        "branches are compared at each turn"
        if config.rollout.branches > 1
        else "messages are compared by the team's success"
    )
    say(f"  AT-GRPO: each agent's {compared}; the client {config.rollout.client!r} samples")
    say(f"  learning curve, greedy success on {config.eval.num_prompts} validation questions:")
    if (team := trained(warm, build)) is None:
        return None
    progress, after = team
    say(f"  stopped at {progress.finished(warm)}")
    say(f"  the trained team: held-out {describe(after)}, after {progress.seconds:.0f} s")
    alone = held_out(variant(warm, out / "before", task_options={**warm.task_options, **part.alone}))
    rows = [
        Contender(f"{part.agent}, untrained", 0, alone),
        Contender(UNTRAINED, 0, before),
        Contender(TEAM, progress.sampled_tokens, after),
    ]
    if compare:
        say(f"  {part.agent}, with GRPO, on as many sampled tokens:")
        if (single := trained(single_agent(part, warm, out / "alone", progress.sampled_tokens), build)) is None:
            return None
        rows.insert(1, Contender(part.agent, single[0].sampled_tokens, single[1]))
    say(comparison(part.task, rows))
    return {**summarized(rows, progress, before, after), "seconds_warm_start": round(seconds_warm_start, 3)}


def held_out(config: TrainConfig) -> Evaluation:
    """Evaluate the weights that ``config`` starts from."""
    with closing(build_run(config)) as run:
        return run.evaluate()


def trained(config: TrainConfig, build: Build) -> tuple[RunProgress, Evaluation] | None:
    """Train, and return the progress and the held-out success after it. ``None`` after Ctrl-C."""
    with closing(build(config)) as run:
        progress = run.train()
        return None if run.trainer.interrupted else (progress, run.evaluate())


def summarized(
    rows: Sequence[Contender], progress: RunProgress, before: Evaluation, after: Evaluation
) -> dict[str, Any]:
    """Return a part of ``summary.json``: the team before and after, and all contenders."""
    return {
        "success_before": before.success,
        "success_after": after.success,
        "questions": after.episodes,
        "episodes": progress.episodes,
        "sampled_tokens": progress.sampled_tokens,
        "steps": progress.step,
        "seconds_training": round(progress.seconds, 3),
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
        raise ValueError(f"out={str(out)!r}: this folder holds other files; name a new one")
    wanted = json.dumps(demo)
    if marker.exists() and (marker.read_text() != wanted or (out / "summary.json").exists()):
        check_not_running(out)
        say(f"{out}: the earlier demo there is deleted; --out names another folder")
        shutil.rmtree(out)
    make_private(out)
    marker.write_text(wanted)


def demo_config(part: DemoPart, run_dir: Path, seed: int, client: str = "transformers") -> TrainConfig:
    """Load the settings of ``part`` with a run folder, a seed and a client."""
    with resources.as_file(resources.files("turnwise.cli.run") / f"demo_{part.task}.toml") as path:
        return load_config(path, {"run_dir": str(run_dir), "seed": seed, "rollout.client": client})


def warm_started(config: TrainConfig, folder: Path, console: Console) -> tuple[TrainConfig, float]:
    """Train the tiny model on demonstrations, save it in ``folder``, and return the config that starts from it.

    Also returns the seconds that the warm start took. A finished warm start in ``folder`` is used as it is.
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


def single_agent(part: DemoPart, warm: TrainConfig, run_dir: Path, sampled_tokens: int) -> TrainConfig:
    """Return the config of one agent with GRPO, whose groups have as many episodes as the team's have."""
    rollout = warm.rollout.model_dump(exclude={"tree"})
    return variant(
        warm,
        run_dir,
        task_options={**warm.task_options, **part.alone},
        rollout={**rollout, "group_size": warm.rollout.group_size * warm.rollout.branches, "branches": 1},
        credit={"rule": "grpo"},
        max_sampled_tokens=sampled_tokens,
        steps=100_000,
        eval={**warm.eval.model_dump(), "target_success": None},
    )


def variant(config: TrainConfig, run_dir: Path, **changes: Any) -> TrainConfig:
    """Return ``config`` with another run folder, and with whole sections replaced."""
    return config_from_dict({**config.model_dump(mode="json"), "run_dir": str(run_dir), **changes})


def comparison(title: str, rows: list[Contender]) -> Table:
    table = Table(title=f"{title}: held-out success, greedy", title_justify="left")
    table.add_column("")
    for name in ("tokens", "success", "95% interval"):
        table.add_column(name, justify="right")
    for row in rows:
        interval = f"{row.result.low:.1%} – {row.result.high:.1%}"
        table.add_row(row.name, f"{row.sampled_tokens:,}", f"{row.result.success:.1%}", interval)
    return table


def closing_words(summary: Mapping[str, Any], out: Path, curve: str, reports: Sequence[Path]) -> str:
    """Return the last message of the demo: its results, and its files."""
    lines = []
    for task, part in summary["parts"].items():
        before, after = part["held_out"][UNTRAINED], part["held_out"][TEAM]
        minutes = (part["seconds_warm_start"] + part["seconds_training"]) / 60
        lines.append(
            f"{task}: held-out success went from {before['success']:.1%} ({before['low']:.1%} – {before['high']:.1%}) "
            f"to {after['success']:.1%} ({after['low']:.1%} – {after['high']:.1%}): {part['steps']} steps of AT-GRPO, "
            f"{part['sampled_tokens']:,} sampled tokens, {minutes:.1f} minutes with the warm start."
        )
    paths = "\n                       ".join(str(report) for report in reports)
    last = out / PARTS[-1].task / "team"
    return "\n".join(lines) + (
        "\nLook next at\n"
        f"  the learning curves  {curve}\n"
        f"  what the teams wrote  {paths}\n"
        f"                       or `turnwise view {last}`\n"
        f"  the figures          {out / 'summary.json'}\n"
        "  your own team        `turnwise init my-team`, and docs/training.md"
    )


def plot(curves: Mapping[str, Mapping[str, Path]], path: Path) -> str:
    """Plot each part's validation success over sampled tokens in one PNG; return its path, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "not drawn: matplotlib is missing; pip install 'turnwise[logging]'"
    figure = Figure(figsize=(5 * len(curves), 4), layout="constrained")
    for axes, (task, folders) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for name, folder in folders.items():
            rows = [row for row in read_rows(folder / "metrics.jsonl") if "validation" in row]
            tokens = [row["total_sampled_tokens"] for row in rows]
            axes.plot(tokens, [row["validation"] for row in rows], label=name)
        axes.set(
            title=task, xlabel="sampled tokens", ylabel="success, validation (greedy)", xlim=(0, None), ylim=(0, 1.02)
        )
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return str(path)
