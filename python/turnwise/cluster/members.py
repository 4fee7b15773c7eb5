"""The files through which the processes of a run find each other, and which record what happened to them.

The supervisor alone writes them, in the folder ``cluster`` of the run, which all nodes share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from turnwise.utils.files import EVENTS, MEMBERS, open_to_append, replace_text

FOLDER = MEMBERS.parent
"""Folder of the run with these files, and what the supervisor prepares for the processes."""

Event = Literal["started", "died", "restarted", "ended"]


@dataclass(frozen=True, slots=True)
class Members:
    """Addresses of the processes that serve others. ``epoch`` grows with every change.

    ``engines`` has for each pool the addresses of its engines by name, ``workers`` those of the arena workers.

    Example: ``Members(3, {"main": {"engine-main-0": "http://10.0.0.2:41231"}}, {"worker-0": "10.0.0.2:40001"})``
    """

    epoch: int = 0
    engines: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    workers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> Members:
        """Read the members of the run in ``run_dir``. Raises ``FileNotFoundError`` if it has no supervisor yet."""
        content = json.loads(members_file(run_dir).read_text(encoding="utf-8"))
        return cls(content["epoch"], content["engines"], content["workers"])

    def write(self, run_dir: Path) -> None:
        """Replace the file in ``run_dir``, whole or not at all."""
        replace_text(members_file(run_dir), json.dumps(asdict(self), indent=1) + "\n")


def members_file(run_dir: Path) -> Path:
    """Return the file of :class:`Members`."""
    return run_dir / MEMBERS


def events_file(run_dir: Path) -> Path:
    """Return the file with a line of JSON for each event."""
    return run_dir / EVENTS


def log_file(run_dir: Path, role: str) -> Path:
    """Return the file of the output of the process ``role``. Restarts append."""
    return run_dir / "logs" / f"{role}.log"


def record(run_dir: Path, event: Event, role: str, **about: Any) -> None:
    """Append an event of ``role`` to the run's events."""
    line = {"time": time.time(), "event": event, "role": role, **about}
    with open_to_append(events_file(run_dir)) as stream:
        stream.write(f"{json.dumps(line)}\n".encode())
