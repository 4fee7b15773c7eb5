"""AT-GRPO: agent- and turn-wise groups, so that all members of a group answer the same prompt.

    A = (r - mean_k) / (std_k + eps)        k = (question, actor, turn)

with ``r`` the step's own reward. Under tree sampling the branches that grew from one node share one state and one
prompt, so the node joins the key: ``k = (question, actor, turn, trajectory, node)``. All branches train, also those
that were not selected. eps is the 1e-8 of the paper's text. (Zhao et al., Stronger Together,
https://arxiv.org/abs/2510.11062.)
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.credit.base import GroupCredit, Key
from turnwise.types import Sample


@dataclass(kw_only=True)
class ATGRPOCredit(GroupCredit):
    """Group ``(group_id, actor, turn)``, in a tree ``(group_id, actor, turn, rollout_id, tree_node)``; every row."""

    eps: float = 1e-8

    def group_key(self, sample: Sample) -> Key:
        key: Key = (sample.group_id, sample.actor, sample.turn)
        return key if sample.tree_node is None else (*key, sample.rollout_id, sample.tree_node)
