"""The processes of a run, the resources that each takes, and the nodes on which they fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.train.config.cluster import ClusterConfig, RoleConfig

Kind = Literal["rank", "engine", "worker"]


@dataclass(frozen=True, slots=True)
class Role:
    """One process of the run. ``pool`` is that of an engine. ``must``: the run waits for it at the start.

    Example: ``Role("engine-main-0", "engine", {"CPU": 1, "GPU": 1}, pool="main")``
    """

    name: str
    kind: Kind
    resources: Mapping[str, float]
    pool: str = ""
    must: bool = True

    @property
    def number(self) -> int:
        """Its index among the processes of its kind, or of its pool."""
        return int(self.name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster: its address, all its resources, and the free ones."""

    name: str
    address: str
    has: Mapping[str, float]
    free: Mapping[str, float]


class NoRoom(RuntimeError):
    """Raised if a cluster can't hold the processes of a run."""


def roles_of(cluster: ClusterConfig) -> list[Role]:
    """List the processes of a run: ranks, then engines, then arena workers."""
    learner, arena = cluster.learner, cluster.arena
    roles = [Role(f"rank-{i}", "rank", _takes(learner)) for i in range(learner.count)]
    for name, pool in cluster.engines.items():
        takes = _takes(pool)
        roles += [Role(f"engine-{name}-{i}", "engine", takes, name, must=i < pool.min_count) for i in range(pool.count)]
    return roles + [Role(f"worker-{i}", "worker", _takes(arena)) for i in range(arena.count)]


def _takes(role: RoleConfig) -> dict[str, float]:
    return {"CPU": role.cpus, **({"GPU": role.gpus} if role.gpus else {}), **role.resources}


def fit(roles: Sequence[Role], nodes: Sequence[Node]) -> dict[str, str]:
    """Return a node for each of ``roles``, by their names: the first node with room, largest needs first.

    This is a plan; Ray decides. Raises :class:`NoRoom`, with what is missing, if even entirely free nodes could
    not hold the required roles.
    """
    free = {node.name: dict(node.has) for node in nodes}
    placed: dict[str, str] = {}
    ordered = sorted(roles, key=lambda role: (not role.must, [-role.resources.get(n, 0) for n in ("GPU", "CPU")]))
    for role in ordered:
        chosen = next(
            (name for name, has in free.items()
             if all(has.get(kind, 0.0) >= amount - 1e-9 for kind, amount in role.resources.items())),
            None,
        )  # fmt: skip
        if chosen is not None:
            placed[role.name] = chosen
            for name, amount in role.resources.items():
                free[chosen][name] = free[chosen].get(name, 0.0) - amount
        elif role.must:
            raise NoRoom(shortage(roles, nodes, role))
    return placed


def shortage(roles: Iterable[Role], nodes: Sequence[Node], first: Role | None = None, *, free: bool = False) -> str:
    """Describe what the required roles ask for, what the cluster has (or has ``free``), and what is missing."""
    asked: dict[str, float] = {}
    must = [role for role in roles if role.must]
    for role in must:
        for name, amount in role.resources.items():
            asked[name] = asked.get(name, 0.0) + amount
    offered = {node.name: node.free if free else node.has for node in nodes}
    has = {name: sum(each.get(name, 0.0) for each in offered.values()) for name in asked}
    short = [f"{name} (asked {asked[name]:g}, {has[name]:g} there)" for name in asked if has[name] < asked[name] - 1e-9]
    if not short:  # enough in all, but not on one node
        one = first or max(must, key=lambda role: max(role.resources.values(), default=0.0))
        need = ", ".join(f"{amount:g} {name}" for name, amount in one.resources.items())
        short = [f"one node with {need} for {one.name}, beside the others"]
    of_nodes = "; ".join(
        f"{node} has {', '.join(f'{each.get(name, 0.0):g} {name}' for name in asked)}" for node, each in offered.items()
    )
    return (
        f"no room for {_summary(must)}. Missing: {', '.join(short)}. The nodes{' have free' if free else ''}: "
        f"{of_nodes or 'there are none'}"
    )


def _summary(roles: Sequence[Role]) -> str:
    kinds: dict[tuple[str, str, tuple[tuple[str, float], ...]], int] = {}
    for role in roles:
        key = (role.kind, role.pool, tuple(role.resources.items()))
        kinds[key] = kinds.get(key, 0) + 1
    parts = []
    for (kind, pool, takes), count in kinds.items():
        of = f" of pool {pool}" if pool else ""
        each = ", ".join(f"{amount:g} {name}" for name, amount in takes if amount)
        parts.append(f"{count} {kind}{'s' if count > 1 else ''}{of} ({each or 'nothing'} each)")
    return ", ".join(parts)


def describe(
    roles: Sequence[Role], placed: Mapping[str, str], memory: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield one line for each role: its node, its resources, and its ``memory`` by pool or kind."""
    width = max(len(role.name) for role in roles)
    for role in roles:
        takes = ", ".join(f"{amount:g} {name}" for name, amount in role.resources.items() if amount)
        node = placed.get(role.name, "no room now; joins when there is")
        size = (memory or {}).get(role.pool or role.kind)
        yield f"{role.name:{width}}  {node}  ({takes or 'nothing'}{f'; {size}' if size else ''})"
