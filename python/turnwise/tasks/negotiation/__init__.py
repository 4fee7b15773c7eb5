"""Negotiation for two seats: a pool of resources, private values, offers."""

from __future__ import annotations

from .game import NegotiationRules, divisions, nash_solution, utilities, utility, value_rows
from .players import bargainer, best_bargain, random_player
from .task import NegotiationOptions, NegotiationTask

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
