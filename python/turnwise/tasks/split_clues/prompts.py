"""Prompts of reader, writer and solver: short, so that a tiny model trains fast, and clear to a large one."""

from __future__ import annotations

from turnwise.tasks.split_clues.rows import Rows, parse_digits
from turnwise.types import Message, Messages

_REPLY = "Reply with digits only."

SYSTEM_PROMPTS = {
    "reader": f"Only you see this row. Tell the writer what it holds. {_REPLY}",
    "writer": f"Take the larger digit at each place: your row is last, the reader's message is above. {_REPLY}",
    "solver": f"Take the larger digit of both rows at each place. {_REPLY}",
}

NO_MESSAGE = "-"


def rows_message(actor_id: str, rows: Rows, said: str | None = None) -> Message:
    """Write what the actor sees: the reader its row, the writer the message and its row, the solver both rows."""
    above = {"reader": [], "writer": [said or NO_MESSAGE * len(rows.writer)], "solver": [rows.reader]}[actor_id]
    own = rows.reader if actor_id == "reader" else rows.writer
    return {"role": "user", "content": "\n".join([*above, own])}


def split_clues_messages(actor_id: str, rows: Rows, said: str | None = None) -> Messages:
    """Build the whole prompt of one call: the instruction, and the rows that the actor sees."""
    return [{"role": "system", "content": SYSTEM_PROMPTS[actor_id]}, rows_message(actor_id, rows, said)]


def read_messages(messages: Messages) -> tuple[str | None, str]:
    """Parse a prompt: the line above the actor's row, or ``None`` if it holds no digits, and the row."""
    *above, own = messages[-1]["content"].splitlines()
    return parse_digits(above[0], len(own)) if above else None, own
