"""Payments in a tree of episodes: edges between a kind of parent and a kind of child.

An edge changes rewards, not advantages, so any rule can follow. :class:`turnwise.credit.LevelCredit` combines edges and
a rule. Episodes that failed, or that their rubric dropped, neither pay nor get paid.

In a tree, ``rollout.meta["spawned_by"]`` of a child is the branch that spawned it, ``[tree node, branch]``. Each branch
is paid from its own children, and the episode from those of its own trajectory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.types import GenerateResult
from turnwise.utils.registry import build_with_options, import_by_name, import_class

Branch = tuple[int, int]
"""``(tree node, branch)``."""

Payee = tuple[str, str] | tuple[str, str, int, int]
"""``(rollout id, actor)``; of one call in a tree ``(rollout id, actor, tree node, branch)``."""

Pay = dict[Payee, float]

Aggregate = Callable[[Sequence[float]], float]

AGGREGATES: dict[str, Aggregate] = {
    "mean": lambda rewards: sum(rewards) / len(rewards),
    "sum": lambda rewards: float(sum(rewards)),
    "max": lambda rewards: max(rewards),
    "min": lambda rewards: min(rewards),
}
"""Aggregates of several rewards, by the names that ``by`` takes. They never get an empty list."""


class Edge(Protocol):
    """One kind of payment along a tree."""

    def pay(self, nodes: Sequence[GenerateResult], rewards: Mapping[Payee, float]) -> Pay:
        """Return the rewards that the edge sets.

        ``nodes`` are finished episodes, parents before their children. ``rewards`` include earlier edges.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FromChildren:
    """Pays a parent from its children: ``R = own * R + by(r_1 ... r_n)``.

    ``r_i`` are the rewards of ``child_actor`` in the parent's finished children of type ``child``. If all of them
    failed, ``empty`` replaces ``by``. A parent that spawned no such child keeps its reward, and so does a branch.
    ``by`` is a name in :data:`AGGREGATES`, an import path, or a function of a list of rewards. The deepest parents are
    paid first. With one type for ``parent`` and ``child``, a single edge therefore covers all levels.

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

    def pay(self, nodes: Sequence[GenerateResult], rewards: Mapping[Payee, float]) -> Pay:
        paid: Pay = {}
        by = way(self.by)
        for node in reversed(nodes):
            if node.rollout.episode_type != self.parent or not _plays(node, self.actor):
                continue
            for payee, children in _by_payee(node, self.actor).items():
                if not any(_is_child(child, self.child) for child in children):
                    continue
                keys: list[Payee] = [(child.rollout.id, self.child_actor) for child in finished(children, self.child)]
                values = [paid.get(known, rewards[known]) for known in keys if known in rewards]
                paid[payee] = self.own * rewards.get(payee, 0.0) + (float(by(values)) if values else self.empty)
        _warn_of_strangers(self, nodes, self.parent, self.actor)
        _warn_of_strangers(self, nodes, self.child, self.child_actor)
        return paid


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Pays a child its contribution to the parent's outcome: ``r_i = own * r_i + G(all) - G(all but i)``.

    ``G`` is ``by`` of the rewards of ``child_actor`` in the parent's finished children of type ``child``, or
    ``outcome``, a function of the parent's result and a list of the children's results. ``empty`` is ``G`` of no
    children. In a tree the children of one branch count together.
    Raising this difference raises ``G`` (Wolpert and Tumer, 2001, https://doi.org/10.1142/S0219525901000188).

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

    def pay(self, nodes: Sequence[GenerateResult], rewards: Mapping[Payee, float]) -> Pay:
        paid: Pay = {}
        for node in nodes:
            if node.rollout.episode_type != self.parent:
                continue
            teams: dict[Branch | None, list[GenerateResult]] = {}
            for child in finished(node.children, self.child):
                if (child.rollout.id, self.child_actor) in rewards:
                    teams.setdefault(_spawned_by(child), []).append(child)
            for team in teams.values():
                whole = self._outcome(node, team, rewards)
                for place, child in enumerate(team):
                    key = (child.rollout.id, self.child_actor)
                    without = self._outcome(node, team[:place] + team[place + 1 :], rewards)
                    paid[key] = self.own * rewards[key] + whole - without
        _warn_of_strangers(self, nodes, self.child, self.child_actor)
        return paid

    def _outcome(self, parent: GenerateResult, team: list[GenerateResult], rewards: Mapping[Payee, float]) -> float:
        if not team:
            return self.empty
        if self.outcome is not None:
            return float(self.outcome(parent, team))
        return float(way(self.by)([rewards[child.rollout.id, self.child_actor] for child in team]))


EDGES: dict[str, Callable[..., Edge]] = {"children": FromChildren, "difference": Difference}
"""Edges by their ``kind`` in a configuration."""


def build_edge(edge: Edge | Mapping[str, Any]) -> Edge:
    """Return an edge unchanged, or build it from a table such as ``{"kind": "children", "parent": "propose", ...}``."""
    if isinstance(edge, Mapping):
        options = {name: value for name, value in edge.items() if name != "kind"}
        like = "turnwise.credit.FromChildren"
        kind = import_class(EDGES, edge.get("kind", ""), "edges.kind", methods=["pay"], like=like)
        return build_with_options(kind, options, "edges")
    if isinstance(edge, type) or not callable(getattr(edge, "pay", None)):
        raise TypeError(f"edges holds {edge!r}: expected objects with pay(), or tables with a kind of {sorted(EDGES)}")
    return edge


def way(by: str | Aggregate) -> Aggregate:
    """Return the function that ``by`` names or is."""
    found = import_by_name(AGGREGATES, by, "by") if isinstance(by, str) else by
    if not callable(found):
        raise TypeError(f"by={by!r}: expected one of {sorted(AGGREGATES)}, or a function of a list of rewards")
    return found


def is_finished(result: GenerateResult) -> bool:
    """True if the episode ended without an error and was scored."""
    return result.rollout.error is None and "dropped" not in result.rollout.meta


def finished(results: Iterable[GenerateResult], episode_type: str) -> list[GenerateResult]:
    """Return the finished ``results`` of this type, in order; continuations of the parent are not children."""
    return [result for result in results if _is_child(result, episode_type) and is_finished(result)]


def _is_child(result: GenerateResult, episode_type: str) -> bool:
    return result.rollout.episode_type == episode_type and "continues" not in result.rollout.meta


def _spawned_by(child: GenerateResult) -> Branch | None:
    node, branch = child.rollout.meta.get("spawned_by") or (None, None)
    return None if node is None or branch is None else (node, branch)


def _by_payee(node: GenerateResult, actor: str) -> dict[Payee, list[GenerateResult]]:
    """Return the children that pay ``actor``: those of the episode's own trajectory, and of each of its branches."""
    branches = {(step.tree_node, step.branch): step for step in node.rollout.steps if step.tree_node is not None}
    children: dict[Payee, list[GenerateResult]] = {(node.rollout.id, actor): []}
    for child in node.children:
        branch = _spawned_by(child)
        step = None if branch is None else branches.get(branch)
        if step is None or step.selected:
            children[node.rollout.id, actor].append(child)
        if step is not None and step.tree_node is not None and step.actor_id == actor:
            children.setdefault((node.rollout.id, actor, step.tree_node, step.branch), []).append(child)
    return children


def _plays(node: GenerateResult, actor: str) -> bool:
    return actor in node.rollout.rewards or any(step.actor_id == actor for step in node.rollout.steps)


def _warn_of_strangers(edge: Edge, nodes: Sequence[GenerateResult], episode_type: str, actor: str) -> None:
    """Warn about an actor that never occurs: a mistyped name would silently have no effect."""
    there = [node for node in nodes if node.rollout.episode_type == episode_type]
    if there and not any(_plays(node, actor) for node in there):
        warnings.warn(
            f"{type(edge).__name__}: no episode {episode_type!r} of this batch has an actor {actor!r}; of the first "
            f"{sorted(there[0].rollout.rewards)} are rewarded",
            stacklevel=3,
        )
