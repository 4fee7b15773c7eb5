"""Imperfect routes for a supervised warm start: the format is always right, but the route often hits a wall."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from turnwise.tasks.plan_path.env import PlanPathEnv
from turnwise.tasks.plan_path.maze import Maze, neighbour, shortest_route, walk
from turnwise.tasks.plan_path.prompts import plan_path_messages
from turnwise.tasks.routes import MOVES, UNREAD, Outcome, RouteGame, demonstrate_routes
from turnwise.types import Messages

HABIT = 0.8  # share of the faulty routes that follow the habit; the others have its moves in a random order


def demonstrations(
    mazes: Sequence[Maze], actors: Sequence[str], seed: int | str, quality: float = 0.4, rounds: int = 3
) -> list[tuple[str, Messages, str]]:
    """One ``(actor id, messages, completion)`` per maze, the actors taking turns.

    ``quality`` in [0, 1] is the chance that a route is the shortest one. A faulty route is by habit the straight one,
    first up or down and then left or right, whatever stands in the way; a planner's habit is to walk the suggestion.
    Some are of a later round of the ``rounds`` that there are: what the prompt calls blocked is not tried again there.
    Below one half the habit is the likeliest answer, so a model that has learnt the demonstrations well fails most
    mazes when greedy and solves some when sampled, which is where reinforcement learning starts.
    """
    rng = Random(f"plan-path-demonstrations/{seed}")
    game = RouteGame(plan_path_messages, suggest, decide, failed_round)
    return demonstrate_routes(game, mazes, actors, rng, quality, rounds)


def straight_route(maze: Maze, first: str = "U") -> str:
    """Up or down to the goal's row, then left or right to its column, through walls where there are any.

    Example: in ``A#G / ... / ..#`` it is ``"RR"``, into the wall. ``first="L"`` turns the two parts round.
    """
    down = maze.goal // maze.side - maze.start // maze.side
    right = maze.goal % maze.side - maze.start % maze.side
    parts = ["D" * down if down > 0 else "U" * -down, "R" * right if right > 0 else "L" * -right]
    return "".join(parts if first in "UD" else parts[::-1])


def detour(maze: Maze, blocked: str) -> str:
    """A step beside ``blocked``, to whichever side the goal is nearer from, and straight on, first past what blocks.

    Example: in ``A#G / ... / ..#`` where ``"R"`` is blocked it is ``"DRRU"``.
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
    """The shortest route with chance ``quality``, else the straight one, by habit in its order or in a random one.

    One that begins with the move that is known to be ``blocked`` gives way to a detour.
    """
    if rng.random() < quality:
        return shortest_route(maze)
    moves = straight_route(maze)
    moves = moves if rng.random() < HABIT else "".join(rng.sample(moves, len(moves)))
    return detour(maze, blocked) if moves[0] == blocked else moves


def decide(maze: Maze, suggestion: str, quality: float, rng: Random, blocked: str = "") -> str:
    """``suggestion`` where it reaches the goal; else the shortest route with chance ``quality``, or it stands.

    One that begins with the move that is known to be ``blocked`` gives way to a detour.
    """
    if walk(maze, maze.start, suggestion).cells[-1:] == (maze.goal,):
        return suggestion
    if rng.random() < quality:
        return shortest_route(maze)
    return detour(maze, blocked) if suggestion[0] == blocked else suggestion


def failed_round(maze: Maze, rng: Random) -> tuple[Maze, Outcome, Outcome]:
    """The maze from where a team that plays by habit ends a round, what its walk came to, and what its suggestion."""
    env = PlanPathEnv(maze)
    suggestion, route = (None if rng.random() < UNREAD else _short_of_goal(maze, rng) for _ in range(2))
    suggested = env.preview(suggestion)
    walked = env.step(route and (suggestion or route)).outcome
    return maze._replace(start=env.position), walked, suggested


def _short_of_goal(maze: Maze, rng: Random) -> str:
    """A faulty route; where it would arrive, all of it but the last step."""
    route = suggest(maze, 0.0, rng)
    cells = walk(maze, maze.start, route).cells
    return route[: len(cells) - 1] if cells[-1:] == (maze.goal,) else route
