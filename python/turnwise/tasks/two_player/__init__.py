"""Games for two seats: rules, the episode that plays them, the base of their tasks, and the exploitability of policies.

Read in this order: task, rules, episode, query, tree.
May import: types, utils, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.two_player.episode import TwoPlayerEpisode
from turnwise.tasks.two_player.query import (
    Decision,
    QueriedPolicy,
    SolvedGame,
    interval,
    measure_exploitability,
    sample_policy,
    score_policy,
)
from turnwise.tasks.two_player.rules import SEATS, PlayerFactory, Rules
from turnwise.tasks.two_player.task import TwoPlayerOptions, TwoPlayerTask
from turnwise.tasks.two_player.tree import Exploitability, GameTree

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
