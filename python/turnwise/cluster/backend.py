"""What a supervisor needs of the place where a run's processes are: room, hosts, and who of them is gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from turnwise.cluster.host import Command, Ended
from turnwise.cluster.placement import Node, Role


class HostLost(Exception):
    """Raised if a host is gone or doesn't answer, as its process or its node died. The process dies with it."""


class ClusterLost(RuntimeError):
    """Raised if a cluster on which a run was going on is gone, or has no place left for it: the run can go on later."""


class Host(Protocol):
    """The supervisor's side of a :class:`~turnwise.cluster.host.ProcessHost`. All methods raise :class:`HostLost`."""

    def came(self) -> dict[str, Any] | None:
        """Return the host's facts once it is there, ``None`` until then."""
        ...

    def poll(self, dead_after: float) -> Ended | None:
        """Return how the process ended, ``None`` while it runs. A host may take ``dead_after`` seconds to answer."""
        ...

    def free_port(self, address: str) -> int:
        """Return a port of ``address`` that is free on the host's node."""
        ...

    def start(self, command: Command) -> int:
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
        """The nodes that are alive."""
        ...

    def place(self, roles: Sequence[Role], wait: float) -> None:
        """Keep room for the roles that must be there.

        Raises :class:`~turnwise.cluster.placement.NoRoom` after ``wait`` seconds, with what is missing.
        """
        ...

    def host(self, role: Role) -> Host:
        """Ask for a host of ``role``, which comes when there is room."""
        ...

    def lost(self, dead_after: float) -> str | None:
        """Return why the cluster as a whole is gone, if its head has not answered for ``dead_after`` seconds."""
        ...

    def check(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise :class:`~turnwise.train.config.toml.ConfigError` if the nodes, by name, are not to be trusted."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
