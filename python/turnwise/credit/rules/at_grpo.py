"""AT-GRPO: groups by agent and turn, so that all members of a group answer the same prompt.

    A = (r - mean_k) / (std_k + eps)        k = (question, actor, turn)

where ``r`` is the step's own reward. Under tree sampling, the branches of one node share one state and one prompt, so
the node is part of the key: ``k = (question, actor, turn, trajectory, node)``. All branches train, also those that were
not selected. eps is 1e-8 as in the paper's text. (Zhao et al., Stronger Together, https://arxiv.org/abs/2510.11062.)
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.credit.base import GroupCredit, Key
from turnwise.types import Sample


@dataclass(kw_only=True)
class ATGRPOCredit(GroupCredit):
    """Groups rows by ``(group_id, actor, turn)``, in a tree by ``(group_id, actor, turn, rollout_id, tree_node)``."""

    eps: float = 1e-8

    def group_key(self, sample: Sample) -> Key:
        key: Key = (sample.group_id, sample.actor, sample.turn)
        return key if sample.tree_node is None else (*key, sample.rollout_id, sample.tree_node)
