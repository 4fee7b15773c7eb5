"""Credit over several levels of episodes: edges pay parents and children first, then any rule compares.

    R' = edges(R)        A = rule(R')

Edges apply in their order, each to what those before it left: pay the parents of the leaves first, then their parents,
and what a level is paid by may itself have been paid. See :mod:`turnwise.credit.edges`. The edges are turnwise's own;
the rule has its source in its own file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from turnwise.credit.base import Credit
from turnwise.credit.edges import Edge, Pay, build_edge, is_finished
from turnwise.types import CreditAssigner, GenerateResult, Sample


@dataclass(kw_only=True)
class LevelCredit(Credit):
    """``rule``, an object or a name with its ``options``, over rewards that ``edges`` have paid.

    Who is paid by an edge earns that, in every call of the episode: rewards of single steps no longer count there. For
    plain trajectories, not for trees: which branch a child belongs to is not known.

    Example::

        LevelCredit(rule=HierarchyCredit(), edges=[
            FromChildren(parent="propose", actor="proposer", child="solve", child_actor="solver"),
            Difference(parent="propose", child="solve", child_actor="solver", by="max"),
        ])
    """

    trees: ClassVar[bool] = False
    ends: ClassVar[bool] = False
    rule: CreditAssigner | str = "hierarchy"
    options: Mapping[str, Any] = field(default_factory=dict)
    edges: Sequence[Edge | Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.rule, str):
            from turnwise.credit import build_rule

            self._rule: CreditAssigner = build_rule(self.rule, self.options, "rule", "options")
        elif self.options:
            raise ValueError(f"options={dict(self.options)!r}: they are for a rule's name, and rule is {self.rule!r}")
        else:
            self._rule = self.rule
        if isinstance(self.edges, (str, Mapping)):
            raise TypeError(f"edges={self.edges!r}: expected a list of edges")
        self._edges = [build_edge(edge) for edge in self.edges]

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Advantages ``[B]`` float32 of ``samples``, in their order."""
        return np.asarray(self._rule.compute_columns(self.paid(samples)))

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """What the rule says, of the rewards that the edges paid."""
        inner: Any = self._rule if hasattr(self._rule, "zero_causes") else super()
        return list(inner.zero_causes(self.paid(samples), rows))

    def paid(self, samples: Sequence[Sample]) -> list[Sample]:
        """``samples`` with the rewards that the edges pay. Raises ``ValueError`` for samples that tell no tree, and for
        siblings of a branched one."""
        nodes = _finished_nodes(samples)
        before: Pay = {
            (node.rollout.id, actor): float(reward) for node in nodes for actor, reward in node.rollout.rewards.items()
        }
        paid: Pay = {}
        for edge in self._edges:
            paid |= edge.pay(nodes, before | paid)
        return [_with_reward(sample, before, paid) for sample in samples]

    def state_dict(self) -> dict[str, Any]:
        """That of the rule."""
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state)


def _finished_nodes(samples: Sequence[Sample]) -> list[GenerateResult]:
    """The finished episodes of all trees that ``samples`` come from, parents before their children."""
    tops: dict[int, GenerateResult] = {}
    for sample in samples:
        if sample.top is None:
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.trajectory!r} tells no tree of episodes: expected "
                "samples of turnwise.samples.collect_samples(results)"
            )
        tops.setdefault(id(sample.top), sample.top)
    return [node for top in tops.values() for node in top.walk() if is_finished(node)]


def _with_reward(sample: Sample, before: Pay, paid: Pay) -> Sample:
    key = (sample.trajectory, sample.actor)
    if key not in paid:
        return sample
    if sample.parent is not None or "ends" in sample.info:
        raise ValueError(
            f"step {sample.step_index} of rollout {sample.trajectory!r} grew in a tree: which of its branches spawned "
            "which child is not known; edges need plain trajectories (rollout.branches = 1)"
        )
    # What a penalty took from the sample is no reward of the rollout, and stays taken.
    taken = sample.trajectory_reward - before[key] if key in before else 0.0
    return replace(sample, reward=paid[key] + taken, trajectory_reward=paid[key] + taken, scored=False)
