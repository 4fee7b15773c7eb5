"""Plan-Path: routes through a walled grid, for a tool agent and a planner, or for one solver."""

from __future__ import annotations

from turnwise.tasks.routes import Outcome, StepResult, parse_route

from .demonstrations import demonstrations
from .env import PlanPathEnv, Scoring
from .maze import (
    Difficulty,
    Maze,
    draw_mazes,
    format_maze,
    parse_maze,
    shortest_route,
    split_of_maze,
    walk,
)
from .prompts import plan_path_messages
from .team import PlanPathEpisode, PlanPathOptions, PlanPathTask

__all__ = [
    "Difficulty",
    "Maze",
    "Outcome",
    "PlanPathEnv",
    "PlanPathEpisode",
    "PlanPathOptions",
    "PlanPathTask",
    "Scoring",
    "StepResult",
    "demonstrations",
    "draw_mazes",
    "format_maze",
    "parse_maze",
    "parse_route",
    "plan_path_messages",
    "shortest_route",
    "split_of_maze",
    "walk",
]
