"""Negotiation for two seats: a pool of resources, private values, offers.

Read in this order: task, game, players.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.negotiation.game import NegotiationRules, divisions, nash_solution, utilities, utility, value_rows
from turnwise.tasks.negotiation.players import bargainer, best_bargain, random_player
from turnwise.tasks.negotiation.task import NegotiationOptions, NegotiationTask

__all__ = [
    "NegotiationOptions",
    "NegotiationRules",
    "NegotiationTask",
    "bargainer",
    "best_bargain",
    "divisions",
    "nash_solution",
    "random_player",
    "utilities",
    "utility",
    "value_rows",
]
