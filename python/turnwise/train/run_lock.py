"""Lets one process at a time write to a run folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from turnwise.utils.files import make_private, read_regular

LOCK = ".run.lock"
"""Lock file in a run folder. The run that writes there locks it, and writes its process into it."""


class RunLock:
    """Lock of the process that writes to ``folder``; one object may be entered several times.

    The operating system releases the lock when the process ends, for any reason. Entering raises ``ValueError`` naming
    the process that holds the lock. After entering, ``note`` is a warning if another process may still write there: on
    a file system without locks, or after a run on another host. Reading needs no lock.

    Example::

        with RunLock(Path("runs/sudoku")):
            train()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.note: str | None = None
        self._depth, self._file = 0, -1

    def __enter__(self) -> Self:
        if not self._depth:
            self._take()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            os.ftruncate(self._file, 0)
            os.close(self._file)

    def _take(self) -> None:
        make_private(self.folder)
        file = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self.note, before = None, _holder(os.pread(file, 4096, 0))
        host = socket.gethostname()
        # A lock that another process holds is an error; any other doubt becomes a note.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if before and before["host"] != host:
                self.note = f"{_describe(before)} wrote to {self.folder} and may still run: make sure that it has ended"
        except BlockingIOError:
            os.close(file)
            raise ValueError(
                f"run_dir={str(self.folder)!r}: expected a folder to which no other run writes, but "
                f"{_describe(before) if before else 'another process'} does. Wait for it, stop it, or choose another "
                "run_dir"
            ) from None
        except OSError as error:
            last = f"; {_describe(before)} was the last" if before else ""
            self.note = f"{self.folder} can't be locked ({error.strerror}): make sure no other run writes to it{last}"
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({"pid": os.getpid(), "host": host, "since": now}).encode(), 0)
        self._file = file


def lock_holder(folder: Path) -> dict[str, Any] | None:
    """Return ``pid``, ``host`` and ``since`` from the lock file of ``folder``; ``None`` if it names no process.

    The process may have been killed. This does not take the lock.
    """
    try:
        return _holder(read_regular(folder / LOCK, most=4096))
    except FileNotFoundError:
        return None


def _holder(content: bytes) -> dict[str, Any] | None:
    """Return the contents of a lock file, or ``None`` if it is empty or half written."""
    try:
        holder = json.loads(content)
        return {key: holder[key] for key in ("pid", "host", "since")}
    except (ValueError, KeyError, TypeError):
        return None


def _describe(holder: dict[str, Any]) -> str:
    """Describe a lock's holder: ``process 123 on host 'a', since 2026-11-23 07:40:00 UTC``."""
    text = f"process {holder['pid']} on host {holder['host']!r}, since {holder['since']},"
    if holder["host"] != socket.gethostname():
        return text
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return f"a process that {text.removesuffix(',')} started before it ended"
    except PermissionError:  # another user's
        pass
    return text


def check_not_running(folder: Path) -> None:
    """Raise ``ValueError`` if a run writes to ``folder``, or to a folder below it."""
    for lock in sorted(folder.rglob(LOCK)):
        with RunLock(lock.parent):
            pass
