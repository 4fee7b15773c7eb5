"""Kuhn poker for two seats: rules, equilibria, and the exact exploitability of a policy.

Read in this order: task, game.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.kuhn_poker.game import (
    DEALS,
    INFORMATION_SETS,
    VALUE,
    KuhnRules,
    equilibrium,
    kuhn_tree,
    payoff,
    solve,
    table_player,
)
from turnwise.tasks.kuhn_poker.task import KuhnOptions, KuhnPokerTask

__all__ = [
    "DEALS",
    "INFORMATION_SETS",
    "VALUE",
    "KuhnOptions",
    "KuhnPokerTask",
    "KuhnRules",
    "equilibrium",
    "kuhn_tree",
    "payoff",
    "solve",
    "table_player",
]
