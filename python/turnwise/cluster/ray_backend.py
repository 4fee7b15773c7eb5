"""A Ray cluster for a run's processes. Ray finds room, starts hosts and detects dead ones.

No token and no weight passes through Ray: a host starts one ordinary process, and answers the supervisor's questions.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from turnwise.cluster.host import ClusterLost, Ended, HostLost, ProcessCommand, ProcessHost
from turnwise.cluster.placement import Node, NoRoom, Role, shortage
from turnwise.train.config.cluster import ClusterConfig
from turnwise.train.config.toml import ConfigError
from turnwise.utils.values import problem

ANSWER = 30.0
"""Seconds that a host has to answer a question, except the regular one about its process."""

STOP = 5.0
"""Seconds that a host has to end its process, before it is killed itself."""

LOOPBACK = "127.0.0.1"
"""Address of all processes of a run on this machine alone."""

KNOCK = 2.0
"""Seconds between two checks of the head, and for its answer. Ray ends a process that misses it for 60 s."""

_TOKEN, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""Ray's defaults report usage to its developers, hide repeated lines, and start workers with uv's other Python."""


class RayBackend:
    """A Ray cluster that this process joins, or starts for itself: ``with RayBackend(config.cluster) as backend``.

    Raises ``ImportError`` without ray, and :class:`ConfigError` for an address that can't be joined.
    """

    def __init__(self, settings: ClusterConfig) -> None:
        self._settings = settings
        self._group: Any = None
        self._bundles: dict[str, int] = {}
        self._head, self._knocked, self._answered = "", 0.0, 0.0

    def __enter__(self) -> RayBackend:
        ray = _ray(self._settings)
        try:
            ray.init(**_init_arguments(self._settings.address), log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = f"no Ray cluster can be joined there: {str(error).strip().splitlines()[0]}"
            raise ConfigError(problem("cluster.address", why, self._settings.address)) from error
        self._host = ray.remote(num_cpus=0, max_restarts=0)(ProcessHost)
        self._head, self._answered = ray.get_runtime_context().gcs_address, time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        ray.shutdown()

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        import ray
        from ray._private.state import available_resources_per_node

        free, alive = available_resources_per_node(), [node for node in ray.nodes() if node["Alive"]]
        names = Counter(node["NodeName"] for node in alive)
        return [
            Node(
                node["NodeName"] if names[node["NodeName"]] == 1 else f"{node['NodeName']}/{node['NodeID'][:6]}",
                node["NodeManagerAddress"],
                node["Resources"],
                free.get(node["NodeID"], {}),
            )
            for node in alive
        ]

    def place(self, roles: Sequence[Role], wait: float) -> None:
        """Reserve room for the required roles. The others get theirs when the supervisor asks for their host.

        Raises :class:`NoRoom` after ``wait`` seconds, with what is missing.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        must = [role for role in roles if role.must]
        self._bundles = {role.name: i for i, role in enumerate(must)}
        self._group = placement_group(
            [
                # A bundle may not be empty.
                {name: amount for name, amount in role.resources.items() if amount} or {"CPU": 0.001}
                for role in must
            ],
            strategy="PACK",
        )
        if not self._group.wait(wait):
            nodes = self.nodes()
            remove_placement_group(self._group)
            raise NoRoom(f"after cluster.wait = {wait:g} s: {shortage(must, nodes, free=True)}")

    def host(self, role: Role) -> RayHost:
        """Ask for a host of ``role``: in its reserved room, or on any node with room. It may take time to be ready."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
        if role.name in self._bundles:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, self._bundles[role.name])
        takes = dict(role.resources)
        actor = self._host.options(
            num_cpus=takes.pop("CPU", 0.0), num_gpus=takes.pop("GPU", 0.0), resources=takes, **options
        ).remote()
        return RayHost(role.name, actor, LOOPBACK if self._settings.address == "local" else None)

    def lost(self, dead_after: float) -> str | None:
        """Return why the cluster as a whole is gone, if its head has not answered for ``dead_after`` seconds."""
        now = time.monotonic()
        if now - self._knocked >= KNOCK:
            self._knocked = now
            with suppress(ConnectionError):
                _knock(self._head, KNOCK)
                self._answered = time.monotonic()
        silent = time.monotonic() - self._answered > dead_after
        return f"the Ray head at {self._head} has not answered for {dead_after:g} s" if silent else None

    def check(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise :class:`ConfigError` if the Ray of a node checks no tokens, unless the network is trusted."""
        open_to_all = [node for node, each in facts.items() if not each["checks_tokens"]]
        if open_to_all and not self._settings.trust_network:
            why = (
                f"the Ray of {', '.join(open_to_all)} checks no token, so anyone who reaches its ports runs code as "
                "you. Start it with RAY_AUTH_MODE=token on every node, or set cluster.trust_network = true if you "
                "trust that network"
            )
            raise ConfigError(problem("cluster.address", why, self._settings.address))


class RayHost:
    """The supervisor's side of a host. ``address`` replaces the one that Ray uses."""

    def __init__(self, role: str, actor: Any, address: str | None = None) -> None:
        self._role, self._actor, self._address = role, actor, address
        self._asked: tuple[Any, float] | None = None
        self._gone = False
        self._facts = actor.facts.remote()

    def facts(self) -> dict[str, Any] | None:
        """Return the facts of the host's node once it is ready, ``None`` until then. Raises :class:`HostLost`."""
        facts = self._answer(self._facts)
        return facts if facts is None or self._address is None else {**facts, "address": self._address}

    def poll(self, dead_after: float) -> Ended | None:
        """Return how the process ended, ``None`` if it runs or the host has not answered yet.

        Raises :class:`HostLost` if the host is gone, or has not answered for ``dead_after`` seconds.
        """
        if self._asked is None:
            self._asked = (self._actor.poll.remote(), time.monotonic())
        question, since = self._asked
        ended: Ended | None = None
        if _ready(question):
            self._asked = None
            ended = self._answer(question)
        elif time.monotonic() - since > dead_after:
            raise HostLost(f"{self._role}: its host did not answer for {dead_after:g} s")
        return ended

    def free_port(self, address: str) -> int:
        """Return a port of ``address`` that is free on the host's node."""
        return self._ask("free_port", address)

    def start(self, command: ProcessCommand) -> int:
        """Start the host's process, and return its id on the node."""
        return self._ask("start", command)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        self._ask("signal", number)

    def stop(self) -> None:
        """End the process and the host at once. Does nothing if they are gone."""
        import ray
        from ray.exceptions import RayError

        with suppress(HostLost, ClusterLost):
            if not self._gone:
                self._ask("stop", timeout=STOP)  # with all that the process started
        with suppress(RayError):  # a host that never came
            ray.kill(self._actor)  # on Linux its process dies with it

    def _ask(self, method: str, *arguments: Any, timeout: float = ANSWER) -> Any:
        return self._answer(getattr(self._actor, method).remote(*arguments), timeout)

    def _answer(self, question: Any, timeout: float = 0.0) -> Any:
        """Return the answer to ``question``; without a ``timeout`` ``None`` if there is none yet."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        if not timeout and not _ready(question):
            return None
        try:
            return ray.get(question, timeout=timeout or ANSWER)
        except GetTimeoutError:
            raise HostLost(f"{self._role}: its host did not answer for {timeout:g} s") from None
        except RayActorError as error:
            self._gone = True
            raise HostLost(f"{self._role}: its host is gone: {str(error).strip().splitlines()[0]}") from error
        except RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except RayError as error:
            raise ClusterLost(f"the Ray cluster can't be reached: {str(error).strip().splitlines()[0]}") from error


def _ready(question: Any) -> bool:
    import ray

    return bool(ray.wait([question], timeout=0)[0])


def _ray(settings: ClusterConfig) -> Any:
    """Import ray with the settings that it reads then."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if settings.address == "local" and os.environ.setdefault(_MODE, "token") == "token":
        os.environ.setdefault(_TOKEN, secrets.token_hex(32))
    try:
        import ray
    except ImportError as error:
        raise ImportError(problem("cluster.backend", "needs ray: pip install 'turnwise[ray]'", "ray")) from error
    return ray


def _init_arguments(address: str) -> dict[str, Any]:
    """Return the arguments of ``ray.init`` that name the cluster."""
    if address.startswith("ray://"):
        why = "expected a cluster that this machine is part of: run turnwise on a node of it, or submit it with"
        raise ConfigError(problem("cluster.address", f"{why} `ray job submit`", address))
    if address == "auto":
        return {"address": address}
    if address != "local":
        _knock(address)  # Ray itself would try for minutes
        return {"address": address}
    return {"address": "local", "include_dashboard": False}


def _knock(address: str, timeout: float = 10.0) -> None:
    """Raise ``ConnectionError`` unless something answers at ``address``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(f"nothing answers at {address}, expected host:port of a Ray head: {error}") from error
