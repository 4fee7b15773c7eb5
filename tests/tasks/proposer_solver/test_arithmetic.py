from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.tasks.base import split_of
from turnwise.tasks.proposer_solver.arithmetic import (
    Size,
    draw_problem,
    draw_problems,
    draw_training,
    read_answer,
    read_problem,
    value_of,
)

SIZE = Size(3, 20)


@pytest.mark.parametrize(
    ("text", "problem", "value"),
    [
        ("3 + 4", "3 + 4", 7),
        ("Try (3 + 4)*2", "(3 + 4) * 2", 14),
        ("Here: ((12+3))×4 = ?", "(12 + 3) * 4", 60),
        ("1. 2 - (3 - 20)", "2 - (3 - 20)", 19),
        ("2 * 3 * 4\nor rather\n5 − 9.", "5 - 9", -4),
        ("3 + 4 = 7", "3 + 4", 7),
        ("<think>1 + 1</think>0 * 20", "0 * 20", 0),
        ("3 + 4\nThat is all.", "3 + 4", 7),
    ],
)
def test_problems_are_read_and_solved(text, problem, value):
    assert read_problem(text, SIZE) == problem and value_of(problem) == value


@pytest.mark.parametrize(
    "text",
    ["", "7", "3 + 21", "1 + 2 + 3 + 4", "3 ** 4", "3 / 4", "3 + x", "(3 + 4", "3 4", "3 + 04", "(" * 60 + "1 + 1"],
)
def test_what_is_no_problem(text):
    assert read_problem(text, SIZE) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [("14", 14), ("7 * 2 = 14.", 14), ("-3", -3), ("−3", -3), ("1,400", 1400), ("<think>3</think>", None), ("", None),
     ("9" * 16, None)],
)  # fmt: skip
def test_answers_are_read(text, answer):
    assert read_answer(text) == answer


def test_values_are_pythons():
    seed = Random().randrange(10**6)
    print(f"seed {seed}")
    rng = Random(seed)
    for _ in range(300):
        problem = draw_problem(Size(6, 50), rng)
        assert value_of(problem) == eval(problem) and read_problem(f"So {problem} = ?", Size(6, 50)) == problem


def test_splits_share_no_problem():
    drawn = {split: set(draw_problems(split, 300, 1, SIZE)) for split in ("train", "validation", "eval")}
    assert all(split_of(problem) == split for split, problems in drawn.items() for problem in problems)
    assert draw_problems("eval", 20, 1, SIZE) == draw_problems("eval", 40, 1, SIZE)[:20] != draw_problems("eval", 20, 2)
    rng = Random(0)
    assert {split_of(draw_training(SIZE, rng)) for _ in range(100)} == {"train"}
    with pytest.raises(ValueError, match=r"n=99: the eval split holds about \d+ problems of Size"):
        draw_problems("eval", 99, 0, Size(2, 1))
    with pytest.raises(ValueError, match="split='test'"):
        draw_problems("test", 1, 0)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789+-*() =x\n\u00d7", max_size=60))
def test_reading_never_fails(text):
    problem = read_problem(text, SIZE)
    assert problem is None or isinstance(value_of(problem), int)
    assert read_answer(text) is None or isinstance(read_answer(text), int)
