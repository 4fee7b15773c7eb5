"""Games for two seats: rules, the episode that plays them, what their tasks share, and how good a policy is."""

from __future__ import annotations

from .episode import TwoPlayerEpisode
from .query import Decision, QueriedPolicy, SolvedGame, interval, measure_exploitability, sample_policy, score_policy
from .rules import SEATS, PlayerFactory, Rules
from .task import TwoPlayerOptions, TwoPlayerTask
from .tree import Exploitability, GameTree

__all__ = [
    "SEATS",
    "Decision",
    "Exploitability",
    "GameTree",
    "PlayerFactory",
    "QueriedPolicy",
    "Rules",
    "SolvedGame",
    "TwoPlayerEpisode",
    "TwoPlayerOptions",
    "TwoPlayerTask",
    "interval",
    "measure_exploitability",
    "sample_policy",
    "score_policy",
]
