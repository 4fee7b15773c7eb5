"""Plan-Path: find routes through a grid with walls, as a tool agent and a planner, or as one solver.

Read in this order: team, env, maze, prompts.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.plan_path.env import PlanPathEnv, PlanPathScoring
from turnwise.tasks.plan_path.maze import (
    parse_maze,
)
from turnwise.tasks.plan_path.prompts import plan_path_messages
from turnwise.tasks.plan_path.team import PlanPathEpisode, PlanPathOptions, PlanPathTask
from turnwise.tasks.routes import parse_route

__all__ = [
    "PlanPathEnv",
    "PlanPathEpisode",
    "PlanPathOptions",
    "PlanPathScoring",
    "PlanPathTask",
    "parse_maze",
    "parse_route",
    "plan_path_messages",
]
