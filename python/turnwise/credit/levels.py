"""Credit over several levels of episodes: edges pay parents and children first, then any rule compares.

    R' = edges(R)        A = rule(R')

Edges apply in order, each to the rewards that earlier edges left. Pay the parents of the leaves first, then their
parents, so that a level can pass on its payment. Episodes that failed, or that their rubric dropped, neither pay nor
get paid. The edges are turnwise's own; the rule's file names its source.

In a tree, ``rollout.facts.spawned_by`` of a child is the branch that spawned it, ``[tree node, branch]``. Each branch
is paid from its own children, and the episode from those of its own trajectory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from turnwise.credit.base import Credit, build_rule, tops_of
from turnwise.types import CreditAssigner, CreditCapabilities, ExplainedCredit, GenerateResult, Sample, capabilities_of
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
        aggregate_of(self.by)

    def pay(self, nodes: Sequence[GenerateResult], rewards: Mapping[Payee, float]) -> Pay:
        paid: Pay = {}
        by = aggregate_of(self.by)
        for node in reversed(nodes):
            if node.rollout.episode_type != self.parent or not _plays(node, self.actor):
                continue
            for payee, children in _by_payee(node, self.actor).items():
                if not any(_is_child(child, self.child) for child in children):
                    continue
                keys: list[Payee] = [(child.rollout.id, self.child_actor) for child in finished(children, self.child)]
                values = [paid.get(known, rewards[known]) for known in keys if known in rewards]
                paid[payee] = self.own * rewards.get(payee, 0.0) + (float(by(values)) if values else self.empty)
        _warn_of_missing(self, nodes, self.parent, self.actor)
        _warn_of_missing(self, nodes, self.child, self.child_actor)
        return paid


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Pays a child its contribution to the parent's outcome: ``r_i = own * r_i + G(all) - G(all but i)``.

    ``G`` is ``by`` of the rewards of ``child_actor`` in the parent's finished children of type ``child``, or
    ``outcome``, a function of the parent's result and a list of the children's results. ``empty`` is ``G`` without
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
        aggregate_of(self.by)
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
                for index, child in enumerate(team):
                    key = (child.rollout.id, self.child_actor)
                    without = self._outcome(node, team[:index] + team[index + 1 :], rewards)
                    paid[key] = self.own * rewards[key] + whole - without
        _warn_of_missing(self, nodes, self.child, self.child_actor)
        return paid

    def _outcome(self, parent: GenerateResult, team: list[GenerateResult], rewards: Mapping[Payee, float]) -> float:
        if not team:
            return self.empty
        if self.outcome is not None:
            return float(self.outcome(parent, team))
        return float(aggregate_of(self.by)([rewards[child.rollout.id, self.child_actor] for child in team]))


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


def aggregate_of(by: str | Aggregate) -> Aggregate:
    """Return the function that ``by`` names or is."""
    aggregate = import_by_name(AGGREGATES, by, "by") if isinstance(by, str) else by
    if not callable(aggregate):
        raise TypeError(f"by={by!r}: expected one of {sorted(AGGREGATES)}, or a function of a list of rewards")
    return aggregate


def is_finished(result: GenerateResult) -> bool:
    """True if the episode ended without an error and was scored."""
    return result.rollout.error is None and result.rollout.facts.dropped is None


def finished(results: Iterable[GenerateResult], episode_type: str) -> list[GenerateResult]:
    """Return the finished ``results`` of this type, in order; continuations of the parent are not children."""
    return [result for result in results if _is_child(result, episode_type) and is_finished(result)]


def _is_child(result: GenerateResult, episode_type: str) -> bool:
    return result.rollout.episode_type == episode_type and "continues" not in result.rollout.meta


def _spawned_by(child: GenerateResult) -> Branch | None:
    node, branch = child.rollout.facts.spawned_by or (None, None)
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


def _warn_of_missing(edge: Edge, nodes: Sequence[GenerateResult], episode_type: str, actor: str) -> None:
    """Warn about an actor that never occurs: a mistyped name would silently have no effect."""
    there = [node for node in nodes if node.rollout.episode_type == episode_type]
    if there and not any(_plays(node, actor) for node in there):
        warnings.warn(
            f"{type(edge).__name__}: no episode {episode_type!r} of this batch has an actor {actor!r}; of the first "
            f"{sorted(there[0].rollout.rewards)} are rewarded",
            stacklevel=3,
        )


@dataclass(kw_only=True)
class LevelCredit(Credit):
    """Applies ``rule``, an object or a name with ``options``, to the rewards that ``edges`` have paid.

    An actor that an edge pays gets that amount in every call of the episode; its step rewards no longer count. In a
    tree where one branch goes on, the children that a branch spawned pay the call of that branch.

    Example::

        LevelCredit(rule=HierarchyCredit(), edges=[
            FromChildren(parent="propose", actor="proposer", child="solve", child_actor="solver"),
            Difference(parent="propose", child="solve", child_actor="solver", by="max"),
        ])
    """

    rule: CreditAssigner | str = "hierarchy"
    options: Mapping[str, Any] = field(default_factory=dict)
    edges: Sequence[Edge | Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.rule, str):
            self._rule: CreditAssigner = build_rule(self.rule, self.options, "rule", "options")
        elif self.options:
            raise ValueError(f"options={dict(self.options)!r}: they are for a rule's name, and rule is {self.rule!r}")
        else:
            self._rule = self.rule
        if isinstance(self.edges, (str, Mapping)):
            raise TypeError(f"edges={self.edges!r}: expected a list of edges")
        self._edges = [build_edge(edge) for edge in self.edges]
        ruled = capabilities_of(self._rule, CreditCapabilities)
        if self._edges and not ruled.mixed_rewards:
            raise ValueError(
                f"rule={self.rule!r}: its advantages don't depend on the rewards of calls, which edges change; "
                "expected another rule, or no edges"
            )
        self.capabilities = replace(ruled, ends=False, step_rewards=False, whole_episodes=True)

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        return np.asarray(self._rule.compute_columns(self.paid(samples)))

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the rule's causes, computed on the rewards that the edges paid."""
        if isinstance(self._rule, ExplainedCredit):
            return list(self._rule.zero_causes(self.paid(samples), rows))
        return super().zero_causes(samples, rows)

    def paid(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return ``samples`` with the rewards that the edges pay.

        Raises ``ValueError`` for samples without their tree of episodes, for paid steps of a rollout with several ends,
        and for a branch whose children a later action spawned.
        """
        nodes = [node for top in tops_of(samples) for node in top.walk() if is_finished(node)]
        before: Pay = {}
        for rollout in (node.rollout for node in nodes):
            before |= {(rollout.id, actor): float(reward) for actor, reward in rollout.rewards.items()}
            for step in rollout.steps:
                if step.tree_node is not None and step.reward is not None:
                    before[rollout.id, str(step.actor_id), step.tree_node, step.branch] = float(step.reward)
        paid: Pay = {}
        for edge in self._edges:
            paid |= edge.pay(nodes, before | paid)
        by_branch = {key[:2] for key in paid if len(key) == 4}
        return [_with_reward(sample, before, paid, by_branch) for sample in samples]

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state."""
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state)


def _with_reward(sample: Sample, before: Pay, paid: Pay, by_branch: Collection[tuple[str, ...]]) -> Sample:
    key: Payee = (sample.rollout_id, sample.actor)
    if sample.tree_node is not None:
        branch: Payee = (sample.rollout_id, sample.actor, sample.tree_node, sample.branch)
        if branch in paid:
            taken = sample.reward - before.get(branch, sample.reward)
            return replace(sample, reward=paid[branch] + taken, trajectory_reward=paid[branch] + taken)
        if key in by_branch:  # it spawned no child, unlike others
            return sample
    if key not in paid:
        return sample
    where = f"step {sample.step_index} of rollout {sample.rollout_id!r}"
    if "ends" in sample.info:
        raise ValueError(
            f"{where} led to several ends, whose children together would pay it: edges need one end "
            "(rollout.tree.beam_width = 1, and select other than 'none')"
        )
    if sample.tree_node is not None:
        raise ValueError(
            f"{where} is a branch that spawned no child: later actions did, and only after the branch that went on, so "
            "its siblings have nothing to compare. Branch where children are spawned (rollout.tree.branch_at)"
        )
    # The rollout's reward does not include the sample's penalty, so subtract it from the payment too.
    taken = sample.trajectory_reward - before[key] if key in before else 0.0
    return replace(sample, reward=paid[key] + taken, trajectory_reward=paid[key] + taken, has_step_reward=False)
