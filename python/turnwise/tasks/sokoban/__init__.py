"""Sokoban: push boxes onto goals, as a tool agent and a planner, or as one solver.

Read in this order: team, env, level, prompts, demonstrations.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.routes import Outcome, Scoring, StepResult
from turnwise.tasks.sokoban.env import SokobanEnv
from turnwise.tasks.sokoban.level import (
    Difficulty,
    Level,
    State,
    draw_levels,
    format_level,
    parse_level,
    shortest_route,
)
from turnwise.tasks.sokoban.prompts import sokoban_messages
from turnwise.tasks.sokoban.team import SokobanEpisode, SokobanOptions, SokobanTask

__all__ = [
    "Difficulty",
    "Level",
    "Outcome",
    "Scoring",
    "SokobanEnv",
    "SokobanEpisode",
    "SokobanOptions",
    "SokobanTask",
    "State",
    "StepResult",
    "draw_levels",
    "format_level",
    "parse_level",
    "shortest_route",
    "sokoban_messages",
]
