"""Who is paid by whom in a tree of episodes: edges between a kind of parent and a kind of child.

An edge changes rewards, not advantages, so any rule can follow: :class:`turnwise.credit.LevelCredit` puts the two
together. Episodes that failed, or that their rubric dropped, pay nothing and are paid nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.naming import construct, find, find_class
from turnwise.types import GenerateResult

Pay = dict[tuple[str, str], float]
"""``(rollout id, actor) -> reward``."""

Aggregate = Callable[[Sequence[float]], float]

WAYS: dict[str, Aggregate] = {
    "mean": lambda rewards: sum(rewards) / len(rewards),
    "sum": lambda rewards: float(sum(rewards)),
    "max": lambda rewards: max(rewards),
    "min": lambda rewards: min(rewards),
}
"""What becomes of several rewards, by the name that ``by`` takes; never called without any."""


class Edge(Protocol):
    """One kind of payment along a tree."""

    def pay(self, nodes: Sequence[GenerateResult], rewards: Mapping[tuple[str, str], float]) -> Pay:
        """The rewards that the edge sets. ``nodes`` are the finished episodes, parents before their children;
        ``rewards`` are as they were or as earlier edges set them."""
        ...


@dataclass(frozen=True, kw_only=True)
class FromChildren:
    """A parent is paid by its children: ``R = own * R + by(r_1 ... r_n)``.

    ``r_i`` are the rewards of ``child_actor`` in the parent's finished children of type ``child``; where all of them
    failed ``empty`` stands for ``by``, and a parent that spawned none keeps its reward. ``by`` is a name of
    :data:`WAYS`, an import path, or a function of a list of rewards. The deepest are paid first, so with one type for
    ``parent`` and ``child`` a single edge goes through all levels.

    Example: ``FromChildren(parent="propose", actor="proposer", child="solve", child_actor="solver", by="mean")``
    """

    parent: str
    actor: str
    child: str
    child_actor: str
    by: str | Aggregate = "mean"
    own: float = 0.0
    empty: float = 0.0

    def __post_init__(self) -> None:
        way(self.by)

    def pay(self, nodes: Sequence[GenerateResult], rewards: Mapping[tuple[str, str], float]) -> Pay:
        paid: Pay = {}
        by = way(self.by)
        for node in reversed(nodes):
            key = (node.rollout.id, self.actor)
            spawned = any(
                child.rollout.episode_type == self.child and "continues" not in child.rollout.meta
                for child in node.children
            )
            if node.rollout.episode_type != self.parent or not spawned or not _plays(node, self.actor):
                continue
            keys = [(child.rollout.id, self.child_actor) for child in finished(node.children, self.child)]
            values = [paid.get(known, rewards[known]) for known in keys if known in rewards]
            paid[key] = self.own * rewards.get(key, 0.0) + (float(by(values)) if values else self.empty)
        _warn_of_strangers(self, nodes, self.parent, self.actor)
        _warn_of_strangers(self, nodes, self.child, self.child_actor)
        return paid


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A child is paid what its parent's outcome would lack without it: ``r_i = own * r_i + G(all) - G(all but i)``.

    ``G`` is ``by`` of the rewards of ``child_actor`` in the parent's finished children of type ``child``; or what
    ``outcome`` says, a function of the parent's result and a list of its children's. ``empty`` is ``G`` of nobody.
    What raises such a difference raises ``G`` (Wolpert and Tumer, 2001, https://doi.org/10.1142/S0219525901000188).

    Example: ``Difference(parent="plan", child="solve", child_actor="solver", by="max")``
    """

    parent: str
    child: str
    child_actor: str
    by: str | Aggregate = "mean"
    outcome: Callable[[GenerateResult, list[GenerateResult]], float] | None = None
    own: float = 0.0
    empty: float = 0.0

    def __post_init__(self) -> None:
        way(self.by)
        if self.outcome is not None and not callable(self.outcome):
            raise TypeError(f"outcome={self.outcome!r}: expected a function of a result and its children, or None")

    def pay(self, nodes: Sequence[GenerateResult], rewards: Mapping[tuple[str, str], float]) -> Pay:
        paid: Pay = {}
        for node in nodes:
            if node.rollout.episode_type != self.parent:
                continue
            team = [c for c in finished(node.children, self.child) if (c.rollout.id, self.child_actor) in rewards]
            whole = self._outcome(node, team, rewards)
            for place, child in enumerate(team):
                key = (child.rollout.id, self.child_actor)
                without = self._outcome(node, team[:place] + team[place + 1 :], rewards)
                paid[key] = self.own * rewards[key] + whole - without
        _warn_of_strangers(self, nodes, self.child, self.child_actor)
        return paid

    def _outcome(
        self, parent: GenerateResult, team: list[GenerateResult], rewards: Mapping[tuple[str, str], float]
    ) -> float:
        if not team:
            return self.empty
        if self.outcome is not None:
            return float(self.outcome(parent, team))
        return float(way(self.by)([rewards[child.rollout.id, self.child_actor] for child in team]))


EDGES: dict[str, Callable[..., Edge]] = {"children": FromChildren, "difference": Difference}
"""Edges by the ``kind`` that a configuration names."""


def build_edge(edge: Edge | Mapping[str, Any]) -> Edge:
    """An edge as it is, or from a table such as ``{"kind": "children", "parent": "propose", ...}``."""
    if isinstance(edge, Mapping):
        options = {name: value for name, value in edge.items() if name != "kind"}
        like = "turnwise.credit.FromChildren"
        kind = find_class(EDGES, edge.get("kind", ""), "edges.kind", methods=["pay"], like=like)
        return construct(kind, options, "edges")
    if isinstance(edge, type) or not callable(getattr(edge, "pay", None)):
        raise TypeError(f"edges holds {edge!r}: expected objects with pay(), or tables with a kind of {sorted(EDGES)}")
    return edge


def way(by: str | Aggregate) -> Aggregate:
    """The function that ``by`` names or is."""
    found = find(WAYS, by, "by") if isinstance(by, str) else by
    if not callable(found):
        raise TypeError(f"by={by!r}: expected one of {sorted(WAYS)}, or a function of a list of rewards")
    return found


def is_finished(result: GenerateResult) -> bool:
    """Whether the episode ended well and was scored."""
    return result.rollout.error is None and "dropped" not in result.rollout.meta


def finished(results: Iterable[GenerateResult], episode_type: str) -> list[GenerateResult]:
    """Those of ``results`` of this type that are finished, in their order; what continued the parent is no child."""
    own = (result for result in results if "continues" not in result.rollout.meta)
    return [result for result in own if result.rollout.episode_type == episode_type and is_finished(result)]


def _plays(node: GenerateResult, actor: str) -> bool:
    return actor in node.rollout.rewards or any(step.actor_id == actor for step in node.rollout.steps)


def _warn_of_strangers(edge: Edge, nodes: Sequence[GenerateResult], episode_type: str, actor: str) -> None:
    """A mistyped actor would change nothing, and nobody would see it."""
    there = [node for node in nodes if node.rollout.episode_type == episode_type]
    if there and not any(_plays(node, actor) for node in there):
        warnings.warn(
            f"{type(edge).__name__}: no episode {episode_type!r} of this batch has an actor {actor!r}; of the first "
            f"{sorted(there[0].rollout.rewards)} are rewarded",
            stacklevel=3,
        )
