"""The processes of a run on their nodes: a host starts one, for a supervisor that may be on another node.

:class:`Host` and :class:`Backend` are the supervisor's side.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from turnwise.cluster.child import PARENT
from turnwise.cluster.placement import Node, Role
from turnwise.cluster.versions import versions
from turnwise.utils.files import open_to_append
from turnwise.utils.processes import end_group, has_ended, how_it_ended


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    """A process to start: the arguments of ``turnwise``, in ``folder``, with its output appended to ``log``.

    ``env`` is added to the node's environment. ``stdin`` is written to its standard input, which then stays open.

    Example: ``ProcessCommand(["train", "c.toml"], {"OMP_NUM_THREADS": "8"}, "/home/me", Path("logs/rank-0.log"))``
    """

    arguments: list[str]
    env: dict[str, str]
    folder: str
    log: Path
    stdin: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process: its exit code (negative for a signal), and the same in words."""

    code: int
    how: str


class ProcessHost:
    """One process on this node. It ends when its host ends."""

    program = ("-m", "turnwise.cluster.child")
    """Python's own arguments, before those of the command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: Ended | None = None

    def facts(self) -> dict[str, Any]:
        """Return the node's name, address, versions, and whether its Ray checks tokens."""
        return {
            "node": platform.node(),
            "versions": versions(),
            "address": _address(),
            "checks_tokens": os.environ.get("RAY_AUTH_MODE") == "token",
        }

    def free_port(self, address: str) -> int:
        """Return a free port of ``address``."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return probe.getsockname()[1]

    def start(self, command: ProcessCommand) -> int:
        """Start the process, and return its id. Its output is appended to ``command.log``."""
        assert self._process is None, "a host starts one process"
        command.log.parent.mkdir(parents=True, exist_ok=True)
        folder = command.folder if os.path.isdir(command.folder) else None
        # Ray's own settings of a worker process would make the program a part of Ray.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with open_to_append(command.log) as log:
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
    """Return the address of this node for the others: the one that Ray uses."""
    try:
        import ray

        return ray.util.get_node_ip_address()
    except (ImportError, RuntimeError):
        return "127.0.0.1"


class HostLost(Exception):
    """Raised if a host is gone or doesn't answer. Its process dies with it."""


class ClusterLost(RuntimeError):
    """Raised if the cluster of a run is gone, or has no room left for it. The run can continue later."""


class Host(Protocol):
    """The supervisor's side of a :class:`~turnwise.cluster.host.ProcessHost`. All methods raise :class:`HostLost`."""

    def facts(self) -> dict[str, Any] | None:
        """Return the host's facts once it is ready, ``None`` until then."""
        ...

    def poll(self, dead_after: float) -> Ended | None:
        """Return how the process ended, ``None`` while it runs. A host may take ``dead_after`` seconds to answer."""
        ...

    def free_port(self, address: str) -> int:
        """Return a port of ``address`` that is free on the host's node."""
        ...

    def start(self, command: ProcessCommand) -> int:
        """Start the host's process, and return its id on the node."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        ...

    def stop(self) -> None:
        """End the process and the host at once. Does nothing if they are gone."""
        ...


class Backend(Protocol):
    """A cluster. ``with backend:`` joins it, or starts it, and leaves it."""

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        ...

    def place(self, roles: Sequence[Role], wait: float) -> None:
        """Reserve room for the required roles.

        Raises :class:`~turnwise.cluster.placement.NoRoom` after ``wait`` seconds, with what is missing.
        """
        ...

    def host(self, role: Role) -> Host:
        """Ask for a host of ``role``, which becomes ready when there is room."""
        ...

    def lost(self, dead_after: float) -> str | None:
        """Return why the cluster as a whole is gone, if its head has not answered for ``dead_after`` seconds."""
        ...

    def check(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise :class:`~turnwise.train.config.toml.ConfigError` if a node, by name, is not trusted."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
