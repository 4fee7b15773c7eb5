"""Prompts of the sudoku players: short, so that a tiny model trains fast, and clear to a large one."""

from __future__ import annotations

from turnwise.tasks.sudoku.grid import broken_units, format_grid, parse_grid
from turnwise.types import Message, Messages

_REPLY = "Reply with four rows of digits."
_DRAFT = "Draft:\n"
_SUDOKU = "\nSudoku:\n"
_WRONG = "Wrong: {}.\n"
_ROUND = "Round {}.{}\n"
_UNREAD = " Your last reply had no grid."

SYSTEM_PROMPTS = {
    "proposer": f"Fill the sudoku blanks. {_REPLY}",
    "reviser": f"Correct the sudoku draft. {_REPLY}",
    "solver": f"Solve the sudoku. {_REPLY}",
}


def board_message(puzzle: str, draft: str | None = None, turn: int = 0, *, unread: bool = False) -> Message:
    """Write the puzzle, the draft if there is one, and which units of the draft are wrong.

    Puzzle and draft have 16 characters each. From the second round on (``turn`` counts from 0) the message names the
    round, and says if the actor's own last reply was ``unread``. So no actor sees the same prompt twice, and even a
    greedy policy can try something else.
    """
    # The puzzle comes last. Each of its cells is then a fixed number of tokens before the same cell of the reply, in
    # the prompts of all actors and rounds, so a tiny model learns only once to fill a grid.
    notes = _ROUND.format(turn + 1, _UNREAD if unread else "") if turn else ""
    if draft:
        broken = [f"{kind} {' '.join(map(str, found))}" for kind, found in broken_units(puzzle, draft).items() if found]
        notes += _WRONG.format(", ".join(broken)) if broken else ""
    shown = notes + (_DRAFT + format_grid(draft) + _SUDOKU if draft else "") + format_grid(puzzle)
    return {"role": "user", "content": shown}


def sudoku_messages(
    actor_id: str, puzzle: str, draft: str | None = None, turn: int = 0, *, unread: bool = False
) -> Messages:
    """Build the whole prompt of one call, under 100 tokens: the actor's instruction and the board."""
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor_id]}
    return [system, board_message(puzzle, draft, turn, unread=unread)]


def read_messages(messages: Messages) -> tuple[str, str | None]:
    """Parse puzzle and draft from a prompt of :func:`sudoku_messages`. Raises ``ValueError`` without a puzzle."""
    draft, _, puzzle = messages[-1]["content"].rpartition(_SUDOKU)
    givens = parse_grid(puzzle, blanks=True)
    if givens is None:
        raise ValueError(f"messages={messages!r}: expected a sudoku prompt with a 4x4 puzzle")
    return givens, parse_grid(draft, blanks=True)
