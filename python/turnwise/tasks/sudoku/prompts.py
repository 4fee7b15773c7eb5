"""What the players of the sudoku task are told: short, so that a tiny model trains fast, and clear to a large one."""

from __future__ import annotations

from turnwise.types import Message, Messages

from .grid import format_grid, parse_grid

_REPLY = "Reply with four rows of digits."
_DRAFT = "\nDraft:\n"

SYSTEM_PROMPTS = {
    "proposer": f"Fill the sudoku blanks. {_REPLY}",
    "reviser": f"Correct the sudoku draft. {_REPLY}",
    "solver": f"Solve the sudoku. {_REPLY}",
}


def board_message(puzzle: str, draft: str | None = None) -> Message:
    """The puzzle, and the draft where there is one, both 16 characters. Nothing else of the episode is shown."""
    shown = format_grid(puzzle) + (_DRAFT + format_grid(draft) if draft else "")
    return {"role": "user", "content": shown}


def sudoku_messages(actor_id: str, puzzle: str, draft: str | None = None) -> Messages:
    """The whole prompt of one call, under 60 tokens: the actor's instruction and the board."""
    return [{"role": "system", "content": SYSTEM_PROMPTS[actor_id]}, board_message(puzzle, draft)]


def read_messages(messages: Messages) -> tuple[str, str | None]:
    """Puzzle and draft back from a prompt of :func:`sudoku_messages`."""
    puzzle, _, draft = messages[-1]["content"].partition(_DRAFT)
    givens = parse_grid(puzzle, blanks=True)
    if givens is None:
        raise ValueError(f"messages={messages!r}: expected a sudoku prompt with a 4x4 puzzle")
    return givens, parse_grid(draft, blanks=True)
