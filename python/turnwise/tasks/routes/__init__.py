"""Common parts of games with moves on a grid: actors suggest routes, and the last actor's route is walked.

Read in this order: task, episode, scoring, text, demonstrations.
May import: types, arena, tasks.
"""

from __future__ import annotations

from turnwise.tasks.routes.demonstrations import (
    UNREAD,
    RouteGame,
    demonstrate_routes,
    read_messages,
    route_messages,
)
from turnwise.tasks.routes.episode import RouteEpisode
from turnwise.tasks.routes.scoring import RouteOutcome, RouteScoring, StepResult, outcome_of
from turnwise.tasks.routes.task import RouteOptions, RouteTask
from turnwise.tasks.routes.text import MOVES, board_message, check_note, format_route, parse_route, read_board

__all__ = [
    "MOVES",
    "UNREAD",
    "RouteEpisode",
    "RouteGame",
    "RouteOptions",
    "RouteOutcome",
    "RouteScoring",
    "RouteTask",
    "StepResult",
    "board_message",
    "check_note",
    "demonstrate_routes",
    "format_route",
    "outcome_of",
    "parse_route",
    "read_board",
    "read_messages",
    "route_messages",
]
