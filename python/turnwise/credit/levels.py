"""Credit over several levels of episodes: edges pay parents and children first, then any rule compares.

    R' = edges(R)        A = rule(R')

Edges apply in order, each to the rewards that earlier edges left. Pay the parents of the leaves first, then their
parents, so that a level can pass on its payment. See :mod:`turnwise.credit.edges`. The edges are turnwise's own;
the rule's file names its source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from turnwise.credit.base import Credit, build_rule
from turnwise.credit.edges import Edge, Pay, Payee, build_edge, is_finished
from turnwise.types import CreditAssigner, CreditCapabilities, ExplainedCredit, GenerateResult, Sample, capabilities_of


@dataclass(kw_only=True)
class LevelCredit(Credit):
    """Applies ``rule``, an object or a name with ``options``, to the rewards that ``edges`` have paid.

    An actor that an edge pays gets that amount in every call of the episode; its step rewards no longer count. In a
    tree of which one branch goes on, the children that a branch spawned pay the call of that branch.

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
                f"rule={self.rule!r}: it reads the values of reward functions, which edges do not change; expected "
                "another rule, or no edges"
            )
        self.capabilities = CreditCapabilities(trees=ruled.trees, ends=False, step_rewards=False, whole_episodes=True)

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
        nodes = _finished_nodes(samples)
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
