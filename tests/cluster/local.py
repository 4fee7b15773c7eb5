"""A cluster of one node in this process, whose hosts start a script instead of ``turnwise``, and can be lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

from turnwise.cluster.host import Ended, HostLost, ProcessCommand, ProcessHost
from turnwise.cluster.placement import Node, NoRoom, Role


class ScriptHost(ProcessHost):
    def __init__(self, script: str) -> None:
        super().__init__()
        self.program = ("-c", script)


class LocalHost:
    """The supervisor's side of a :class:`ScriptHost`. ``lost`` hosts raise, ``silent`` ones never answer."""

    def __init__(self, script: str) -> None:
        self.host, self.lost, self.silent, self.pid = ScriptHost(script), False, False, 0

    def _there(self) -> ScriptHost:
        if self.lost:
            raise HostLost("its node is gone")
        return self.host

    def facts(self) -> dict[str, Any] | None:
        return {**self._there().facts(), "address": "127.0.0.1"}

    def poll(self, dead_after: float) -> Ended | None:
        if self.silent:
            raise HostLost(f"its host did not answer for {dead_after:g} s")
        return self._there().poll()

    def free_port(self, address: str) -> int:
        return self._there().free_port(address)

    def start(self, command: ProcessCommand) -> int:
        self.pid = self._there().start(command)
        return self.pid

    def signal(self, number: int) -> None:
        self._there().signal(number)

    def stop(self) -> None:
        if self.host._process is not None:
            self.host.stop()

    def lose(self) -> None:
        """Be gone with the process, as with a node."""
        self.lost = True
        os.killpg(self.pid, signal.SIGKILL)


class LocalBackend:
    """``script`` is what every process runs. ``hosts`` has the last host of each role, ``room`` which roles get one."""

    def __init__(self, script: str) -> None:
        self.script, self.hosts = script, dict[str, LocalHost]()
        self.room: set[str] | None = None
        self.differ: dict[str, Any] = {}
        self.gone: str | None = None

    def nodes(self) -> list[Node]:
        has = {"CPU": 8.0}
        return [Node("here", "127.0.0.1", has, has)]

    def place(self, roles: list[Role], wait: float) -> None:
        left = [role.name for role in roles if role.must and self.room is not None and role.name not in self.room]
        if left:
            raise NoRoom(f"no room for {left}")

    def host(self, role: Role) -> LocalHost:
        host = self.hosts[role.name] = LocalHost(self.script)
        host.lost = self.room is not None and role.name not in self.room
        return host

    def lost(self, dead_after: float) -> str | None:
        return self.gone

    def check(self, facts: Any) -> None:
        pass

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def command(role: str, folder: Path, **env: str) -> ProcessCommand:
    """A command of the script: it gets its role as its argument."""
    return ProcessCommand([role], env, str(folder), folder / "run" / "logs" / f"{role}.log", "the secret\n")
