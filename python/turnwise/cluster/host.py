"""Starts one process of a run on this node, and looks after it for the supervisor, which may be on another node."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.cluster.child import PARENT
from turnwise.cluster.versions import versions
from turnwise.utils.processes import end_group, has_ended, how_it_ended


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: the arguments of ``turnwise``, in ``folder``, with its output appended to ``log``.

    ``env`` is added to the node's environment. ``stdin`` is written to its standard input, which then stays open.

    Example: ``Command(["train", "c.toml"], {"OMP_NUM_THREADS": "8"}, "/home/me", Path("runs/a/logs/rank-0.log"))``
    """

    arguments: list[str]
    env: dict[str, str]
    folder: str
    log: Path
    stdin: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process: its exit code (negative for a signal), and that in words."""

    code: int
    how: str


class ProcessHost:
    """One process on this node. It ends when its host ends, however that comes."""

    program = ("-m", "turnwise.cluster.child")
    """What Python runs, before the arguments of the command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: Ended | None = None

    def facts(self) -> dict[str, Any]:
        """What the supervisor must know of this node: name, address, versions, and whether Ray checks tokens."""
        return {
            "node": platform.node(),
            "versions": versions(),
            "address": _address(),
            "checks_tokens": os.environ.get("RAY_AUTH_MODE") == "token",
        }

    def free_port(self, address: str) -> int:
        """Return a port of ``address`` that nobody uses now."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return probe.getsockname()[1]

    def start(self, command: Command) -> int:
        """Start the process, and return its id. Its output is appended to ``command.log``."""
        assert self._process is None, "a host starts one process"
        command.log.parent.mkdir(parents=True, exist_ok=True)
        folder = command.folder if os.path.isdir(command.folder) else None
        # Ray's own settings of a worker process would make the program a part of Ray.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with command.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *self.program, *command.arguments],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
                env={**inherited, **command.env, PARENT: str(os.getpid())},
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(command.stdin.encode())
        self._process.stdin.flush()  # and stays open: some programs end with it
        return self._process.pid

    def poll(self) -> Ended | None:
        """Return how the process ended, or ``None`` while it runs."""
        assert self._process is not None
        if self._ended is None and has_ended(self._process):
            how = how_it_ended(self._process)
            end_group(self._process, 0)
            self._ended = Ended(self._process.returncode, how)
        return self._ended

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self._process is not None and self.poll() is None:
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Kill the process and its group."""
        if self._process is not None and self.poll() is None:
            end_group(self._process, 0)
            self._ended = Ended(self._process.returncode, "was stopped")


def _address() -> str:
    """The address under which the other nodes see this one: the one that Ray uses."""
    try:
        import ray

        return ray.util.get_node_ip_address()
    except (ImportError, RuntimeError):
        return "127.0.0.1"
