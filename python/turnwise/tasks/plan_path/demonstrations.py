"""Imperfect routes for a supervised warm start: the format is always right, the way often leads into a wall."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from turnwise.tasks.routes import format_route
from turnwise.types import Messages

from .maze import Maze, distances, shortest_route, walk
from .prompts import plan_path_messages

HABIT = 0.8  # share of the faulty routes that follow the habit; the others have its moves in a random order
LATER = 0.25  # share of the demonstrations that begin elsewhere in the maze, as after a first round
UNREAD = 0.1  # share of a planner's demonstrations without a suggestion, as after an unreadable reply


def demonstrations(
    mazes: Sequence[Maze], actors: Sequence[str], seed: int | str, quality: float = 0.4
) -> list[tuple[str, Messages, str]]:
    """One ``(actor id, messages, completion)`` per maze, the actors taking turns.

    ``quality`` in [0, 1] is the chance that a route is the shortest one. A faulty route is by habit the straight one,
    first up or down and then left or right, whatever stands in the way; a planner's habit is to walk the suggestion.
    Below one half the habit is the likeliest answer, so a model that has learnt the demonstrations well fails most
    mazes when greedy and solves some when sampled, which is where reinforcement learning starts.
    """
    if not 0 <= quality <= 1:
        raise ValueError(f"quality={quality!r}: expected a number in [0, 1]")
    if not actors:
        raise ValueError("actors=(): expected at least one actor id")
    rng = Random(f"plan-path-demonstrations/{seed}")
    made = []
    for index, drawn in enumerate(mazes):
        actor = actors[index % len(actors)]
        maze = _met_later(drawn, rng) if rng.random() < LATER else drawn
        suggestion = suggest(maze, quality, rng) if actor == "planner" and rng.random() >= UNREAD else None
        answer = decide(maze, suggestion, quality, rng) if suggestion else suggest(maze, quality, rng)
        made.append((actor, plan_path_messages(actor, maze, route=suggestion), format_route(answer)))
    return made


def straight_route(maze: Maze) -> str:
    """Up or down to the goal's row, then left or right to its column, through walls where there are any.

    Example: in ``A#G / ... / ..#`` it is ``"RR"``, into the wall.
    """
    down = maze.goal // maze.side - maze.start // maze.side
    right = maze.goal % maze.side - maze.start % maze.side
    return ("D" * down if down > 0 else "U" * -down) + ("R" * right if right > 0 else "L" * -right)


def suggest(maze: Maze, quality: float, rng: Random) -> str:
    """The shortest route with chance ``quality``, else the straight one, by habit in its order or in a random one."""
    if rng.random() < quality:
        return shortest_route(maze)
    moves = straight_route(maze)
    return moves if rng.random() < HABIT else "".join(rng.sample(moves, len(moves)))


def decide(maze: Maze, suggestion: str, quality: float, rng: Random) -> str:
    """``suggestion`` where it reaches the goal; else the shortest route with chance ``quality``, or it stands."""
    reached = walk(maze, maze.start, suggestion).cells[-1:] == (maze.goal,)
    return shortest_route(maze) if not reached and rng.random() < quality else suggestion


def _met_later(maze: Maze, rng: Random) -> Maze:
    """The same maze from any other cell that has a route to the goal."""
    return maze._replace(start=rng.choice([cell for cell, moves in enumerate(distances(maze)) if moves]))
