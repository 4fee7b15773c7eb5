"""Reads the events of a run's processes on a cluster, and the times of its steps.

The supervisor writes ``cluster/events.jsonl`` and ``cluster/members.json``, and the training loop ``metrics.jsonl``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.train.log.lines import TIME
from turnwise.utils.files import EVENTS, MEMBERS, parse_json_line, read_json, read_regular

BEGINS = ("started", "restarted")
"""Events after which a process runs."""

ENDS = ("died", "ended")
"""Events after which a process does not run."""


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the run in ``folder``, in order of time; none without a cluster.

    Each has ``time`` (Unix seconds), ``event`` and ``role``, and may have ``node``, ``pid`` and ``detail``. An
    unfinished last line is omitted. Raises ``ValueError`` naming any other bad line.
    """
    path = folder / EVENTS
    if not path.is_file():
        return []
    events = []
    lines = read_regular(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line:  # what follows the last end of a line
            break
        try:
            event = parse_json_line(line)
            texts = {name: str(event[name]) for name in ("event", "role")}
            texts |= {name: str(event[name]) for name in ("node", "detail") if event.get(name)}
            events.append({**event, **texts, "time": float(event["time"])})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with time, event and role, got {line[:40]!r}"
                ) from error
    return sorted(events, key=lambda event: event["time"])


def read_members(folder: Path) -> dict[str, Any]:
    """Return ``epoch``, ``engines`` and ``workers`` of the run; empty without a cluster."""
    path = folder / MEMBERS
    if not path.is_file():
        return {}
    try:
        members: dict[str, Any] = read_json(path)
        return members
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON ({error})") from error


def parts_of_step(row: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step's ``rollout``, ``update`` and ``sync``, as far as ``row`` of the metrics has them.

    ``seconds_update`` includes the sync, which runs on a cluster log by itself.
    """
    parts = {"rollout": row.get("seconds_rollout"), "update": row.get("seconds_update")}
    seconds = {name: float(value) for name, value in parts.items() if value is not None}
    if "update" in seconds and (sync := row.get("cluster/sync_seconds")) is not None:
        seconds |= {"update": max(seconds["update"] - sync, 0.0), "sync": float(sync)}
    return seconds


class StepTimes:
    """The times of a run's steps, from its rows of metrics. It keeps those of the newest ``points`` steps."""

    def __init__(self, points: int) -> None:
        self.newest: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=points)
        """Of each step its number, begin in Unix seconds, and :func:`parts_of_step`."""
        self.count = 0
        self.start, self.end = math.inf, -math.inf

    def take(self, row: Mapping[str, Any]) -> None:
        """Add the next row. Rows without a time, as of a run without a cluster, don't count."""
        if TIME not in row:
            return
        parts = parts_of_step(row)
        self.newest.append((row["step"], row[TIME], parts))
        self.count += 1
        self.start, self.end = min(self.start, row[TIME]), max(self.end, row[TIME] + sum(parts.values()))


def lanes(folder: Path, times: StepTimes) -> dict[str, Any] | None:
    """Return the data of the swim-lanes; ``None`` for a run without events.

    ``start`` and ``end`` are in Unix seconds, all other times in seconds since the start. ``steps`` has the newest
    steps of ``times``, each as ``[step, begin, rollout, update, sync]``; ``left_out`` counts the others. ``roles`` have
    a ``name``, the ``spans`` in which they ran (``[begin, end, node]``), and ``events`` (``[time, event, detail]``).
    """
    events = read_events(folder)
    if not events:
        return None
    start, end = min(events[0]["time"], times.start), max(events[-1]["time"], times.end)
    steps = []
    for step, begin, parts in times.newest:
        seconds = [parts.get(name, 0.0) for name in ("rollout", "update", "sync")]
        steps.append([step, *(round(value, 3) for value in (begin - start, *seconds))])
    roles: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        roles.setdefault(event["role"], []).append(event)
    return {
        "start": start,
        "end": end,
        "steps": steps,
        "left_out": times.count - len(steps),
        "roles": [
            {
                "name": name,
                "spans": _spans(happened, start, end),
                "events": [[round(e["time"] - start, 3), e["event"], str(e.get("detail") or "")] for e in happened],
            }
            for name, happened in roles.items()
        ],
    }


def _spans(events: Sequence[Mapping[str, Any]], start: float, end: float) -> list[list[Any]]:
    """Return when a role ran, as ``[begin, end, node]`` in seconds since ``start``. It may run until ``end``."""
    spans: list[list[Any]] = []
    begun: Mapping[str, Any] | None = None
    for event in [*events, {"time": end, "event": "ended"}]:
        if begun is not None and event["event"] in (*ENDS, "restarted"):
            node = str(begun.get("node") or "")
            spans.append([round(begun["time"] - start, 3), round(event["time"] - start, 3), node])
            begun = None
        if event["event"] in BEGINS and begun is None:
            begun = event
    return spans
