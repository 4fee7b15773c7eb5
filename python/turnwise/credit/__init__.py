"""Credit rules: rewards in, advantages out. One rule is one file; ``registry`` finds it by name.

All grouped rules are a key per sample and a call of ``ops.group_advantage``; a new one is a subclass of
:class:`GroupCredit` with its ``group_key``.
"""

from __future__ import annotations

from turnwise.credit.at_grpo import ATGRPOCredit
from turnwise.credit.base import Credit, GroupCredit
from turnwise.credit.constant import ConstantCredit
from turnwise.credit.dr_mas import DrMASCredit
from turnwise.credit.episodic import EpisodicCredit
from turnwise.credit.grpo import GRPOCredit, HierarchyCredit
from turnwise.credit.rae import RAECredit

registry: dict[str, type[Credit]] = {
    "grpo": GRPOCredit,
    "hierarchy": HierarchyCredit,
    "dr_mas": DrMASCredit,
    "at_grpo": ATGRPOCredit,
    "rae": RAECredit,
    "constant": ConstantCredit,
    "episodic": EpisodicCredit,
}

__all__ = [
    "ATGRPOCredit",
    "ConstantCredit",
    "Credit",
    "DrMASCredit",
    "EpisodicCredit",
    "GRPOCredit",
    "GroupCredit",
    "HierarchyCredit",
    "RAECredit",
    "registry",
]
