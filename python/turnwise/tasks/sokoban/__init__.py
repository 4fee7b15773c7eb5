"""Sokoban: push boxes onto goals, as a tool agent and a planner, or as one solver.

Read in this order: team, env, level, prompts.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.routes import RouteScoring
from turnwise.tasks.sokoban.env import SokobanEnv
from turnwise.tasks.sokoban.level import (
    State,
    parse_level,
)
from turnwise.tasks.sokoban.prompts import sokoban_messages
from turnwise.tasks.sokoban.team import SokobanEpisode, SokobanOptions, SokobanTask

__all__ = [
    "RouteScoring",
    "SokobanEnv",
    "SokobanEpisode",
    "SokobanOptions",
    "SokobanTask",
    "State",
    "parse_level",
    "sokoban_messages",
]
