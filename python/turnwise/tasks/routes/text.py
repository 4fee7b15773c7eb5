"""Routes and boards as text: what actors write, and what their prompts say about the board and about failures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from turnwise.types import Message, Messages

MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""The letter of each move, and how it changes row and column."""

_SUGGESTION, _CHECK, _BOARD = "Route: ", "Checked: ", "Board:\n"
_SEPARATORS = re.compile(r"[\s,;|>\-\u2192\[\]()'\"`*.]+")
_LABEL = re.compile(r"[^A-Za-z0-9:]*+[A-Za-z][A-Za-z ]*+[*_]*+:")  # possessive: its time grows with the line alone
_WORDS = {"UP": "U", "DOWN": "D", "LEFT": "L", "RIGHT": "R"}
_LETTERS = re.compile(rf"[{''.join(MOVES)}]+")


def format_route(route: str) -> str:
    """Write the moves with blanks between them, so that each is a token: ``"RRD"`` becomes ``"R R D"``."""
    return " ".join(route)


def parse_route(text: str) -> str | None:
    """Parse the route from the last line of ``text`` that holds only moves; ``None`` without one.

    Moves are the capitals ``UDLR`` or the words up, down, left and right. Blanks, commas, arrows, brackets and a label
    before a colon are ignored.

    Example: ``parse_route("I go round the wall.\\nMoves: [up, up, RIGHT]") == parse_route("U U R") == "UUR"``
    """
    for line in reversed(text.splitlines()):
        label = _LABEL.match(line)
        parts = [part for part in _SEPARATORS.split(line[label.end() :] if label else line) if part]
        moves = [part if _LETTERS.fullmatch(part) else _WORDS.get(part.upper()) for part in parts]
        if moves and None not in moves:
            return "".join(move for move in moves if move is not None)
    return None


def describe_failure(outcome: Mapping[str, Any]) -> str:
    """Describe how far a failed route went, and the move that stopped it.

    Example: ``"3 moves, then R is blocked"``, ``"4 moves"`` or ``"no moves read"``
    """
    if not outcome["valid"]:
        return "no moves read"
    made = f"{outcome['moves']} move{'' if outcome['moves'] == 1 else 's'}"
    return f"{made}, then {outcome['blocked']} is blocked" if outcome["blocked"] else made


def failure_note(turn: int, walked: Mapping[str, Any], suggested: Mapping[str, Any] | None = None) -> str:
    """Note for the prompt after ``turn`` rounds: how the last walk failed, and the suggester's route.

    Example: ``"Round 2. Walked: 1 move, then R is blocked. Suggested: no moves read."``
    """
    suggestion = "" if suggested is None else f" Suggested: {describe_failure(suggested)}."
    return f"Round {turn + 1}. Walked: {describe_failure(walked)}.{suggestion}"


def check_note(outcome: Mapping[str, Any]) -> str:
    """Describe what a suggestion would do: ``"it works"``, or as :func:`describe_failure` does."""
    return "it works" if outcome["goal"] else describe_failure(outcome)


def board_message(board: str, route: str | None = None, note: str = "", check: str = "") -> Message:
    """Write the failure of the last round (``note``), the suggested ``route`` with its ``check``, and the board.

    The board comes last. Each of its cells is then a fixed number of tokens before the reply, in the prompts of all
    actors and rounds, so a tiny model learns to read it only once.
    """
    lines = [note] if note else []
    lines += [_SUGGESTION + format_route(route)] if route else []
    lines += [f"{_CHECK}{check}."] if route and check else []
    return {"role": "user", "content": "\n".join([*lines, _BOARD + board]) if lines else board}


def read_board(messages: Messages) -> tuple[str, str | None]:
    """Parse the board and the suggestion from a prompt of :func:`board_message`."""
    notes, _, board = messages[-1]["content"].rpartition(_BOARD)
    routes = [line for line in notes.splitlines() if line.startswith(_SUGGESTION)]
    return board, parse_route(routes[-1]) if routes else None
