"""Credit over several levels of episodes: edges pay parents and children first, then any rule compares.

    R' = edges(R)        A = rule(R')

Edges apply in order, each to the rewards that earlier edges left. Pay the parents of the leaves first, then their
parents, so that a level can pass on its payment. See :mod:`turnwise.credit.edges`. The edges are turnwise's own;
the rule's file names its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from turnwise.credit.base import Credit, build_rule
from turnwise.credit.edges import Edge, Pay, build_edge, is_finished
from turnwise.types import CreditAssigner, GenerateResult, Sample


@dataclass(kw_only=True)
class LevelCredit(Credit):
    """Applies ``rule``, an object or a name with ``options``, to the rewards that ``edges`` have paid.

    An actor that an edge pays gets that amount in every call of the episode; its step rewards no longer count. It works
    on plain trajectories, not on trees, because the branch that spawned a child is unknown.

    Example::

        LevelCredit(rule=HierarchyCredit(), edges=[
            FromChildren(parent="propose", actor="proposer", child="solve", child_actor="solver"),
            Difference(parent="propose", child="solve", child_actor="solver", by="max"),
        ])
    """

    trees: ClassVar[bool] = False
    ends: ClassVar[bool] = False
    step_rewards = False
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

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        return np.asarray(self._rule.compute_columns(self.paid(samples)))

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the rule's causes, computed on the rewards that the edges paid."""
        inner: Any = self._rule if hasattr(self._rule, "zero_causes") else super()
        return list(inner.zero_causes(self.paid(samples), rows))

    def paid(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return ``samples`` with the rewards that the edges pay.

        Raises ``ValueError`` for samples without their tree of episodes, and for paid steps of a tree-sampled rollout.
        """
        nodes = _finished_nodes(samples)
        before: Pay = {
            (node.rollout.id, actor): float(reward) for node in nodes for actor, reward in node.rollout.rewards.items()
        }
        paid: Pay = {}
        for edge in self._edges:
            paid |= edge.pay(nodes, before | paid)
        return [_with_reward(sample, before, paid) for sample in samples]

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state."""
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state)


def _finished_nodes(samples: Sequence[Sample]) -> list[GenerateResult]:
    """Return the finished episodes of all trees of ``samples``, parents before their children."""
    tops: dict[int, GenerateResult] = {}
    for sample in samples:
        if sample.root_result is None:
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.rollout_id!r} tells no tree of episodes: expected "
                "samples of turnwise.samples.collect.collect_samples(results)"
            )
        tops.setdefault(id(sample.root_result), sample.root_result)
    return [node for top in tops.values() for node in top.walk() if is_finished(node)]


def _with_reward(sample: Sample, before: Pay, paid: Pay) -> Sample:
    key = (sample.rollout_id, sample.actor)
    if key not in paid:
        return sample
    if sample.tree_node is not None or "ends" in sample.info:
        raise ValueError(
            f"step {sample.step_index} of rollout {sample.rollout_id!r} grew in a tree: which of its branches spawned "
            "which child is not known; edges need plain trajectories (rollout.branches = 1)"
        )
    # The rollout's reward does not include the sample's penalty, so subtract it from the payment too.
    taken = sample.trajectory_reward - before[key] if key in before else 0.0
    return replace(sample, reward=paid[key] + taken, trajectory_reward=paid[key] + taken, has_step_reward=False)
