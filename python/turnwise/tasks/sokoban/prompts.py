"""Prompts of the Sokoban players, and imperfect solutions for a supervised warm start.

The prompts are short, so that a tiny model trains fast, and clear to a large one.
"""

from __future__ import annotations

from functools import partial
from random import Random

from turnwise.tasks import routes
from turnwise.tasks.routes import MOVES, UNREAD, RouteGame, RouteOutcome, demonstrate_routes, route_messages
from turnwise.tasks.sokoban.env import SokobanEnv
from turnwise.tasks.sokoban.level import Level, distances, format_level, parse_level, shortest_route, walk

_RULES = "Sokoban: A pushes each box B onto a goal G, * is done, # a wall."
_REPLY = "Reply with moves, such as U R R D."

SYSTEM_PROMPTS = {
    "tool": f"{_RULES} Suggest the moves. {_REPLY}",
    "planner": f"{_RULES} Choose the moves; the route is a suggestion. {_REPLY}",
    "solver": f"{_RULES} Make the moves. {_REPLY}",
}


# ---------------------------------------------------------------------------------------------------------------------
# Demonstrations
# ---------------------------------------------------------------------------------------------------------------------
HABIT = 0.8  # share of the faulty routes that run straight at the box; the others have a wrong move


def suggest(level: Level, quality: float, rng: Random, blocked: str = "") -> str:
    """Return the shortest solution with chance ``quality``, else a route by habit, or one with a wrong move.

    It never begins with the ``blocked`` move.
    """
    route = shortest_route(level)
    if rng.random() < quality:
        return route
    blind = blind_route(level)
    if rng.random() < HABIT and blind[0] != blocked:
        return blind
    index = rng.randrange(len(route))
    excluded = {route[index], *(blocked if index == 0 else "")}
    wrong = rng.choice([move for move in MOVES if move not in excluded])
    return route[:index] + wrong + "".join(rng.choices(list(MOVES), k=len(route) - index - 1))


def blind_route(level: Level) -> str:
    """Run straight at each box and on to a goal, first up or down, then left or right, ignoring walls.

    Example: in ``##### / #A..# / #.BG# / #...# / #####`` the route is ``"DR" + "R"``.
    """
    here, route = level.start.player, ""
    for aim in (cell for pair in zip(level.start.boxes, level.goals, strict=True) for cell in pair):
        down, right = aim // level.side - here // level.side, aim % level.side - here % level.side
        route += ("D" * down or "U" * -down) + ("R" * right or "L" * -right)
        here = aim
    return route


def decide(level: Level, suggestion: str, quality: float, rng: Random, blocked: str = "") -> str:
    """Keep ``suggestion`` if it solves the level. Else return a route of :func:`suggest`."""
    return suggestion if preview(level, suggestion).goal else suggest(level, quality, rng, blocked)


def preview(level: Level, route: str) -> RouteOutcome:
    """Return the outcome of making the moves of ``route`` from the start."""
    return SokobanEnv(level).preview(route)


def failed_round(level: Level, rng: Random) -> tuple[Level, RouteOutcome, RouteOutcome]:
    """Play a faulty round. Returns the level after it, and the outcomes of its walk and its suggestion.

    The level can still be solved after it.
    """
    env = SokobanEnv(level)

    def faulty() -> str:
        """Make a faulty route that ends with its first blocked move, or just before it solves the level or loses it."""
        route, solvable = suggest(level, 0.0, rng), distances(level)
        states = walk(level, level.start, route)
        kept = next((n for n, state in enumerate(states) if solvable.get(state, 0) == 0), len(states))
        return route[: kept + (kept == len(states))]

    suggestion, route = (None if rng.random() < UNREAD else faulty() for _ in range(2))
    suggested = env.preview(suggestion)
    walked = env.step(route and (suggestion or route)).outcome
    return level._replace(start=env.state), walked, suggested


def best(level: Level) -> str:
    """Return the shortest solution, or the move ``U`` if none is left."""
    return shortest_route(level) if level.start in distances(level) else "U"


GAME = RouteGame("sokoban", SYSTEM_PROMPTS, format_level, parse_level, best, preview, suggest, decide, failed_round)
sokoban_messages = partial(route_messages, GAME)
"""Builds a prompt about a level; the third argument is its state."""
read_messages = partial(routes.read_messages, GAME)
demonstrations = partial(demonstrate_routes, GAME)
"""Demonstrates solutions of levels. A faulty route usually (``HABIT``) runs straight at the box and on to the goal,
whatever it pushes. Other faulty routes have one wrong move, and random moves after it. A planner keeps a suggestion
that solves the level, and replaces any other."""
