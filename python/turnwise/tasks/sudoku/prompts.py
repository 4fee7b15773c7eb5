"""Prompts of the sudoku players: short, so that a tiny model trains fast, and clear to a large one."""

from __future__ import annotations

from turnwise.tasks.sudoku.grid import broken_units, format_grid, parse_grid
from turnwise.types import Message, Messages

_REPLY = "Reply with four rows of digits."
_DRAFT = "\nDraft:\n"
_WRONG = "Wrong: {}.\n"
_ROUND = "Round {}.{}\n"
_UNREAD = " Your last reply had no grid."

SYSTEM_PROMPTS = {
    "proposer": f"Fill the sudoku blanks. {_REPLY}",
    "reviser": f"Correct the sudoku draft. {_REPLY}",
    "solver": f"Solve the sudoku. {_REPLY}",
}


def board_message(puzzle: str, draft: str | None = None, turn: int = 0, *, unread: bool = False) -> Message:
    """The puzzle, both 16 characters; the draft where there is one, and which units of it are wrong.

    From the second round on (``turn`` counts from 0) it names the round, and says where the actor's own last reply was
    ``unread``. So no actor meets one prompt twice: a greedy policy too may try something else.
    """
    # The grids come last: each cell then stands a fixed number of tokens before the reply's own, whatever the notes
    # say, and a tiny model learns to copy them sooner.
    notes = _ROUND.format(turn + 1, _UNREAD if unread else "") if turn else ""
    if draft:
        broken = [f"{kind} {' '.join(map(str, found))}" for kind, found in broken_units(puzzle, draft).items() if found]
        notes += _WRONG.format(", ".join(broken)) if broken else ""
    shown = notes + format_grid(puzzle) + (_DRAFT + format_grid(draft) if draft else "")
    return {"role": "user", "content": shown}


def sudoku_messages(
    actor_id: str, puzzle: str, draft: str | None = None, turn: int = 0, *, unread: bool = False
) -> Messages:
    """The whole prompt of one call, under 100 tokens: the actor's instruction and the board."""
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor_id]}
    return [system, board_message(puzzle, draft, turn, unread=unread)]


def read_messages(messages: Messages) -> tuple[str, str | None]:
    """Puzzle and draft back from a prompt of :func:`sudoku_messages`."""
    puzzle, _, draft = messages[-1]["content"].partition(_DRAFT)
    givens = parse_grid(puzzle, blanks=True)
    if givens is None:
        raise ValueError(f"messages={messages!r}: expected a sudoku prompt with a 4x4 puzzle")
    return givens, parse_grid(draft, blanks=True)
