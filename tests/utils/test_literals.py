"""Values from text: literals of Python, switches, choices, nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest

from turnwise.utils.literals import literal

SELECT = Literal["best", "none"]


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        # Where nothing says what is expected, a word is what Python makes of it, and `none` is no word.
        ("true", Any, True), ("False", Any, False), ("64", Any, 64), ("1e-3", Any, 1e-3), ("[1, 2]", Any, [1, 2]),
        ("auto", Any, "auto"), ("none", Any, None), ("null", Any, None), ("'none'", Any, "none"), ("yes", Any, "yes"),
        # A legal choice is itself, in any union; null never is, unless it is a choice too.
        ("none", SELECT, "none"), ("none", SELECT | None, "none"), ("null", SELECT | None, None),
        ("none", Literal["a"] | None, None), ("null", Literal["null"] | None, "null"), ("3", Literal["a", 3], 3),
        # Text takes every word as it stands; beside None only the two that mean it are lost, unless they are quoted.
        ("none", str, "none"), ("true", str, "true"), ("007", str, "007"), ("[1]", str, "[1]"), ("nan", str, "nan"),
        ("none", str | None, None), ("'none'", str | None, "none"), ("1e5", str | None, "1e5"), ("2024", Path, "2024"),
        ("['a']", Literal["all"] | list[str], ["a"]), ("12", str | dict[str, str], "12"), ("none", list | None, None),
        # Numbers and switches, also those that Python has no literal for.
        ("5", int, 5), ("007", int, 7), ("1e3", float, 1e3), ("-inf", float, -math.inf), ("none", float | None, None),
        ("yes", bool, True), ("0", bool, False), ("off", bool | None, False), ("1", int, 1), ("1", bool | int, True),
        ("{'a': 1}", dict[str, Any], {"a": 1}), ("[4, 6]", tuple[int, int], [4, 6]),
        # What fits nowhere stays as it was typed.
        ("none", int, "none"), ("True", int, "True"), ("maybe", bool, "maybe"), ("[1]", int, "[1]"),
        ("5", SELECT, "5"), ("None", SELECT, "None"), ("9" * 5000, int, "9" * 5000),
    ],
)  # fmt: skip
def test_literals(text: str, expected: Any, value: Any) -> None:
    read = literal(text, expected)
    assert read == value and type(read) is type(value)


def test_a_number_that_is_none() -> None:
    assert math.isnan(literal("nan", float)) and math.isnan(literal("NaN", float | None)) and literal("nan") == "nan"
