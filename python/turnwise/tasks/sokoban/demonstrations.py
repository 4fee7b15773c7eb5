"""Imperfect solutions for a supervised warm start: the format is always right, the boxes often end up elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from turnwise.tasks.routes import MOVES, format_route
from turnwise.types import Messages

from .level import Level, is_solved, shortest_route, walk
from .prompts import sokoban_messages

LATER = 0.25  # share of the demonstrations that begin on the way to a solution, as after a first round
UNREAD = 0.1  # share of a planner's demonstrations without a suggestion, as after an unreadable reply


def demonstrations(
    levels: Sequence[Level], actors: Sequence[str], seed: int | str, quality: float = 0.4
) -> list[tuple[str, Messages, str]]:
    """One ``(actor id, messages, completion)`` per level, the actors taking turns.

    ``quality`` in [0, 1] is the chance that a route is the shortest solution. A faulty one has a wrong move in it,
    after which nothing is planned any more. A planner keeps a suggestion that solves the level, and mends another one
    with chance ``quality``.
    """
    if not 0 <= quality <= 1:
        raise ValueError(f"quality={quality!r}: expected a number in [0, 1]")
    if not actors:
        raise ValueError("actors=(): expected at least one actor id")
    rng = Random(f"sokoban-demonstrations/{seed}")
    made = []
    for index, drawn in enumerate(levels):
        actor = actors[index % len(actors)]
        level = _met_later(drawn, rng) if rng.random() < LATER else drawn
        suggestion = suggest(level, quality, rng) if actor == "planner" and rng.random() >= UNREAD else None
        answer = decide(level, suggestion, quality, rng) if suggestion else suggest(level, quality, rng)
        made.append((actor, sokoban_messages(actor, level, route=suggestion), format_route(answer)))
    return made


def suggest(level: Level, quality: float, rng: Random) -> str:
    """The shortest solution with chance ``quality``, else one that goes wrong at a random move."""
    route = shortest_route(level)
    if rng.random() < quality:
        return route
    place = rng.randrange(len(route))
    wrong = rng.choice([move for move in MOVES if move != route[place]])
    return route[:place] + wrong + "".join(rng.choices(list(MOVES), k=len(route) - place - 1))


def decide(level: Level, suggestion: str, quality: float, rng: Random) -> str:
    """``suggestion`` where it solves the level; else the shortest solution with chance ``quality``, or it stands."""
    states = walk(level, level.start, suggestion).states
    solves = bool(states) and is_solved(level, states[-1])
    return shortest_route(level) if not solves and rng.random() < quality else suggestion


def _met_later(level: Level, rng: Random) -> Level:
    """The same level as it stands after some moves of its shortest solution."""
    route = shortest_route(level)
    states = (level.start, *walk(level, level.start, route).states[:-1])
    return level._replace(start=rng.choice(states))
