"""Runs cells of the learning table: ``make learning CELLS='views/*'``, or

    python bench/learning/run.py --list                       # every cell, and whether its result is there
    python bench/learning/run.py 'views/split_clues/*'        # those that have no result yet; --again runs all
    python bench/learning/run.py 'sweep/*' --jobs 2           # the sweeps that chose the settings

A cell is one process, with one thread unless its config sets more; ``--jobs`` of them run side by side. Each writes its
row when it ends, so an interrupted table continues where it stopped. Warm starts are made once for all cells that share
them, in ``--work``. The cells `real/*` need ``make model`` and the packages of their example.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cells import Cell, SeveralWarmStart, WarmStart, merged, read_results, result_of  # noqa: E402
from common import environment  # noqa: E402
from experiments import CELLS  # noqa: E402

WORK = Path("runs/learning")
SERIES = (
    "grad_norm",
    "entropy",
    "exploitability",
    "unreadable",
    "truncated",
    "pass_rate",
    "hard",
    "explained_variance",
    "loss_observations",
    "kl",
    "entropy_coef",
    "second_moment",
    "off_policy",
    "top_entropy",
)
SWEEP = "sweep"
SHOWN = 6
"""Questions whose answers a real model's row has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", nargs="*", default=["*"], help="patterns of names (default: all)")
    parser.add_argument("--list", action="store_true", help="list the cells, and run nothing")
    parser.add_argument("--again", action="store_true", help="also run cells that have a result")
    parser.add_argument("--keep", action="store_true", help="keep the results as they are: print the new ones alone")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time, one thread each")
    parser.add_argument("--work", type=Path, default=WORK, help=f"folder of warm starts and runs (default {WORK})")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(execute(find(options.one), options.work)))
    elif options.warm:
        warm_folder(next(cell.warm for cell in CELLS if cell.warm and cell.warm.key() == options.warm), options.work)
    else:
        chosen = [cell for cell in CELLS if any(fnmatch.fnmatch(cell.name, pattern) for pattern in options.cells)]
        if not chosen:
            parser.error(f"no cell matches {' '.join(options.cells)}; --list shows all")
        run_all(chosen, options) if not options.list else list_all(chosen)


def find(name: str) -> Cell:
    return next(cell for cell in CELLS if cell.name == name)


def list_all(cells: Sequence[Cell]) -> None:
    for cell in cells:
        print(f"{cell.name:<60} {described(result_of(cell))}")


def run_all(cells: Sequence[Cell], options: argparse.Namespace) -> None:
    """Make the warm starts, then run the cells that need it, ``options.jobs`` at a time."""
    todo = [cell for cell in cells if options.again or result_of(cell) is None]
    warms = dict.fromkeys(cell.warm.key() for cell in todo if cell.warm is not None)
    missing = [key for key in warms if not (options.work / "warm" / key / "seconds.json").exists()]
    started, failed = time.perf_counter(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda key: child(["--warm", key], options.work), missing))
        running = {pool.submit(child, ["--one", cell.name], options.work): cell for cell in todo}
        for done, future in enumerate(as_completed(running), start=1):
            cell, told = running[future], "failed; the reason is above"
            if future.exception() is not None:
                failed.append(cell.name)
            else:
                row = json.loads(future.result().splitlines()[-1])
                told = described(row)
                if not options.keep:
                    write(cell, row)
            so_far = f"{time.perf_counter() - started:.0f} s so far"
            print(f"{done}/{len(todo)} {cell.name}: {told}; {so_far}", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(todo)} cells failed: {' '.join(failed)}")


def described(row: dict[str, Any] | None) -> str:
    """Return a result in a few words, ``-`` without one."""
    if row is None:
        return "-"
    interval = f"{row['low']:.1%} to {row['high']:.1%}"
    return f"{row['success']:.1%} ({interval}), {row['sampled_tokens']:,} tokens, {row['seconds']:.0f} s"


def child(arguments: Sequence[str], work: Path) -> str:
    """Run this file in a process of its own, and return what it printed."""
    command = [sys.executable, "-P", str(HERE / "run.py"), *arguments, "--work", str(work)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {done.returncode}")
    return done.stdout


def write(cell: Cell, row: dict[str, Any]) -> None:
    """Write the row of ``cell``, in the place of an older one. Other processes may write the same file."""
    cell.file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(cell.file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = [old for old in read_results(cell.file) if old["cell"] != cell.name] + [row]
        lines = "".join(json.dumps(each) + "\n" for each in sorted(rows, key=lambda each: each["cell"]))
        temporary = cell.file.with_suffix(".tmp")
        temporary.write_text(lines)
        temporary.replace(cell.file)
    finally:
        os.close(folder)  # which unlocks it


# ---------------------------------------------------------------------------------------------------------------------
# One cell
# ---------------------------------------------------------------------------------------------------------------------
def execute(cell: Cell, work: Path) -> dict[str, Any]:
    """Train and evaluate one cell, and return its row.

    The evaluation questions are asked here and nowhere else. A sweep never asks them.
    """
    import torch
    from transformers.utils import logging

    from turnwise.run.build import build_run
    from turnwise.train.log.lines import read_metrics
    from turnwise.train.validate import config_from_dict

    threads = cell.config.get("threads", 1)
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    folder = work / cell.name
    settings = {"seed": cell.seed, "threads": threads, "run_dir": str(folder), "resume": False}
    quiet = {"log": {"rollouts_per_step": 0, "progress": False}}
    start = {} if cell.warm is None else {"policies": {"default": {"path": str(warm_folder(cell.warm, work))}}}
    config = config_from_dict(merged(quiet, cell.config, start, settings))
    clear(folder)
    with to_stderr(), closing(build_run(config)) as run:
        progress = run.train() if config.steps else None
        row: dict[str, Any] = {"cell": cell.name, "key": cell.key()}
        if cell.question == SWEEP:
            row |= validated(read_metrics(folder), cell.config["eval"]["num_prompts"])
        else:
            row |= measured(run.evaluate())
        if cell.question == "real":
            row["transcripts"] = transcripts(run)
        for name, change in changes(cell).items():
            change(run)
            row[name] = measured(run.evaluate())
    lines = read_metrics(folder) if config.steps else []
    row |= {
        "sampled_tokens": progress.sampled_tokens if progress else 0,
        "steps": progress.step if progress else 0,
        "episodes": progress.episodes if progress else 0,
        "seconds": round(progress.seconds, 1) if progress else 0.0,
        "learning_rate": config.update.lr,
        "curve": [[line["total_sampled_tokens"], line["validation"]] for line in lines if "validation" in line],
        "series": {name: series(lines, name) for name in SERIES},
        "rewards": rewards(lines),
        "seconds_warm_start": seconds_of(cell.warm, work),
        **({"tokens_by_task": tokens_by_task(lines, config.tasks)} if config.tasks else {}),
        "config": cell.config,
        "environment": environment(threads),
    }
    return row


def tokens_by_task(lines: Sequence[dict[str, Any]], tasks: Sequence[str]) -> dict[str, float]:
    return {task: sum(line.get(f"{task}/sampled_tokens", 0) for line in lines) for task in tasks}


def measured(result: Any) -> dict[str, Any]:
    """Return success with its interval, each question's outcome, and the metrics of an evaluation, actors' shares
    of mended and broken answers among them."""
    from turnwise.train.eval.ablate import addition_metrics

    metrics = {**result.metrics, **addition_metrics(result)}
    by_task = {task: [at.mean, at.low, at.high] for task, at in result.by_task.items()}
    return {
        "success": result.success,
        "low": result.low,
        "high": result.high,
        "questions": result.episodes,
        "failed": result.failed,
        "values": result.values,
        "metrics": {name: round(value, 4) for name, value in metrics.items()},
        **({"by_task": by_task} if by_task else {}),
    }


def transcripts(run: Any) -> list[dict[str, Any]]:
    """Return what the actors say to the first held-out questions, which the evaluation has asked already."""
    from turnwise.utils.threads import run_to_end

    view = run.arena.evaluation(sampling=run.arena.sampling.with_(temperature=0.0))
    results = run_to_end(view.generate_rollouts(run.held_out.requests[:SHOWN]))
    return [
        {
            "question": result.rollout.artifact,
            "said": [[step.actor_id, step.completion_text] for step in result.rollout.steps],
            "metrics": result.rollout.metrics,
        }
        for result in results
    ]


def validated(lines: Sequence[dict[str, Any]], questions: int) -> dict[str, Any]:
    """Return the last validation of a run, with its interval."""
    from turnwise.train.eval.statistics import wilson

    success = next(line["validation"] for line in reversed(lines) if "validation" in line)
    low, high = wilson(success, questions)
    return {"success": success, "low": low, "high": high, "questions": questions}


def changes(cell: Cell) -> dict[str, Callable[[Any], None]]:
    """Return the changes to a trained run that are also evaluated, by name."""
    if cell.swap is None:
        return {}
    first, second = cell.swap

    def swap(run: Any) -> None:
        actors = run.arena.actors
        one, other = actors[first], actors[second]
        actors[first], actors[second] = replace(one, policy=other.policy), replace(other, policy=one.policy)

    return {"swapped": swap}


def series(lines: Sequence[dict[str, Any]], name: str) -> list[list[float]]:
    """Return ``[step, value]`` of each step that has a metric of this name: of the run, of a policy, or of an actor."""
    found = [(line["step"], key, line[key]) for line in lines for key in sorted(line) if name in key.split("/")]
    chosen = min((key for _, key, _ in found), key=lambda key: (key.count("/"), key), default="")
    return [[step, round(value, 6)] for step, key, value in found if key == chosen]


def rewards(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the values of each reward function by step, as ``"right/solver"``; others' metrics have longer names."""
    steps = [line for line in lines if "success" in line]
    names = [key for key in (steps[0] if steps else ()) if key.startswith("metric/") and key.count("/") == 2]
    found = {name: [round(line[name], 4) if name in line else None for line in steps] for name in names}
    return {name.removeprefix("metric/"): values for name, values in found.items()}


def seconds_of(warm: WarmStart | None, work: Path) -> float:
    return 0.0 if warm is None else json.loads((work / "warm" / warm.key() / "seconds.json").read_text())


def warm_folder(warm: WarmStart, work: Path) -> Path:
    """Return the folder of the warm-started model; train it if it is not there."""
    from rich.console import Console

    from turnwise.run.checks import task_of, tiny_model, warm_start_rows
    from turnwise.run.start import run_warm_start
    from turnwise.train.log.run_log import RunLog
    from turnwise.train.validate import config_from_dict

    folder = work / "warm" / warm.key()
    done = folder / "seconds.json"
    if not done.exists():
        import torch

        torch.set_num_threads(1)
        started = time.perf_counter()
        left_out = {"settings", "policies", *(("task", "task_options") if isinstance(warm, SeveralWarmStart) else ())}
        made = {key: value for key, value in asdict(warm).items() if key not in left_out}
        config = config_from_dict(
            {**made, "warm_start": warm.settings, "policies": warm.policies, "run_dir": str(folder / "run")}
        )
        task = task_of(config)
        tokenizer, model = tiny_model(config, task)
        rows = warm_start_rows(config, task)
        log = RunLog(folder, 0, console=Console(stderr=True, soft_wrap=True), progress=False)
        run_warm_start(config, rows, task.actors, tokenizer, {"default": model}, log)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        done.write_text(json.dumps(round(time.perf_counter() - started, 1)))
    return folder


def clear(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def to_stderr() -> Any:
    """Send what a run prints to stderr: stdout is the row."""
    from contextlib import redirect_stdout

    return redirect_stdout(sys.stderr)


if __name__ == "__main__":
    main()
