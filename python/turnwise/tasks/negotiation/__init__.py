"""Negotiation for two seats: a pool of resources, private values, offers.

Read in this order: task, game.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.negotiation.game import (
    NegotiationRules,
    bargainer,
    best_bargain,
    divisions,
    nash_solution,
    random_player,
    utility,
    value_rows,
)
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
    "utility",
    "value_rows",
]
