"""Whole training steps of the sudoku team of ``turnwise demo``: seconds of sampling and update, and tokens per second.

Each run is a process with the demo's settings, from one warm start. The first two steps are not counted. ``--other``
names the Python of another installation, such as an older commit's; both then run in turns, on equal weights.

    python bench/bench_step.py --threads 1
    python bench/bench_step.py --threads 1 --other /path/to/old/.venv/bin/python --other_name 06fad45
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from common import finish

SKIPPED = 2
"""Steps at the start that warm caches up."""
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--steps", type=int, default=6, help="steps that count, of each of three runs (default 6)")
    parser.add_argument("--quick", action="store_true", help="one run of one step, from an untrained model")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="the demo runs on a CPU")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each installation, in turns")
    parser.add_argument("--other", help="the Python of another installation")
    parser.add_argument("--other_name", default="other", help="its name in the table")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 1
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    finish("step", "steps of the demo's sudoku team", rows, options)


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run every installation in turns, and return a row for each."""
    pythons = {"turnwise": sys.executable} | ({options.other_name: options.other} if options.other else {})
    warm_steps = 2 if options.quick else 400
    train(sys.executable, folder / "warm", options.threads, **{"steps": 0, "warm_start.steps": warm_steps})
    start = {"policies.default.path": folder / "warm" / "policies" / "default", "warm_start.steps": 0}
    quick = {"rollout.prompts_per_step": 2, "health.start_questions": 0} if options.quick else {}
    steps = SKIPPED + options.steps
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for number in range(options.rounds):
        for name, python in pythons.items():
            run = folder / f"{name}-{number}"
            train(python, run, options.threads, steps=steps, **start, **quick)
            lines[name] += read(run)[SKIPPED:]
    base = median(line["tokens_per_second"] for line in lines[list(pythons)[-1]])
    rows = []
    for name, of_steps in lines.items():
        middle = {
            key: median(line[key] for line in of_steps)
            for key in ("seconds_rollout", "seconds_update", "sampled_tokens", "tokens_per_second")
        }
        ratio = middle["tokens_per_second"] / base
        rows.append({"method": name, "steps": len(of_steps), **middle, "× last": ratio})
    return rows


def train(python: str, folder: Path, threads: int, **changes: Any) -> None:
    """Train with the demo's settings in a process of its own."""
    with resources.as_file(resources.files("turnwise.cli.run") / "demo_sudoku.toml") as settings:
        command = [python, "-P", "-m", "turnwise", "train", str(settings), "--run_dir", str(folder)]
        given = {
            "threads": threads,
            "rollout.tree.select": "first",
            "eval.every": 1000,
            "eval.num_prompts": 1,
            "checkpoint.every": 0,
            **changes,
        }
        command += [text for key, value in given.items() for text in (f"--{key}", str(value))]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the training steps in ``folder``."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["step"] > 0 and "seconds_update" in line]


if __name__ == "__main__":
    main()
