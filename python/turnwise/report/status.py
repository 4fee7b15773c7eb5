"""Reads the status of a run from the files in its folder alone."""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from turnwise.report.cluster import BEGINS, parts_of_step, read_events, read_members
from turnwise.report.read import parse_config, read_config_text
from turnwise.train.checkpoint.listing import EXPORTED, list_checkpoints
from turnwise.train.log.lines import TIME, count_lines, newest_lines, rows_with
from turnwise.train.run_lock import lock_holder
from turnwise.utils.files import damage_named, read_json

State = Literal["not started", "running", "killed", "stopped", "finished"]

RECENT = 20
"""Number of the newest steps whose median is the usual time of a step."""

LATE = 5.0
"""A step is late after this many times the usual time."""

SHORTEST = 60.0
"""Seconds below which no step is late."""

_LONGEST, DIAGNOSIS = 200, 600
"""Characters of a line that are shown, and of the line of a diagnosis, which ends with its page."""


@dataclass(slots=True)
class ProcessStatus:
    """One process of a cluster. Ages are in seconds; ``log_age`` is that of the last line that it wrote.

    ``state`` is ``running``, ``died`` or ``ended``, by the last event.
    """

    name: str
    state: str = "unknown"
    node: str | None = None
    address: str | None = None
    pid: int | None = None
    restarts: int = 0
    last_event: str | None = None
    event_age: float | None = None
    detail: str | None = None
    log_age: float | None = None
    versions: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Status:
    """State of a run. Times and ages are in seconds, medians over the newest :data:`RECENT` steps.

    ``parts`` divides ``seconds_per_step``; its ``rest`` is validation, checkpoints and logs.
    """

    run: str
    state: State
    process: str | None
    step: int
    steps: int | None
    step_age: float | None
    seconds_per_step: float | None
    parts: dict[str, float]
    checkpoint: int | None
    checkpoint_age: float | None
    exported: int | None
    """Step of the weights in ``policies/``, the oldest of several; ``None`` if there are none, or of unknown steps."""
    epoch: int | None
    versions: dict[str, tuple[int, int]]
    """Oldest and newest version that engines serve, by policy."""
    roles: list[ProcessStatus]
    warnings: list[str]

    def to_json(self) -> str:
        """Return the status as one JSON object."""
        return json.dumps(asdict(self), indent=2)


def read_status(folder: Path, now: float | None = None) -> Status:
    """Read the status of the run in ``folder`` at the time ``now``, in Unix seconds. It changes nothing.

    Raises ``ValueError`` for a folder without a run, and for a bad line of its files, which it names.
    """
    with damage_named(folder):
        return _read_status(folder, time.time() if now is None else now)


def _read_status(folder: Path, now: float) -> Status:
    metrics = folder / "metrics.jsonl"
    config_text = read_config_text(folder / "config.toml")
    events = read_events(folder)
    if config_text is None and not metrics.is_file() and not events:
        raise ValueError(
            f"run_dir={str(folder)!r}: no run folder, expected one with config.toml, metrics.jsonl or "
            "cluster/events.jsonl"
        )
    planned = parse_config(config_text).get("steps")
    rows = [line.row for line in itertools.islice(newest_lines(metrics), RECENT)][::-1]
    step = int(rows[-1]["step"]) if rows else 0
    seconds, parts = _usual(rows)
    checkpoints = list_checkpoints(folder / "checkpoints")
    newest = rows[-1] if rows else {}
    holder = lock_holder(folder)
    state = _state(holder, step, planned, begun=bool(rows or events))
    start = "cluster/version_min/"
    status = Status(
        run=folder.resolve().name,
        state=state,
        process=None if holder is None else f"process {holder['pid']} on {holder['host']}, since {holder['since']}",
        step=step,
        steps=planned,
        step_age=now - metrics.stat().st_mtime if rows else None,
        seconds_per_step=seconds,
        parts=parts,
        checkpoint=int(checkpoints[-1].name.rpartition("_")[2]) if checkpoints else None,
        checkpoint_age=_age(checkpoints[-1] / "manifest.json", now) if checkpoints else None,
        exported=_exported(folder / "policies"),
        epoch=(members := read_members(folder)).get("epoch"),
        versions={
            name: (int(newest[start + name]), int(newest[f"cluster/version_max/{name}"]))
            for name in (key.removeprefix(start) for key in newest if key.startswith(start))
        },
        roles=_roles(folder, events, members, newest, now),
        warnings=[],
    )
    status.warnings = _warnings(status, folder)
    return status


def _exported(folder: Path) -> int | None:
    steps = []
    for file in folder.glob(f"*/{EXPORTED}"):
        with damage_named(file):
            steps.append(int(read_json(file)["step"]))
    return min(steps, default=None)


def _age(file: Path, now: float) -> float | None:
    """Return the seconds since ``file`` changed; ``None`` if the run has deleted it meanwhile."""
    try:
        return now - file.stat().st_mtime
    except FileNotFoundError:
        return None


def _usual(rows: Sequence[Mapping[str, float]]) -> tuple[float | None, dict[str, float]]:
    """Return the median time of a step and of its parts."""
    parts: dict[str, list[float]] = {}
    wholes: list[float] = []
    none: Mapping[str, float] = {}
    for row, following in itertools.zip_longest(rows, rows[1:], fillvalue=none):
        measured = parts_of_step(row)
        if not measured:  # the validation before the first step
            continue
        for name, value in measured.items():
            parts.setdefault(name, []).append(value)
        whole = sum(measured.values())
        if TIME in row and TIME in following and following["step"] == row["step"] + 1:
            parts.setdefault("rest", []).append(max(following[TIME] - row[TIME] - whole, 0.0))
            whole = max(following[TIME] - row[TIME], whole)
        wholes.append(whole)
    return (statistics.median(wholes) if wholes else None), {n: statistics.median(v) for n, v in parts.items()}


def _state(holder: Mapping[str, Any] | None, step: int, planned: int | None, *, begun: bool) -> State:
    if holder is None:
        if not begun:
            return "not started"
        return "finished" if planned is not None and step >= planned else "stopped"
    if holder["host"] == socket.gethostname():
        try:
            os.kill(int(holder["pid"]), 0)
        except ProcessLookupError:
            return "killed"
        except PermissionError:  # it is another user's
            pass
    return "running"


def _roles(
    folder: Path,
    events: Sequence[Mapping[str, Any]],
    members: Mapping[str, Any],
    newest: Mapping[str, float],
    now: float,
) -> list[ProcessStatus]:
    roles: dict[str, ProcessStatus] = {}
    for event in events:
        role = roles.setdefault(event["role"], ProcessStatus(event["role"]))
        role.state = "running" if event["event"] in BEGINS else event["event"]
        role.restarts += event["event"] == "restarted"
        role.node, role.pid = event.get("node") or role.node, event.get("pid") or role.pid
        role.last_event, role.event_age, role.detail = event["event"], now - event["time"], event.get("detail") or None
    pools = [*members.get("engines", {}).values(), members.get("workers", {})]
    for name, address in ((name, address) for pool in pools for name, address in pool.items()):
        roles.setdefault(name, ProcessStatus(name)).address = str(address)
    for name, role in roles.items():
        log = folder / "logs" / f"{name}.log"
        role.log_age = _age(log, now)
        start = f"cluster/version/{name}/"
        role.versions = {key.removeprefix(start): int(v) for key, v in newest.items() if key.startswith(start)}

    def by_number(role: ProcessStatus) -> tuple[str, int]:
        kind, _, number = role.name.rpartition("-")
        return (kind, int(number)) if number.isdecimal() else (role.name, -1)

    return sorted(roles.values(), key=by_number)


def _warnings(status: Status, folder: Path) -> list[str]:
    """Return one line for each problem of the run."""
    lines = []
    if status.state == "killed":
        lines.append(f"{status.process}, was killed: start the run again to resume it")
    usual, age = status.seconds_per_step, status.step_age
    if status.state == "running" and usual is not None and age is not None and age > max(LATE * usual, SHORTEST):
        lines.append(f"no step for {duration(age)}, {age / max(usual, 1e-9):.0f} x the usual {duration(usual)}")
    for role in status.roles:
        if role.state == "died" and status.state in ("running", "killed"):
            reason = f" ({first_line(role.detail)})" if role.detail else ""
            lines.append(f"{role.name} died {duration(role.event_age or 0.0)} ago and did not restart{reason}")
        for policy, version in role.versions.items() if status.state == "running" else ():
            latest = status.versions.get(policy, (version, version))[1]
            if version < latest - 1:
                lines.append(f"{role.name} serves version {version} of {policy}, others {latest}")
    # Each diagnosis is one line, and there are few; of the other warnings the newest.
    warnings = folder / "warnings.jsonl"
    for row in rows_with(warnings, "diagnosis"):
        lines.append(f"step {row['step']}: {first_line(str(row['warning']), DIAGNOSIS)}")
    newest = next((line.row for line in newest_lines(warnings) if "diagnosis" not in line.row), None)
    if newest is not None:
        text = first_line(str(newest["warning"]))
        lines.append(f"step {newest['step']}: {text} (the newest of {count_lines(warnings)} in {warnings.name})")
    return lines


def first_line(text: str, longest: int = _LONGEST) -> str:
    """Return the first line of ``text``, cut to a length, without the control characters of a terminal."""
    first = next(iter(text.strip().splitlines()), "")
    shown = "".join(char for char in first if char.isprintable())
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def duration(seconds: float) -> str:
    """Format seconds for people: ``0.84 s``, ``4.2 s``, ``42 s``, ``3 min 5 s``, ``2 h 7 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
    whole = round(seconds)
    for unit, size, below, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"
