"""Prompts of games of routes, and demonstrations of right and faulty routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from turnwise.tasks.base import Demonstration, check_demonstrations
from turnwise.tasks.routes.scoring import RouteOutcome
from turnwise.tasks.routes.text import board_message, check_note, failure_note, format_route, read_board
from turnwise.types import Message, Messages

LATER = 0.25  # share of the demonstrations that follow a failed round, which their prompt describes
SUGGESTED = 0.5  # chance that the suggestion shown to a planner is the shortest route, whatever the quality
UNREAD = 0.1  # share of the replies before a demonstration that could not be read


class RouteGame(NamedTuple):
    """The functions with which a game shows its boards and demonstrates its routes; a board is a maze or a level.

    ``show(board, state)`` writes the board, by default in its first state, and ``parse`` reads that text.
    ``best(board)`` is the route of a player that knows all. ``preview(board, route)`` returns a route's outcome.
    ``suggest(board, quality, rng, blocked)`` makes a route. ``decide(board, suggestion, quality, rng, blocked)`` makes
    the planner's route. ``failed_round(board, rng)`` returns the board after a failed round, with the outcomes of its
    walk and of its suggestion.
    """

    name: str
    system_prompts: Mapping[str, str]
    show: Callable[[Any, Any], str]
    parse: Callable[[str], Any]
    best: Callable[[Any], str]
    preview: Callable[[Any, str], RouteOutcome]
    suggest: Callable[[Any, float, Random, str], str]
    decide: Callable[[Any, str, float, Random, str], str]
    failed_round: Callable[[Any, Random], tuple[Any, RouteOutcome, RouteOutcome]]


def route_messages(
    game: RouteGame,
    actor_id: str,
    board: Any,
    state: Any = None,
    route: str | None = None,
    note: str = "",
    check: str = "",
) -> Messages:
    """Build the whole prompt of one call: the actor's instruction, and the board in ``state``.

    ``note`` says how the last round failed (:func:`failure_note`), and ``check`` what the suggested ``route`` would do
    (:func:`check_note`).
    """
    system: Message = {"role": "system", "content": game.system_prompts[actor_id]}
    return [system, board_message(game.show(board, state), route, note, check)]


def read_messages(game: RouteGame, messages: Messages) -> tuple[Any, str | None]:
    """Parse the board, which starts in the state shown, and the suggestion from a prompt of :func:`route_messages`.

    Raises ``ValueError`` for a prompt without a board.
    """
    board, route = read_board(messages)
    return game.parse(board), route


def demonstrate_routes(
    game: RouteGame,
    boards: Sequence[Any],
    actors: Sequence[str],
    seed: int | str,
    quality: float = 0.4,
    rounds: int = 3,
    answers: int = 1,
    clean: float = 0.0,
) -> list[Demonstration]:
    """Make ``answers`` demonstrations per board. The actors take turns.

    ``quality`` in [0, 1] is the chance that a route is the shortest. The first demonstrations, a share ``clean`` of
    them, have quality 1. Some demonstrations belong to a later one of the ``rounds``; they don't repeat the move that
    the prompt calls blocked. The answers to one prompt follow one another, so that a trie computes the prompt once.

    If ``quality`` is below one half, a fault by habit is the likeliest answer. A model that has learnt the
    demonstrations well then fails most boards when greedy and solves some when sampled. Reinforcement learning starts
    from there.
    """
    check_demonstrations(actors, quality)
    rng = Random(f"{game.name}-demonstrations/{seed}")
    made: list[Demonstration] = []
    for index, drawn in enumerate(boards):
        actor = actors[index % len(actors)]
        board, note, blocked = drawn, "", ""
        right = 1.0 if index < clean * len(boards) else quality
        if rounds > 1 and rng.random() < LATER:
            board, walked, suggested = game.failed_round(drawn, rng)
            shown = None if actor == actors[-1] else suggested._asdict()
            note, blocked = failure_note(rng.randrange(1, rounds), walked._asdict(), shown), walked.blocked
        suggestion = None
        if actor == "planner" and rng.random() >= UNREAD:
            suggestion = game.suggest(board, SUGGESTED, rng, blocked)
        check = check_note(game.preview(board, suggestion)._asdict()) if suggestion else ""
        messages = route_messages(game, actor, board, route=suggestion, note=note, check=check)
        for _ in range(answers):
            if suggestion:
                answer = game.decide(board, suggestion, right, rng, blocked)
            else:
                answer = game.suggest(board, right, rng, blocked)
            made.append((actor, messages, format_route(answer)))
    return made
