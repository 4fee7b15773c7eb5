"""Prompts of the Plan-Path players, and imperfect routes for a supervised warm start.

The prompts are short, so that a tiny model trains fast, and clear to a large one.
"""

from __future__ import annotations

from functools import partial
from random import Random

from turnwise.tasks import routes
from turnwise.tasks.plan_path.env import PlanPathEnv
from turnwise.tasks.plan_path.maze import Maze, format_maze, neighbour, parse_maze, shortest_route, walk
from turnwise.tasks.routes import MOVES, UNREAD, RouteGame, RouteOutcome, demonstrate_routes, route_messages

_REPLY = "Reply with moves, such as U R R D."

SYSTEM_PROMPTS = {
    "tool": f"Suggest a route from A to G around the walls #. {_REPLY}",
    "planner": f"Choose the moves from A to G around the walls #; the route is a suggestion. {_REPLY}",
    "solver": f"Walk from A to G around the walls #. {_REPLY}",
}


# ---------------------------------------------------------------------------------------------------------------------
# Demonstrations
# ---------------------------------------------------------------------------------------------------------------------
HABIT = 0.8  # share of the faulty routes that are straight; the others have the same moves in a random order


def straight_route(maze: Maze, first: str = "U") -> str:
    """Go up or down to the goal's row, then left or right to its column, ignoring walls.

    Example: in ``A#G / ... / ..#`` the route is ``"RR"``, into the wall. ``first="L"`` swaps the two parts.
    """
    down = maze.goal // maze.side - maze.start // maze.side
    right = maze.goal % maze.side - maze.start % maze.side
    parts = ["D" * down if down > 0 else "U" * -down, "R" * right if right > 0 else "L" * -right]
    return "".join(parts if first in "UD" else parts[::-1])


def detour(maze: Maze, blocked: str) -> str:
    """Take one step other than ``blocked``, then go straight to the goal, first along the axis of the blocked move.

    Chooses the step that gives the shortest detour; a step back is the last choice.

    Example: in ``A#G / ... / ..#``, where ``"R"`` is blocked, the route is ``"DRRU"``.
    """
    back = {"U": "D", "D": "U", "L": "R", "R": "L"}[blocked]
    steps = {move: neighbour(maze, maze.start, move) for move in MOVES if move != blocked}
    ways = [
        move + straight_route(maze._replace(start=cell), first=blocked)
        for move, cell in steps.items()
        if cell is not None
    ]
    return min(ways, key=lambda way: (way[0] == back, len(way)))


def suggest(maze: Maze, quality: float, rng: Random, blocked: str = "") -> str:
    """Return the shortest route with chance ``quality``, else the straight one, sometimes with its moves shuffled.

    A faulty route that begins with the ``blocked`` move is replaced by a detour.
    """
    if rng.random() < quality:
        return shortest_route(maze)
    moves = straight_route(maze)
    moves = moves if rng.random() < HABIT else "".join(rng.sample(moves, len(moves)))
    return detour(maze, blocked) if moves[0] == blocked else moves


def decide(maze: Maze, suggestion: str, quality: float, rng: Random, blocked: str = "") -> str:
    """Keep ``suggestion`` if it reaches the goal. Else return the shortest route with chance ``quality``.

    Otherwise return a faulty one. The other straight route replaces a faulty one that equals the suggestion.
    """
    if preview(maze, suggestion).goal:
        return suggestion
    route = suggest(maze, quality, rng, blocked)
    return straight_route(maze, first="L") if route == suggestion and not blocked else route


def preview(maze: Maze, route: str) -> RouteOutcome:
    """Return the outcome of walking ``route`` from the start."""
    return PlanPathEnv(maze).preview(route)


def failed_round(maze: Maze, rng: Random) -> tuple[Maze, RouteOutcome, RouteOutcome]:
    """Play a faulty round. Returns the maze that starts at the walk's end, and both outcomes: walk and suggestion."""
    env = PlanPathEnv(maze)

    def short_of_goal() -> str:
        """Make a faulty route. If it would reach the goal, leave out its last step."""
        route = suggest(maze, 0.0, rng)
        cells = walk(maze, maze.start, route)
        return route[: len(cells) - 1] if cells[-1:] == (maze.goal,) else route

    suggestion, route = (None if rng.random() < UNREAD else short_of_goal() for _ in range(2))
    suggested = env.preview(suggestion)
    walked = env.step(route and (suggestion or route)).outcome
    return maze._replace(start=env.position), walked, suggested


GAME = RouteGame(
    "plan-path", SYSTEM_PROMPTS, format_maze, parse_maze, shortest_route, preview, suggest, decide, failed_round
)
plan_path_messages = partial(route_messages, GAME)
"""Builds a prompt about a maze; the third argument is the walker's cell."""
read_messages = partial(routes.read_messages, GAME)
demonstrations = partial(demonstrate_routes, GAME)
"""Demonstrates routes through mazes. A faulty route usually (``HABIT``) goes straight: first up or down, then left or
right, through any wall. A planner walks a suggestion that reaches the goal, and finds another route if it doesn't."""
