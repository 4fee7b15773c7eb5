"""Prompts of coder and tester: short, so that a tiny model trains fast, and clear to a large one."""

from __future__ import annotations

from typing import NamedTuple

from turnwise.tasks.base import with_round, without_round
from turnwise.tasks.code_duel.problems import MAX_ITEMS, MAX_LETTERS, NUMBERS
from turnwise.types import Message, Messages

_PROGRAM, _FAILED = "\nProgram:\n", "\nFailed:\n"

SYSTEM_PROMPTS = {
    "coder": "Write the Python function f. Reply with the program.",
    "tester": (
        f"Write test cases that a wrong program fails, one a line, such as f([2, 1]) == 3. Numbers are {NUMBERS[0]} to "
        f"{NUMBERS[1]}, lists have up to {MAX_ITEMS}, strings up to {MAX_LETTERS} small letters."
    ),
}


class View(NamedTuple):
    """Contents of a prompt: the statement, the current program, and the test cases that it failed."""

    statement: str
    program: str | None = None
    failed: str | None = None


def view_message(view: View) -> Message:
    """The user message that shows ``view``."""
    parts = [view.statement]
    if view.program is not None:
        parts += [_PROGRAM, view.program]
    if view.failed is not None:
        parts += [_FAILED, view.failed]
    return {"role": "user", "content": "".join(parts)}


def code_duel_messages(actor_id: str, view: View, turn: int = 0, *, unread: bool = False) -> Messages:
    """Build the whole prompt of one call: the instruction, the view, and from the second round on its number."""
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor_id]}
    return [system, with_round(view_message(view), turn, unread=unread)]


def read_view(messages: Messages) -> View:
    """Parse the view from a prompt."""
    shown, failed, report = without_round(messages).partition(_FAILED)
    statement, written, program = shown.partition(_PROGRAM)
    return View(statement, program if written else None, report if failed else None)
