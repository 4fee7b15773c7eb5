"""Imperfect solutions for a supervised warm start: the format is always right, the boxes often end up elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from turnwise.tasks.routes import MOVES, UNREAD, Outcome, RouteGame, demonstrate_routes
from turnwise.tasks.sokoban.env import SokobanEnv
from turnwise.tasks.sokoban.level import Level, distances, is_solved, shortest_route, walk
from turnwise.tasks.sokoban.prompts import sokoban_messages
from turnwise.types import Messages


def demonstrations(
    levels: Sequence[Level], actors: Sequence[str], seed: int | str, quality: float = 0.4, rounds: int = 3
) -> list[tuple[str, Messages, str]]:
    """One ``(actor id, messages, completion)`` per level, the actors taking turns.

    ``quality`` in [0, 1] is the chance that a route is the shortest solution. A faulty one has a wrong move in it,
    after which nothing is planned any more. A planner keeps a suggestion that solves the level, and mends another one
    with chance ``quality``. Some are of a later round of the ``rounds`` that there are: what the prompt calls blocked
    is not tried again there.
    """
    rng = Random(f"sokoban-demonstrations/{seed}")
    game = RouteGame(sokoban_messages, suggest, decide, failed_round)
    return demonstrate_routes(game, levels, actors, rng, quality, rounds)


def suggest(level: Level, quality: float, rng: Random, blocked: str = "") -> str:
    """The shortest solution with chance ``quality``, else one that goes wrong at a random move.

    It never begins with the move that is known to be ``blocked``.
    """
    route = shortest_route(level)
    if rng.random() < quality:
        return route
    place = rng.randrange(len(route))
    known = {route[place], *(blocked if place == 0 else "")}
    wrong = rng.choice([move for move in MOVES if move not in known])
    return route[:place] + wrong + "".join(rng.choices(list(MOVES), k=len(route) - place - 1))


def decide(level: Level, suggestion: str, quality: float, rng: Random, blocked: str = "") -> str:
    """``suggestion`` where it solves the level; else the shortest solution with chance ``quality``, or it stands.

    One that begins with the move that is known to be ``blocked`` gives way to another faulty one.
    """
    states = walk(level, level.start, suggestion).states
    if states and is_solved(level, states[-1]):
        return suggestion
    if rng.random() < quality:
        return shortest_route(level)
    return suggest(level, 0.0, rng, blocked) if suggestion[0] == blocked else suggestion


def failed_round(level: Level, rng: Random) -> tuple[Level, Outcome, Outcome]:
    """The level as a team leaves it after a round, with a solution left; what its walk, and its suggestion, came to."""
    env = SokobanEnv(level)
    suggestion, route = (None if rng.random() < UNREAD else _faulty(level, rng) for _ in range(2))
    suggested = env.preview(suggestion)
    walked = env.step(route and (suggestion or route)).outcome
    return level._replace(start=env.state), walked, suggested


def _faulty(level: Level, rng: Random) -> str:
    """A faulty route, up to its first blocked move, or to where it would solve the level or lose it for good."""
    route, known = suggest(level, 0.0, rng), distances(level)
    states = walk(level, level.start, route).states
    kept = next((n for n, state in enumerate(states) if known.get(state, 0) == 0), len(states))
    return route[: kept + (kept == len(states))]
