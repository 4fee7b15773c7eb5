"""Prompts of coder and tester, and imperfect demonstrations of them for a supervised warm start.

The prompts are short, so that a tiny model trains fast, and clear to a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from turnwise.sandbox import Returned
from turnwise.tasks.base import check_demonstrations, with_round, without_round
from turnwise.tasks.code_duel.problems import (
    MAX_ITEMS,
    MAX_LETTERS,
    NUMBERS,
    Problem,
    find_family,
    find_problem,
    run_trusted,
)
from turnwise.tasks.code_duel.scoring import Case, describe_failures, format_case
from turnwise.types import Message, Messages

_PROGRAM, _FAILED = "\nProgram:\n", "\nFailed:\n"

SYSTEM_PROMPTS = {
    "coder": "Write the Python function f. Reply with the program.",
    "tester": (
        f"Write test cases that a wrong program fails, one a line, such as f([2, 1]) == 3. Numbers are {NUMBERS[0]} to "
        f"{NUMBERS[1]}, lists have up to {MAX_ITEMS}, strings up to {MAX_LETTERS} small letters."
    ),
}


class CodeDuelView(NamedTuple):
    """Contents of a prompt: the statement, the current program, and the test cases that it failed."""

    statement: str
    program: str | None = None
    failed: str | None = None


def view_message(view: CodeDuelView) -> Message:
    """The user message that shows ``view``."""
    parts = [view.statement]
    if view.program is not None:
        parts += [_PROGRAM, view.program]
    if view.failed is not None:
        parts += [_FAILED, view.failed]
    return {"role": "user", "content": "".join(parts)}


def code_duel_messages(actor_id: str, view: CodeDuelView, turn: int = 0, *, unread: bool = False) -> Messages:
    """Build the whole prompt of one call: the instruction, the view, and from the second round on its number."""
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor_id]}
    return [system, with_round(view_message(view), turn, unread=unread)]


def read_view(messages: Messages) -> CodeDuelView:
    """Parse the view from a prompt."""
    shown, failed, report = without_round(messages).partition(_FAILED)
    statement, written, program = shown.partition(_PROGRAM)
    return CodeDuelView(statement, program if written else None, report if failed else None)


# ---------------------------------------------------------------------------------------------------------------------
# Demonstrations
# ---------------------------------------------------------------------------------------------------------------------
UNREAD = 0.1  # share of the demonstrations from a second round whose own last reply could not be read
LATER = 0.25  # share of a team coder's demonstrations that begin with a failed program, as in a second round


def demonstrations(
    statements: Sequence[str],
    actors: Sequence[str],
    seed: int | str,
    *,
    quality: float = 0.4,
    cases: int = 4,
    rounds: int = 2,
    clean: float = 0.0,
) -> list[tuple[str, Messages, str]]:
    """Make one ``(actor id, messages, completion)`` per problem. The actors take turns.

    ``quality`` in [0, 1] is the chance that a program is right, and that a test case expects the right result.
    Otherwise the program is the problem's first wrong one, and the expected result comes from any wrong one, which
    differs in one part. A model learns the first wrong program as easily as the right one. If ``quality`` is below one
    half, a greedy model writes the wrong one. Reinforcement learning starts from there. The first demonstrations, a
    share ``clean`` of them, have right programs and cases. With ``rounds`` above 1 some demonstrations show a team's
    coder fixing a program.
    """
    check_demonstrations(actors, quality)
    rng = Random(f"code-duel-demonstrations/{seed}")
    made, later = [], LATER if rounds > 1 and "tester" in actors else 0.0
    for index, statement in enumerate(statements):
        actor, problem = actors[index % len(actors)], find_problem(statement)
        right = 1.0 if index < clean * len(statements) else quality
        view, answer = (_code if actor == "coder" else _test)(problem, right, cases, rng, later)
        turn = int(view.failed is not None)
        made.append((actor, code_duel_messages(actor, view, turn, unread=rng.random() < UNREAD), answer))
    return made


def write_cases(problem: Problem, count: int, quality: float, rng: Random) -> list[Case]:
    """Write ``count`` cases with different arguments. Each expects the right result with chance ``quality``."""
    draw = find_family(problem.statement).draw
    written: dict[str, Case] = {}
    while len(written) < count:
        arguments = draw(rng)
        program = problem.program if rng.random() < quality else rng.choice(problem.wrong)
        written.setdefault(repr(arguments), Case(arguments, run_trusted(program, arguments)))
    return list(written.values())


def _code(problem: Problem, quality: float, cases: int, rng: Random, later: float) -> tuple[CodeDuelView, str]:
    answer = problem.program if rng.random() < quality else problem.wrong[0]
    if rng.random() >= later:
        return CodeDuelView(problem.statement), answer
    program = rng.choice(problem.wrong)
    tests = write_cases(problem, cases, 1.0, rng)
    results = [Returned(run_trusted(program, test.arguments)) for test in tests]
    return CodeDuelView(problem.statement, program, describe_failures(tests, results)), answer


def _test(problem: Problem, quality: float, cases: int, rng: Random, _: float) -> tuple[CodeDuelView, str]:
    program = problem.program if rng.random() < min(quality, 0.5) else rng.choice(problem.wrong)
    written = write_cases(problem, cases, quality, rng)
    return CodeDuelView(problem.statement, program), "\n".join(map(format_case, written))
