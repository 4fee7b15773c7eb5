"""Questions of split clues: two rows of digits, whose digit-wise maximum is the answer. It knows no prompts."""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple

from turnwise.tasks.base import Split, check_split, split_of

DIGITS = "0123456789"
MAX_DIGITS = 8
_PATIENCE = 20_000  # draws in a row without a new question, after which all count as found


class Rows(NamedTuple):
    """Two rows of equally many digits. Example: ``Rows("195", "278")``, whose answer is ``"298"``."""

    reader: str
    writer: str

    @property
    def answer(self) -> str:
        return maximum(self.reader, self.writer)


def maximum(first: str, second: str) -> str:
    """Return the digit-wise maximum. Example: ``maximum("195", "278") == "298"``."""
    return "".join(map(max, zip(first, second, strict=True)))


def right_share(given: str | None, answer: str) -> float:
    """Return the share of the digits of ``answer`` that ``given`` has in their places; 0 for ``None``."""
    return sum(map(str.__eq__, given, answer)) / len(answer) if given else 0.0


def format_question(rows: Rows) -> str:
    """Write a question as text. Example: ``format_question(Rows("195", "278")) == "195/278"``."""
    return "/".join(rows)


def parse_question(question: str) -> Rows:
    """Parse the text of :func:`format_question`. Raises ``ValueError`` for any other text."""
    rows = question.split("/")
    if len(rows) != 2 or len(rows[0]) != len(rows[1]) or not all(re.fullmatch(r"[0-9]+", row) for row in rows):
        raise ValueError(f"question={question!r}: expected two rows of equally many digits, such as '195/278'")
    return Rows(*rows)


def parse_digits(text: str, count: int) -> str | None:
    """Parse the last line of ``text`` that holds ``count`` digits and nothing else but blanks; ``None`` without one.

    Example: ``parse_digits("I see\\n1 9 5", 3) == "195"``
    """
    for line in reversed(text.splitlines()):
        digits = line.replace(" ", "")
        if len(digits) == count and not set(digits) - set(DIGITS):
            return digits
    return None


def draw_questions(split: Split, n: int, seed: int | str, digits: int) -> list[str]:
    """Draw ``n`` different questions of ``split`` with ``digits`` digits in a row.

    Equal arguments give equal questions, and a longer list begins with the shorter one. Raises ``ValueError`` if the
    split holds too few.
    """
    check_split(split)
    rng = Random(f"split-clues/{split}/{seed}/{digits}")
    found: dict[str, None] = {}
    misses = 0
    while len(found) < n:
        question = format_question(Rows(*("".join(rng.choices(DIGITS, k=digits)) for _ in range(2))))
        if question not in found and split_of(question) == split:
            found[question] = None
            misses = 0
        elif (misses := misses + 1) == _PATIENCE:
            raise ValueError(f"n={n!r}: the {split} split holds about {len(found)} questions of {digits} digits")
    return list(found)
