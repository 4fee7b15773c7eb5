from __future__ import annotations

import pytest

from turnwise.sandbox.sandbox import Returned
from turnwise.tasks.code_duel.problems import Problem, draw_problems, find_problem
from turnwise.tasks.code_duel.scoring import (
    Case,
    Judgement,
    best_cases,
    describe_failures,
    format_case,
    judge_cases,
    parse_cases,
    passed_share,
    same,
)

SUM = "Return the sum of the numbers in the list xs."
HEAD = "def f(xs):\n    "
BY_HAND = Problem(
    "lists",
    SUM,
    f"{HEAD}return sum(xs)",
    wrong=tuple(
        HEAD + code for code in ("return 0", "return len(xs)", "return sum(xs[:1])", "return max(xs, default=0)")
    ),
    hidden=(([],), ([1, 2],)),
    expected=(0, 3),
)


def cases(*lines):
    return parse_cases("\n".join(lines), 9)


# --- test cases, by hand ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lines", "right", "found"),
    [
        # 3 of 4 are right; f([2]) finds out `0` and `len`; the other two find nothing out beyond those.
        (["f([]) == 0", "f([2]) == 2", "f([5]) == 5", "f([1, 2]) == 4"], 3 / 4, 2 / 4),
        (["f([1, 2]) == 3"], 1.0, 1.0),  # 0, 2, 1 and 2 are not 3: all four
        (["f([1, -1]) == 0"], 1.0, 3 / 4),  # 0 is right there; 2, 1 and 1 are not
        (["f([]) == 0"], 1.0, 0.0),  # right, and every program passes it
        (["f([1, 2]) == 4", "f([1]) == 7"], 0.0, 0.0),  # wrong ones find nothing out, though wrong programs fail them
        (["f([100]) == 100"], 0.0, 0.0),  # no input that the problem speaks of
        (["f([1, 2]) == 3.0"], 0.0, 0.0),  # another type
        (["f([1, 2]) == 3", "f([1], [2]) == 3"], 1 / 2, 1.0),
        ([], 0.0, 0.0),
    ],
)
def test_cases_earn_by_what_they_find_out(lines, right, found):
    judged = judge_cases(BY_HAND, cases(*lines))
    assert judged == Judgement(right, found) and judged.score == pytest.approx(right * found)


def test_the_best_cases_find_everything_out():
    for statement in draw_problems("train", 60, 3):
        problem = find_problem(statement)
        chosen = best_cases(problem, 6)
        assert judge_cases(problem, chosen).score == 1.0, statement
        assert len(best_cases(problem, 1)) == 1
        assert parse_cases("\n".join(map(format_case, chosen)), 6) == chosen


# --- programs --------------------------------------------------------------------------------------------------------
def test_the_share_of_passed_tests():
    results = [Returned(0), Returned(None, "IndexError: x"), Returned(3), Returned(3.0)]
    assert passed_share(results, [0, 3, 3, 3]) == 0.5


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        ([1, [2]], [1, [2]], True),
        ([1], [True], False),
        ("a", "a", True),
        ({"a": [1]}, {"a": [1]}, True),
        ({1: 2}, {"1": 2}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (float("nan"), float("nan"), True),
        (b"x", b"x", False),
        ([b"x"], [b"x"], False),
        ({1}, {1}, False),
        ([{"a": 1j}], [{"a": 1j}], False),
    ],
)
def test_types_count(value, expected, equal):
    assert same(value, expected) is equal is same(expected, value)


def test_failures_are_described():
    asked = cases("f([2, 1]) == 3", "f([]) == 0", "f([1]) == 1")
    results = [Returned(2), Returned(None, "IndexError: " + "x" * 200), Returned(1)]
    first, second = describe_failures(asked, results).split("\n")
    assert first == "f([2, 1]) == 3, not 2"
    assert second.startswith("f([]) == 0, not IndexError: xx") and len(second) < 110
    assert describe_failures(asked[2:], results[2:]) is None


# --- text ------------------------------------------------------------------------------------------------------------
def test_cases_are_read_and_prose_is_not():
    text = (
        "Edge cases:\n- assert f([]) == 0\n`f([1, -2]) == -1`\nf([]) == 5\nf(x) == 1\ng([1]) == 1\nf([1]) != 1\n"
        "f([1]) == 1 == 1\nf(xs=[1]) == 1\nf(*[1]) == 1\nf([1]) == f([1])\nf('a', 2) == 'b'\nnonsense ((\n"
        f"f([{'1, ' * 90}]) == 90\n\0\nf([9]) == 9"
    )
    found = [Case(([],), 0), Case(([1, -2],), -1), Case(("a", 2), "b"), Case(([9],), 9)]
    assert parse_cases(text, 10) == found and parse_cases(text, 2) == found[:2]
    for deep in ("f(" + "-" * 150 + "1) == 1", "f(" + "(" * 95 + ")" * 95 + ") == 1", "f(" + "[" * 190):
        assert parse_cases(deep, 3) in ([], [Case((1,), 1)], [Case(((),), 1)])
