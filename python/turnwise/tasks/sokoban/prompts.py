"""Prompts of the Sokoban players: short, so that a tiny model trains fast, and clear to a large one."""

from __future__ import annotations

from turnwise.tasks.routes import board_message, read_board
from turnwise.tasks.sokoban.level import Level, State, format_level, parse_level
from turnwise.types import Message, Messages

_RULES = "Sokoban: A pushes each box B onto a goal G, * is done, # a wall."
_REPLY = "Reply with moves, such as U R R D."

SYSTEM_PROMPTS = {
    "tool": f"{_RULES} Suggest the moves. {_REPLY}",
    "planner": f"{_RULES} Choose the moves; the route is a suggestion. {_REPLY}",
    "solver": f"{_RULES} Make the moves. {_REPLY}",
}


def sokoban_messages(
    actor_id: str, level: Level, state: State | None = None, route: str | None = None, note: str = "", check: str = ""
) -> Messages:
    """Build the whole prompt of one call: the actor's instruction and the board in ``state``.

    ``note`` says how the last round failed, and ``check`` what the suggested ``route`` would do;
    :func:`turnwise.tasks.routes.failure_note` and :func:`~turnwise.tasks.routes.check_note` write them.
    """
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor_id]}
    return [system, board_message(format_level(level, state), route, note, check)]


def read_messages(messages: Messages) -> tuple[Level, str | None]:
    """Parse the level and the suggestion from a prompt of :func:`sokoban_messages`.

    The level starts in the state that the prompt shows. Raises ``ValueError`` for a prompt without a board.
    """
    board, route = read_board(messages)
    return parse_level(board), route
