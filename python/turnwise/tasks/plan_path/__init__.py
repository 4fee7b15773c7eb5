"""Plan-Path: find routes through a grid with walls, as a tool agent and a planner, or as one solver.

Read in this order: team, env, maze, prompts, demonstrations.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.plan_path.demonstrations import demonstrations
from turnwise.tasks.plan_path.env import PlanPathEnv, Scoring
from turnwise.tasks.plan_path.maze import (
    Difficulty,
    Maze,
    draw_mazes,
    format_maze,
    parse_maze,
    shortest_route,
    split_of_maze,
    walk,
)
from turnwise.tasks.plan_path.prompts import plan_path_messages
from turnwise.tasks.plan_path.team import PlanPathEpisode, PlanPathOptions, PlanPathTask
from turnwise.tasks.routes import Outcome, StepResult, parse_route

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
