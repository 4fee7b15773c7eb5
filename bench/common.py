"""What all benchmarks share: interleaved medians, the machine's copy bandwidth, a markdown table and JSON rows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from turnwise import _C, __version__

RESULTS = Path(__file__).parent / "results"


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds; the median counts")
    parser.add_argument(
        "--json", type=Path, help="append the rows to this file (default: bench/results/<name>.local.json)"
    )
    return parser.parse_args()


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int, seconds_per_round: float = 0.01) -> dict[str, float]:
    """Seconds per call of each, in turns, so that a busy minute hurts all alike."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, int(seconds_per_round / max(time.perf_counter() - start, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            samples[name].append((time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(times) for name, times in samples.items()}


class RotatingCopy:
    """A copy of ``bytes_moved`` (read and written together) between buffers that rotate through memory, so that what
    fits a cache once doesn't stay there: the same treatment as the op's inputs."""

    def __init__(self, bytes_moved: int, working_set: int = 192 << 20) -> None:
        count = max(bytes_moved // 8, 1)
        self.pairs = [
            (torch.zeros(count), torch.zeros(count)) for _ in range(max(1, min(64, working_set // max(bytes_moved, 1))))
        ]
        self.turn = 0

    def __call__(self) -> None:
        source, target = self.pairs[self.turn % len(self.pairs)]
        self.turn += 1
        target.copy_(source)


def environment(threads: int) -> dict[str, Any]:
    """Machine, versions and commit, for every JSON row."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "threads": threads,
        "isa": _C.isa(),
        "turnwise": __version__,
        "commit": commit.stdout.strip() or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_rows(name: str, rows: Sequence[Mapping[str, Any]], threads: int, path: Path | None) -> None:
    target = path or RESULTS / f"{name}.local.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    common = environment(threads)
    with target.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"bench": name, **common, **row}) + "\n")


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A markdown table; floats with three significant digits."""

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
