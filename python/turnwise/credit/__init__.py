"""Credit rules: rewards in, advantages out. One rule is one file; ``registry`` finds it by name.

Most rules are a key per sample and a call of ``ops.group_advantage``; a new one is a subclass of :class:`GroupCredit`
with its ``group_key``. None of them has a critic: for one of your own there is ``ops.gae``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from turnwise.credit.at_grpo import ATGRPOCredit
from turnwise.credit.base import RULE_METHODS, Credit, GroupCredit
from turnwise.credit.constant import ConstantCredit
from turnwise.credit.dr_grpo import DrGRPOCredit
from turnwise.credit.dr_mas import DrMASCredit
from turnwise.credit.edges import Difference, FromChildren
from turnwise.credit.episodic import EpisodicCredit
from turnwise.credit.gigpo import GiGPOCredit
from turnwise.credit.grpo import GRPOCredit, HierarchyCredit
from turnwise.credit.levels import LevelCredit
from turnwise.credit.opo import OPOCredit
from turnwise.credit.pass_at_k import PassAtKCredit
from turnwise.credit.rae import RAECredit
from turnwise.credit.reinforce_pp import ReinforcePPCredit
from turnwise.credit.rloo import RLOOCredit
from turnwise.credit.turn_returns import TurnReturnsCredit
from turnwise.credit.vine import VineCredit
from turnwise.naming import construct, find_class

registry: dict[str, type[Credit]] = {
    "grpo": GRPOCredit,
    "dr_grpo": DrGRPOCredit,
    "rloo": RLOOCredit,
    "opo": OPOCredit,
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

__all__ = [
    "ATGRPOCredit",
    "ConstantCredit",
    "Credit",
    "Difference",
    "DrGRPOCredit",
    "DrMASCredit",
    "EpisodicCredit",
    "FromChildren",
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
    "registry",
]


def build_rule(
    name: str,
    options: Mapping[str, Any],
    key: str = "credit.rule",
    options_key: str = "credit.options",
    *,
    methods: Iterable[str] = RULE_METHODS,
) -> Any:
    """The rule that ``name`` stands for in :data:`registry`, or ``"module:Class"``, made with ``options``.

    ``key`` and ``options_key`` are the configuration keys of both. Raises ``ValueError`` that names them; a class
    without ``methods`` is no rule and not made.
    """
    rule = find_class(registry, name, key, methods=methods, like="turnwise.credit.Credit")
    gone = "include_truncated"
    if gone in options and callable(rule) and gone not in inspect.signature(rule).parameters:
        raise ValueError(
            f"config key '{options_key}.{gone}' = {options[gone]!r}: this option is gone: completions that ran into "
            "their token limit now always count with their reward. Delete the key; to keep them out of the loss, set "
            "filter.truncated = true"
        )
    return construct(rule, options, options_key)
