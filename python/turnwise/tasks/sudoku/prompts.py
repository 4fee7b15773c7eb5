"""Prompts of the sudoku players, and imperfect grids for a supervised warm start.

The prompts are short, so that a tiny model trains fast, and clear to a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from turnwise.tasks.base import check_demonstrations
from turnwise.tasks.sudoku.grid import BLANK, DIGITS, ROWS, Puzzle, broken_units, format_grid, is_solved, parse_grid
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
        broken = [
            f"{kind} {' '.join(map(str, numbers))}" for kind, numbers in broken_units(puzzle, draft).items() if numbers
        ]
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


# ---------------------------------------------------------------------------------------------------------------------
# Demonstrations
# ---------------------------------------------------------------------------------------------------------------------
HABIT = 0.8  # share of the faulty rows that follow the habit; the others are random
LATER = 0.25  # share of the demonstrations from a later round, where an actor's own last reply has failed
UNREAD = 0.1  # share of those from a later round whose last reply could not be read
DRAFT_KINDS = {"fill": 0.8, "slip": 0.1, "unread": 0.1}  # filled by rows; with wrong cells; after an unreadable reply


def demonstrations(
    puzzles: Sequence[Puzzle],
    actors: Sequence[str],
    seed: int | str,
    quality: float = 0.4,
    rounds: int = 2,
    answers: int = 1,
) -> list[tuple[str, Messages, str]]:
    """Make ``answers`` tuples ``(actor id, messages, completion)`` per puzzle. The actors take turns.

    The answers to one prompt follow one another, so that a trie computes the prompt once for all of them.

    ``quality`` in [0, 1] is the chance that a row is right. A faulty row that is filled still holds each digit once:
    usually (``HABIT``) its missing digits are in ascending order, regardless of columns and boxes. If there is a
    draft, an actor usually keeps its faulty rows; this includes the later ``rounds``.

    If ``quality`` is below one half, the habit is the likeliest answer. A model that has learnt the demonstrations well
    then fails most puzzles when greedy and solves some when sampled. Reinforcement learning starts from there.
    """
    check_demonstrations(actors, quality)
    rng = Random(f"sudoku-demonstrations/{seed}")
    made = []
    for index, puzzle in enumerate(puzzles):
        place = index % len(actors)
        turn = rng.randrange(1, rounds) if rounds > 1 and rng.random() < LATER else 0
        # In the first round the first actor has no draft.
        draft = faulty_draft(puzzle, quality, rng) if place or turn else None
        unread = turn > 0 and rng.random() < UNREAD
        messages = sudoku_messages(actors[place], puzzle.givens, draft, turn, unread=unread)
        for _ in range(answers):
            answer = repair(puzzle, draft, quality, rng) if draft else fill(puzzle, quality, rng)
            made.append((actors[place], messages, format_grid(answer)))
    return made


def fill(puzzle: Puzzle, quality: float, rng: Random) -> str:
    """Fill the grid and keep the givens. Each row is right with chance ``quality``, else filled by habit or at random.

    Example: at quality 0 the row ``_2_3`` becomes ``1243`` by habit, regardless of the columns.
    """
    rows = []
    for row in ROWS:
        givens = "".join(puzzle.givens[cell] for cell in row)
        right = "".join(puzzle.solution[cell] for cell in row)
        rows.append(right if rng.random() < quality else _fill_row(givens, rng))
    return "".join(rows)


def repair(puzzle: Puzzle, draft: str, quality: float, rng: Random) -> str:
    """Correct each wrong row of ``draft`` with chance ``quality``, else keep it or fill it from the givens.

    A row with blanks is never kept.
    """
    rows = []
    for row in ROWS:
        givens, right, had = ("".join(grid[cell] for cell in row) for grid in (puzzle.givens, puzzle.solution, draft))
        if had == right or rng.random() < quality:
            rows.append(right)
        elif BLANK not in had and rng.random() < HABIT:
            rows.append(had)
        else:
            rows.append(_fill_row(givens, rng))
    return "".join(rows)


def faulty_draft(puzzle: Puzzle, quality: float, rng: Random) -> str:
    """Make a draft for a reviser: a grid that is not solved, or the puzzle itself after an unreadable reply."""
    kind = rng.choices(list(DRAFT_KINDS), weights=list(DRAFT_KINDS.values()))[0]
    if kind == "unread":
        return puzzle.givens
    grid = fill(puzzle, quality, rng)
    if kind == "slip" or is_solved(puzzle.givens, grid):
        cells = list(grid)
        for cell in rng.sample(range(len(cells)), rng.randint(1, 2)):
            cells[cell] = rng.choice([digit for digit in DIGITS if digit != puzzle.solution[cell]])
        grid = "".join(cells)
    return grid


def _fill_row(givens: str, rng: Random) -> str:
    missing = [digit for digit in DIGITS if digit not in givens]
    if rng.random() >= HABIT:
        rng.shuffle(missing)
    left = iter(missing)
    return "".join(next(left) if given == BLANK else given for given in givens)
