"""Score programs by hidden inputs, and test cases by the wrong programs that they detect."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from turnwise.sandbox import Returned
from turnwise.tasks.code_duel.problems import Arguments, Problem, find_family, run_trusted

LINE_CHARS = 200  # of a test case; longer lines don't count
GOT_CHARS = 80  # of the result of a failed call, in the report
_FENCED = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)
_STARTS = re.compile(r"^(?:def |import |from |class |@)", re.MULTILINE)


class Case(NamedTuple):
    """A test case: ``Case(([2, 1],), 3)`` stands for ``f([2, 1]) == 3``."""

    arguments: Arguments
    expected: Any


class Judgement(NamedTuple):
    """Score of a tester's cases: the share of them that is right, and the share of wrong programs that those detect."""

    right: float
    detected: float

    @property
    def score(self) -> float:
        return self.right * self.detected


def parse_program(text: str) -> str | None:
    """Find the program in ``text``: its last fenced block, else all from its first line of code; ``None`` without one.

    Example: ``parse_program("So:\\n```python\\ndef f(s):\\n    return s\\n```") == "def f(s):\\n    return s"``
    """
    if blocks := _FENCED.findall(text):
        return blocks[-1].rstrip() or None
    begins = _STARTS.search(text)
    return text[begins.start() :].rstrip() if begins else None


def parse_cases(text: str, limit: int) -> list[Case]:
    """Parse the first ``limit`` test cases in ``text``, one per line. Skips other lines and repeated arguments.

    Example: ``parse_cases("Edge:\\nassert f([]) == 0", 4) == [Case(([],), 0)]``
    """
    cases: dict[str, Case] = {}
    for line in text.splitlines():
        case = _parse_case(line.strip("`-* \t\r").removeprefix("assert "))
        if case is not None:
            cases.setdefault(repr(case.arguments), case)
    return list(cases.values())[:limit]


def _parse_case(line: str) -> Case | None:
    if len(line) > LINE_CHARS:
        return None
    try:
        compared = ast.parse(line, mode="eval").body
        if not isinstance(compared, ast.Compare) or not isinstance(compared.left, ast.Call):
            return None
        call, (operator,), (expected,) = compared.left, compared.ops, compared.comparators
        if not isinstance(operator, ast.Eq) or call.keywords or getattr(call.func, "id", None) != "f":
            return None
        return Case(tuple(map(ast.literal_eval, call.args)), ast.literal_eval(expected))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None  # a line of prose, or a value that is not a literal


def format_case(case: Case) -> str:
    """Write a case as ``f([2, 1]) == 3``."""
    return f"f({', '.join(map(repr, case.arguments))}) == {case.expected!r}"


def describe_failures(cases: Sequence[Case], results: Sequence[Returned]) -> str | None:
    """Write a line for each of ``cases`` that failed; ``None`` if all passed.

    Example: ``f([2, 1]) == 3, not 2`` or ``f([]) == 0, not IndexError: list index out of range``
    """
    lines = []
    for case, result in zip(cases, results, strict=True):
        if result.error is not None or not same(result.value, case.expected):
            got = result.error if result.error is not None else repr(result.value)
            lines.append(f"{format_case(case)}, not {got[:GOT_CHARS]}")
    return "\n".join(lines) or None


def same(value: Any, expected: Any) -> bool:
    """Return True if two values and all their elements are equal and of one type: ``1`` is not ``1.0`` or ``True``.

    Numbers are compared in their written form, so NaN equals itself. The order of a dict's keys counts. A value that a
    program can't return, such as a set, equals nothing.
    """
    if type(value) is not type(expected):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict):
        return same(list(value), list(expected)) and same(list(value.values()), list(expected.values()))
    return isinstance(value, (str, int, float, type(None))) and repr(value) == repr(expected)


def passed_share(results: Sequence[Returned], expected: Sequence[Any]) -> float:
    """Return the share of ``results`` that are as expected."""
    return sum(r.error is None and same(r.value, e) for r, e in zip(results, expected, strict=True)) / len(expected)


def judge_cases(problem: Problem, cases: Sequence[Case]) -> Judgement:
    """Judge how well ``cases`` tell right programs from wrong ones.

    A case is right if the problem allows its arguments, and the problem's program returns the expected value. A case
    detects a wrong program that fails on it. ``detected`` is the mutation score (DeMillo, Lipton and Sayward, 1978) of
    the right cases. ``Judgement.score`` is the product of both shares, so neither guesses nor cases that every program
    passes earn anything.

    Example: 4 cases, of which 3 are right and fail on 2 of 4 wrong programs, score 3/4 * 2/4 = 0.375.
    """
    if not cases:
        return Judgement(0.0, 0.0)
    accepts = find_family(problem.statement).accepts
    right = [c for c in cases if accepts(c.arguments) and same(run_trusted(problem.program, c.arguments), c.expected)]
    detected = {program for case in right for program in _detected(problem.wrong, case)}
    return Judgement(len(right) / len(cases), len(detected) / len(problem.wrong))


def best_cases(problem: Problem, count: int, tried: int = 200) -> list[Case]:
    """Choose up to ``count`` right cases from the hidden inputs and ``tried`` random ones.

    Each next case is the one that detects most of the remaining wrong programs. The hidden inputs detect every wrong
    program, so one case per wrong program is always enough.
    """
    rng = Random(f"code-duel-cases/{problem.statement}")
    draw = find_family(problem.statement).draw
    drawn = [*problem.hidden, *(draw(rng) for _ in range(tried))]
    inputs = {repr(arguments): arguments for arguments in drawn}.values()
    cases = [Case(arguments, run_trusted(problem.program, arguments)) for arguments in inputs]
    left = list(problem.wrong)
    chosen: list[Case] = []
    while left and len(chosen) < count:
        case = max(cases, key=lambda case: len(_detected(left, case)))
        detected = _detected(left, case)
        left = [program for program in left if program not in detected]
        chosen.append(case)
    return chosen


def _detected(programs: Sequence[str], case: Case) -> list[str]:
    return [program for program in programs if not same(run_trusted(program, case.arguments), case.expected)]
