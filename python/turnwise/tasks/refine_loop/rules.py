"""Lists of numbers under rules: questions that always have an answer, what a draft breaks, and the text forms.

Example: ``"Write 4 numbers from 1 to 9: sum 17, different, largest 8."`` is answered by ``2 3 4 8``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from random import Random
from typing import NamedTuple

import numpy as np

from turnwise.tasks.base import Split, split_of
from turnwise.tasks.generated import draw_distinct

Draft = tuple[int, ...]
LOWEST, HIGHEST = 1, 9
COUNTS = (3, 5)  # fewest and most numbers of a list

KINDS: Mapping[str, Callable[[Draft], int | None]] = {
    "sum": sum,
    "different": lambda draft: 0 if len(set(draft)) == len(draft) else None,
    "ascending": lambda draft: 0 if list(draft) == sorted(draft) else None,
    "largest": max,
    "smallest": min,
    "first": lambda draft: draft[0],
    "last": lambda draft: draft[-1],
}
"""Kinds of rules by their word, which a critic also uses for a broken rule. The function gives a list's value.

``None`` means that the rule does not hold for the list. A property has the value 0. ``count`` is a rule of every list.
"""

COUNT = "count"
_PROPERTIES = {"different", "ascending"}


class RulesQuestion(NamedTuple):
    """The count of numbers, and the other rules: ``(("sum", 17), ("different", 0))``; a property's value is 0."""

    length: int
    rules: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every rule's word, ``count`` first."""
        return (COUNT, *(name for name, _ in self.rules))


def broken_rules(question: RulesQuestion, draft: Draft | None) -> frozenset[str]:
    """The words of the rules that ``draft`` breaks; all of them without a draft.

    Example: ``broken_rules(parse_question("Write 3 numbers from 1 to 9: sum 9, largest 5."), (1, 2, 5)) == {"sum"}``
    """
    if draft is None:
        return frozenset(question.names)
    broken = {name for name, value in question.rules if not draft or KINDS[name](draft) != value}
    return frozenset(broken | ({COUNT} if len(draft) != question.length else set()))


@lru_cache(maxsize=4096)
def answers(question: RulesQuestion) -> tuple[Draft, ...]:
    """Every list that breaks no rule, in ascending order."""
    lists, columns = _everything(question.length)
    kept = np.logical_and.reduce([columns[name] == value for name, value in question.rules])
    return tuple(lists[index] for index in np.flatnonzero(kept))


@cache
def _everything(length: int) -> tuple[list[Draft], dict[str, np.ndarray]]:
    """Every list of ``length`` numbers, and for each kind of rule the lists' values ``[L]``; -1 for ``None``."""
    lists = list(product(range(LOWEST, HIGHEST + 1), repeat=length))

    def column(kind: Callable[[Draft], int | None]) -> np.ndarray:
        said = (kind(draft) for draft in lists)
        return np.fromiter((-1 if value is None else value for value in said), dtype=np.int64, count=len(lists))

    return lists, {name: column(kind) for name, kind in KINDS.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Questions
# ---------------------------------------------------------------------------------------------------------------------
def draw_questions(split: Split, n: int, seed: int | str, rules: int = 3) -> list[str]:
    """Draw ``n`` different questions of ``split`` with ``rules`` rules in addition to the count, each with an answer.

    Equal arguments give equal questions, and a longer list begins with the shorter one. A question's text decides its
    split. Raises ``ValueError`` if the split holds too few.
    """
    if not 1 <= rules <= len(KINDS):
        raise ValueError(f"rules={rules!r}: expected 1 to {len(KINDS)}")
    rng = Random(f"refine-loop/{split}/{seed}/{rules}")
    return draw_distinct(split, n, lambda: format_question(_draw(rules, rng)), f"questions with rules={rules}")


def draw_training(rules: int, rng: Random) -> str:
    """Draw a training question. The same question may be drawn again."""
    while split_of(text := format_question(_draw(rules, rng))) != "train":
        pass
    return text


def _draw(rules: int, rng: Random) -> RulesQuestion:
    """Draw a hidden list and state what is true of it."""
    while True:
        draft = tuple(rng.randint(LOWEST, HIGHEST) for _ in range(rng.randint(*COUNTS)))
        if rng.random() < 0.5:
            draft = tuple(sorted(draft))  # or hardly any list would be in order
        true = {name: value for name, kind in KINDS.items() if (value := kind(draft)) is not None}
        if len(true) >= rules:
            chosen = set(rng.sample(sorted(true), rules))
            return RulesQuestion(len(draft), tuple((name, value) for name, value in true.items() if name in chosen))


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------
_QUESTION = re.compile(rf"Write (\d+) numbers from {LOWEST} to {HIGHEST}: (.*)\.")
_SEPARATORS = re.compile(r"[\s,;\[\]()'\"`*.]+")
_OK = re.compile(r"\bok\b", re.IGNORECASE)


def format_question(question: RulesQuestion) -> str:
    rules = ", ".join(name if name in _PROPERTIES else f"{name} {value}" for name, value in question.rules)
    return f"Write {question.length} numbers from {LOWEST} to {HIGHEST}: {rules}."


@lru_cache(maxsize=4096)
def parse_question(text: str) -> RulesQuestion:
    """Parse a question that :func:`format_question` wrote. Raises ``ValueError`` for any other text."""
    if match := _QUESTION.fullmatch(text):
        parts = [part.split() for part in match[2].split(", ")]
        rules = tuple((part[0], int(part[1]) if part[1:] else 0) for part in parts if part)
        question = RulesQuestion(int(match[1]), rules)
        if all(name in KINDS for name, _ in rules) and format_question(question) == text:
            return question
    raise ValueError(f"question={text!r}: expected such as 'Write 3 numbers from 1 to 9: sum 9, largest 5.'")


def format_draft(draft: Draft) -> str:
    """Write ``(2, 3, 4)`` as ``"2 3 4"``."""
    return " ".join(map(str, draft))


def parse_draft(text: str) -> Draft | None:
    """Parse the list from the last line of ``text`` that holds only numbers from 1 to 9; ``None`` without one.

    Example: ``parse_draft("I take\\n[2, 3, 4]") == (2, 3, 4)``
    """
    for line in reversed(text.splitlines()):
        parts = [part for part in _SEPARATORS.split(line.rpartition(":")[2]) if part]
        if parts and all(len(part) == 1 and part in "123456789" for part in parts):
            return tuple(map(int, parts))
    return None


def format_review(broken: frozenset[str] | Sequence[str]) -> str:
    """Write ``"ok"`` if no rule is broken, else for example ``"wrong: largest, sum"``."""
    return "wrong: " + ", ".join(sorted(broken)) if broken else "ok"


def parse_review(text: str) -> frozenset[str] | None:
    """Return the rules that the last review line of ``text`` calls broken, none for ``ok``; ``None`` without a review.

    Example: ``parse_review("Let me see.\\nWrong: sum and largest") == {"sum", "largest"}``
    """
    for line in reversed(text.splitlines()):
        words = set(re.findall(r"[a-z]+", line.lower()))
        if broken := words & {COUNT, *KINDS}:
            return frozenset(broken)
        if _OK.search(line):
            return frozenset()
    return None
