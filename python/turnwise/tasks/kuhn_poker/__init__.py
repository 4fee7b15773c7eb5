"""Kuhn poker for two seats: rules, equilibria, and the exact exploitability of a policy."""

from __future__ import annotations

from .exact import kuhn_tree, solve
from .game import DEALS, INFORMATION_SETS, VALUE, KuhnRules, equilibrium, payoff, table_player
from .task import KuhnOptions, KuhnPokerTask

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
