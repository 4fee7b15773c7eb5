"""Prompts of the Plan-Path players: short, so that a tiny model trains fast, and clear to a large one."""

from __future__ import annotations

from turnwise.tasks.plan_path.maze import Maze, format_maze, parse_maze
from turnwise.tasks.routes import board_message, read_board
from turnwise.types import Message, Messages

_REPLY = "Reply with moves, such as U R R D."

SYSTEM_PROMPTS = {
    "tool": f"Suggest a route from A to G around the walls #. {_REPLY}",
    "planner": f"Choose the moves from A to G around the walls #; the route is a suggestion. {_REPLY}",
    "solver": f"Walk from A to G around the walls #. {_REPLY}",
}


def plan_path_messages(
    actor_id: str, maze: Maze, position: int | None = None, route: str | None = None, note: str = "", check: str = ""
) -> Messages:
    """Build the whole prompt of one call: the actor's instruction, and the board with the walker at ``position``.

    ``note`` says how the last round failed, and ``check`` what the suggested ``route`` would do;
    :func:`turnwise.tasks.routes.failure_note` and :func:`~turnwise.tasks.routes.check_note` write them.
    """
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor_id]}
    return [system, board_message(format_maze(maze, position), route, note, check)]


def read_messages(messages: Messages) -> tuple[Maze, str | None]:
    """Parse the maze and the suggestion from a prompt of :func:`plan_path_messages`.

    The maze starts at the walker's cell. Raises ``ValueError`` for a prompt without a board.
    """
    board, route = read_board(messages)
    return parse_maze(board), route
