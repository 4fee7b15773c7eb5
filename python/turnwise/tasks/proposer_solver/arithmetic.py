"""Arithmetic problems of whole numbers, ``+``, ``-``, ``*`` and brackets: draw, parse and solve them.

Example: ``read_problem("Try (3 + 4)*2", Size(3, 20)) == "(3 + 4) * 2"``, whose value is 14.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import NamedTuple

from turnwise.tasks.base import Split, split_of
from turnwise.tasks.generated import draw_distinct

LINE_CHARS = 100

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_EXPRESSION = re.compile(r"[\d(][\d\s+*()\u00d7\u2212-]*[\d)]")
_NUMBER = re.compile(r"-?\d+")


class Size(NamedTuple):
    """Size of a problem: at most ``numbers`` numbers (at least 2), each from 0 to ``largest``."""

    numbers: int = 3
    largest: int = 20


def value_of(problem: str) -> int:
    """Return the value of a problem in the normal form of :func:`read_problem`."""
    return _value(ast.parse(problem, mode="eval").body)


def read_problem(text: str, size: Size) -> str | None:
    """Parse the last problem in ``text`` into its normal form; ``None`` without one.

    A problem is on one line. Blanks, needless brackets, ``=``, ``?`` and a label before it are ignored; ``×`` is ``*``.
    A problem that is larger than ``size`` does not count.

    Example: ``read_problem("Here: ((12+3))×4 = ?", Size()) == "(12 + 3) * 4"``
    """
    for line in reversed(text.splitlines()):
        for expression in reversed(_EXPRESSION.findall(line[:LINE_CHARS])):
            if problem := _checked(expression.replace("\u00d7", "*").replace("\u2212", "-"), size):
                return problem
    return None


def read_answer(text: str) -> int | None:
    """Parse the last whole number in ``text``; ``None`` without one, or if it is longer than 15 characters."""
    numbers = _NUMBER.findall(text.replace(",", "").replace("\u2212", "-"))
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= 15 else None


def _checked(expression: str, size: Size) -> str | None:
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        numbers = _numbers(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    fits = 2 <= len(numbers) <= size.numbers and max(numbers) <= size.largest
    return ast.unparse(tree) if fits else None


def _numbers(node: ast.expr) -> list[int]:
    """List the numbers of an expression. Raises ``ValueError`` for anything but numbers and the three operators."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _numbers(node.left) + _numbers(node.right)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [node.value]
    raise ValueError(ast.dump(node))


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    assert isinstance(node, ast.Constant) and type(node.value) is int
    return node.value


def draw_problem(size: Size, rng: Random) -> str:
    """Draw a problem of 2 to ``size.numbers`` numbers, with random operators and brackets."""
    parts = [str(rng.randint(0, size.largest)) for _ in range(rng.randint(2, size.numbers))]
    while len(parts) > 1:
        index = rng.randrange(len(parts) - 1)
        parts[index : index + 2] = [f"({parts[index]} {rng.choice('+-*')} {parts[index + 1]})"]
    return ast.unparse(ast.parse(parts[0], mode="eval").body)


def draw_training(size: Size, rng: Random) -> str:
    """Draw a problem of the training split."""
    while split_of(problem := draw_problem(size, rng)) != "train":
        pass
    return problem


@lru_cache(maxsize=64)
def draw_problems(split: Split, n: int, seed: int | str, size: Size = Size()) -> tuple[str, ...]:  # noqa: B008
    """Draw ``n`` different problems of ``split``. A problem's text decides its split.

    Equal arguments give equal problems, and a longer list begins with the shorter one. Raises ``ValueError`` if the
    split holds too few.
    """
    rng = Random(f"proposer-solver/{split}/{seed}/{size.numbers}/{size.largest}")
    return tuple(draw_distinct(split, n, lambda: draw_problem(size, rng), f"problems of {size}"))
