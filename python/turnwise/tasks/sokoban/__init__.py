"""Sokoban for a tool agent and a planner, or for one solver: boxes onto goals."""

from __future__ import annotations

from turnwise.tasks.routes import Outcome, Scoring, StepResult

from .env import SokobanEnv
from .level import Difficulty, Level, State, draw_levels, format_level, parse_level, shortest_route
from .prompts import sokoban_messages
from .team import SokobanEpisode, SokobanOptions, SokobanTask

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
