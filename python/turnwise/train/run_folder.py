"""Protects a run folder: one process writes to it at a time, and no run overwrites the records of another."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from turnwise.train.checkpoint.checkpoint import ignored_checkpoints, list_checkpoints
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import CONFIG_FILE, ConfigError
from turnwise.train.log.lines import read_rows
from turnwise.utils.files import make_private, open_regular, read_regular
from turnwise.utils.values import problem

LOCK = ".run.lock"
"""Lock file in a run folder. The run that writes there locks it, and writes its process into it."""

RECORDS = ("metrics.jsonl", "rollouts.jsonl")


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


def _has_a_line(file: Path) -> bool:
    if not file.is_file():
        return False
    with open_regular(file) as stream:
        return stream.readline().endswith(b"\n")


def check_records(config: TrainConfig, note: Callable[[str], None] | None = None) -> None:
    """Raise :class:`ConfigError` if a run of ``config`` would overwrite the contents of its run folder.

    These are checkpoints from which the run would not resume, and records of steps without any checkpoint. ``note`` is
    called with a line for each folder that looks like a checkpoint but is not one.
    """
    folder = config.run_dir
    if note is not None:
        for ignored, reason in ignored_checkpoints(folder / "checkpoints").items():
            note(f"{ignored} is ignored: {reason}")
    if list_checkpoints(folder / "checkpoints"):
        if not config.resume:
            raise ConfigError(problem("resume", f"{folder} has checkpoints: choose another run_dir", config.resume))
        return
    if records := [name for name in RECORDS if _has_a_line(folder / name)]:
        why = (
            f"{' and '.join(records)} hold the records of a run, and {folder / 'checkpoints'} has no checkpoint to "
            "resume from. Choose another run_dir, restore checkpoints or move the records away (checkpoint.minutes "
            "saves during a run)"
        )
        raise ConfigError(problem("run_dir", why, str(folder)))


def check_episode_types(config: TrainConfig, episodes: Collection[str]) -> None:
    """Raise ``ValueError`` if the type of the run folder's first recorded episode is not one of ``episodes``."""
    first = next(read_rows(config.run_dir / "rollouts.jsonl"), None)
    if first is not None and first["episode_type"] not in episodes:
        raise ValueError(foreign_episode(config, first["id"], first["episode_type"]))


def foreign_episode(config: TrainConfig, episode: str, kind: str) -> str:
    """Return the error message for a recorded ``episode`` whose type ``kind`` the config's task doesn't have."""
    return (
        f"episode {episode!r} is of type {kind!r}, which task {config.task!r} of {config.run_dir / CONFIG_FILE} "
        "doesn't have: a program with its own arena ran it. Make it a task, task = 'module:Class' "
        "(turnwise.tasks.OwnTask), or play it with turnwise.replay.replayer.replay_episode"
    )
