"""Credit rules turn rewards into advantages. One rule is one file under ``rules``; ``registry`` finds it by name.

Read in this order: base, grouping, rules, levels, columns.
May import: types, utils, samples, _C.

It needs only numpy. Most rules need only a key per sample, see :class:`GroupCredit`. To write a new one, subclass
:class:`GroupCredit` and define its ``group_key``. No rule has a critic. ``ops.gae`` serves your own rule with one.
"""

from __future__ import annotations

from turnwise.utils.registry import require

require("turnwise.credit", "numpy")

from turnwise.credit.base import Credit, GroupCredit, build_rule, registry
from turnwise.credit.columns import credit_columns
from turnwise.credit.levels import Difference, FromChildren, LevelCredit
from turnwise.credit.rules.at_grpo import ATGRPOCredit
from turnwise.credit.rules.dr_mas import DrMASCredit
from turnwise.credit.rules.gdpo import GDPOCredit
from turnwise.credit.rules.gigpo import GiGPOCredit
from turnwise.credit.rules.grpo import DrGRPOCredit, GRPOCredit, HierarchyCredit, OPOCredit, RLOOCredit
from turnwise.credit.rules.pass_at_k import PassAtKCredit
from turnwise.credit.rules.rae import RAECredit
from turnwise.credit.rules.reinforce_pp import ReinforcePPCredit
from turnwise.credit.rules.turn_returns import TurnReturnsCredit
from turnwise.credit.rules.vine import VineCredit
from turnwise.credit.rules.without_baseline import ConstantCredit, EpisodicCredit

registry.update(
    {
        "grpo": GRPOCredit,
        "dr_grpo": DrGRPOCredit,
        "rloo": RLOOCredit,
        "opo": OPOCredit,
        "gdpo": GDPOCredit,
        "pass_at_k": PassAtKCredit,
        "reinforce_pp": ReinforcePPCredit,
        "hierarchy": HierarchyCredit,
        "levels": LevelCredit,
        "dr_mas": DrMASCredit,
        "at_grpo": ATGRPOCredit,
        "turn_returns": TurnReturnsCredit,
        "gigpo": GiGPOCredit,
        "vine": VineCredit,
        "rae": RAECredit,
        "constant": ConstantCredit,
        "episodic": EpisodicCredit,
    }
)

__all__ = [
    "ATGRPOCredit",
    "ConstantCredit",
    "Credit",
    "Difference",
    "DrGRPOCredit",
    "DrMASCredit",
    "EpisodicCredit",
    "FromChildren",
    "GDPOCredit",
    "GRPOCredit",
    "GiGPOCredit",
    "GroupCredit",
    "HierarchyCredit",
    "LevelCredit",
    "OPOCredit",
    "PassAtKCredit",
    "RAECredit",
    "RLOOCredit",
    "ReinforcePPCredit",
    "TurnReturnsCredit",
    "VineCredit",
    "build_rule",
    "credit_columns",
    "registry",
]
