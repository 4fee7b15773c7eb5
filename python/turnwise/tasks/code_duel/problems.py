"""Small programming problems made from parts: a statement, a reference program, wrong programs and hidden inputs.

A problem is a family and one part for each of its places. Its program is a function ``f`` of ``xs`` (a list of whole
numbers), ``s`` (a string) or ``a, b`` (whole numbers).

Example: the problem ``"Return the sum of the squares of the even numbers in the list xs."`` has the program
``def f(xs):\\n    return sum(x * x for x in xs if x % 2 == 0)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from random import Random
from typing import Any, NamedTuple

from turnwise.tasks.base import Split, check_split, split_of

Arguments = tuple[Any, ...]

NUMBERS = (-9, 9)  # smallest and largest number of an input
MAX_ITEMS = 6  # of a list
MAX_LETTERS = 8  # of a string, small letters
LETTERS = "abcdeiostz"

HIDDEN = 12  # hidden inputs of a problem
MUTANTS = 6  # wrong programs of a problem


class Fragment(NamedTuple):
    """One choice at one place: its words in the statement, and its code in the program."""

    words: str
    code: str


class Problem(NamedTuple):
    """A problem, its program, and ``wrong`` programs, each of which returns something else for some hidden input.

    The first wrong program takes the first choice at the last place, whatever the statement says. It is left out if
    that program is right.

    ``hidden`` holds tuples of arguments, and ``expected`` the program's result for each.
    """

    family: str
    statement: str
    program: str
    wrong: tuple[str, ...]
    hidden: tuple[Arguments, ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True)
class Family:
    """Problems of one kind.

    ``places`` lists the parts to choose from at each place. ``state`` and ``write`` turn the chosen parts into a
    statement and a program. ``draw`` makes random arguments, ``edges`` are fixed ones, and ``accepts`` says whether
    arguments are allowed.
    """

    name: str
    places: tuple[tuple[Fragment, ...], ...]
    state: Callable[[Sequence[Fragment]], str]
    write: Callable[[Sequence[Fragment]], str]
    draw: Callable[[Random], Arguments]
    edges: tuple[Arguments, ...]
    accepts: Callable[[Arguments], bool]


# ---------------------------------------------------------------------------------------------------------------------
# The families
# ---------------------------------------------------------------------------------------------------------------------
def _with(words: str, code: str, numbers: Sequence[int]) -> list[Fragment]:
    return [Fragment(words.format(k=k), code.format(k=k)) for k in numbers]


_WHICH = (
    Fragment("numbers", ""),
    Fragment("even numbers", " if x % 2 == 0"),
    Fragment("odd numbers", " if x % 2 == 1"),
    *_with("numbers above {k}", " if x > {k}", range(-4, 5)),
    *_with("numbers below {k}", " if x < {k}", range(-4, 5)),
    *_with("multiples of {k}", " if x % {k} == 0", range(3, 6)),
)
_WHAT = (
    Fragment("", "x"),
    Fragment("squares of the ", "x * x"),
    Fragment("absolute values of the ", "abs(x)"),
    *_with("{k}-fold of the ", "{k} * x", range(2, 6)),
)
_HOW = (
    Fragment("sum", "sum({what} for x in xs{which})"),
    Fragment("largest, or 0,", "max(({what} for x in xs{which}), default=0)"),
    Fragment("smallest, or 0,", "min(({what} for x in xs{which}), default=0)"),
    Fragment("count of different values", "len({{{what} for x in xs{which}}})"),
    Fragment("sorted list", "sorted({what} for x in xs{which})"),
    Fragment("reversed list", "[{what} for x in xs{which}][::-1]"),
)


def _is_number(value: Any) -> bool:
    return type(value) is int and NUMBERS[0] <= value <= NUMBERS[1]


def _accepts_list(arguments: Arguments) -> bool:
    return (
        len(arguments) == 1
        and type(arguments[0]) is list
        and len(arguments[0]) <= MAX_ITEMS
        and all(map(_is_number, arguments[0]))
    )


_EDITS = (
    Fragment("reverse it", "s[::-1]"),
    Fragment("double each letter", "''.join(c + c for c in s)"),
    Fragment("remove the vowels", "''.join(c for c in s if c not in 'aeiou')"),
    Fragment("sort its letters", "''.join(sorted(s))"),
    Fragment("make it upper-case", "s.upper()"),
    Fragment("append its reverse", "s + s[::-1]"),
    Fragment("keep every second letter", "s[::2]"),
    *_with("keep the first {k} letters", "s[:{k}]", range(1, 5)),
    *_with("drop the first {k} letters", "s[{k}:]", range(1, 5)),
    *_with("keep the last {k} letters", "s[-{k}:]", range(1, 5)),
)


def _accepts_string(arguments: Arguments) -> bool:
    if len(arguments) != 1 or type(arguments[0]) is not str:
        return False
    return len(arguments[0]) <= MAX_LETTERS and all("a" <= letter <= "z" for letter in arguments[0])


_STARTS = (
    Fragment("a plus b", "a + b"),
    Fragment("a minus b", "a - b"),
    Fragment("a times b", "a * b"),
    Fragment("the larger of a and b", "max(a, b)"),
    Fragment("the smaller of a and b", "min(a, b)"),
)
_STEPS = (
    Fragment("square it", "n * n"),
    Fragment("take the absolute value", "abs(n)"),
    *_with("add {k}", "n + {k}", range(1, 6)),
    *_with("multiply by {k}", "n * {k}", range(2, 6)),
    *_with("take it modulo {k}", "n % {k}", range(3, 8)),
)


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "lists",
            (_HOW, _WHAT, _WHICH),
            state=lambda parts: "Return the {} of the {}{} in the list xs.".format(*(part.words for part in parts)),
            write=lambda parts: (
                "def f(xs):\n    return " + parts[0].code.format(what=parts[1].code, which=parts[2].code)
            ),
            draw=lambda rng: ([rng.randint(*NUMBERS) for _ in range(rng.randint(0, MAX_ITEMS))],),
            edges=(([],), ([3, -2, 3, 0, 8, -5],)),
            accepts=_accepts_list,
        ),
        Family(
            "strings",
            (_EDITS, _EDITS),
            state=lambda parts: f"Take the string s, {parts[0].words}, then {parts[1].words}, and return it.",
            write=lambda parts: f"def f(s):\n    s = {parts[0].code}\n    return {parts[1].code}",
            draw=lambda rng: ("".join(rng.choice(LETTERS) for _ in range(rng.randint(0, MAX_LETTERS))),),
            edges=(("",), ("abide",)),
            accepts=_accepts_string,
        ),
        Family(
            "sums",
            (_STARTS, _STEPS, _STEPS),
            state=lambda parts: "Start with {}, {}, then {}, and return it.".format(*(part.words for part in parts)),
            write=lambda parts: "def f(a, b):\n    n = {}\n    n = {}\n    return {}".format(*(p.code for p in parts)),
            draw=lambda rng: (rng.randint(*NUMBERS), rng.randint(*NUMBERS)),
            edges=((0, 0), (-7, 4)),
            accepts=lambda arguments: len(arguments) == 2 and all(map(_is_number, arguments)),
        ),
    )
}


# ---------------------------------------------------------------------------------------------------------------------
# Problems
# ---------------------------------------------------------------------------------------------------------------------
@cache
def catalogue(family: str) -> dict[str, tuple[Fragment, ...]]:
    """Map each statement of ``family`` to its parts. Raises ``ValueError`` for an unknown family."""
    if family not in FAMILIES:
        raise ValueError(f"family={family!r}: expected one of {sorted(FAMILIES)}")
    kind = FAMILIES[family]
    return {kind.state(parts): parts for parts in product(*kind.places)}


def find_family(statement: str) -> Family:
    """Find the family of ``statement``. Raises ``ValueError`` for a text that is not a statement."""
    for family in FAMILIES:
        if statement in catalogue(family):
            return FAMILIES[family]
    raise ValueError(f"statement={statement!r}: expected a statement of one of the families {', '.join(FAMILIES)}")


@lru_cache(maxsize=4096)
def find_problem(statement: str) -> Problem:
    """Make the problem of ``statement``. It depends on the statement alone. Raises ``ValueError`` for other text."""
    kind = find_family(statement)
    parts = catalogue(kind.name)[statement]
    rng = Random(f"code-duel/{statement}")
    program = kind.write(parts)
    hidden = (*kind.edges, *(kind.draw(rng) for _ in range(HIDDEN - len(kind.edges))))
    expected = tuple(run_trusted(program, arguments) for arguments in hidden)
    # Wrong programs differ from the right one in one part. Keep those that behave differently, one per behaviour.
    wrong: dict[tuple[str, ...], str] = {}
    neighbours = [
        (*parts[:index], other, *parts[index + 1 :])
        for index, choices in enumerate(kind.places)
        for other in choices
        if other != parts[index]
    ]
    rng.shuffle(neighbours)
    # The first wrong program is a habit that all problems share: whatever the statement ends with, the plain part.
    habit = (*parts[:-1], kind.places[-1][0])
    neighbours.sort(key=lambda neighbour: neighbour != habit)
    for neighbour in neighbours:
        code = kind.write(neighbour)
        behaviour = tuple(repr(run_trusted(code, arguments)) for arguments in hidden)
        if behaviour != tuple(map(repr, expected)) and behaviour not in wrong:
            wrong[behaviour] = code
        if len(wrong) == MUTANTS:
            break
    return Problem(kind.name, statement, program, tuple(wrong.values()), hidden, expected)


def draw_problems(split: Split, n: int, seed: int | str, families: Sequence[str] = tuple(FAMILIES)) -> list[str]:
    """Draw ``n`` different statements of ``split``. The families take turns until each runs out.

    Equal arguments give equal statements, and a longer list begins with the shorter one. A statement's hash decides its
    split. Raises ``ValueError`` if the split holds fewer.
    """
    check_split(split)
    if n < 0:
        raise ValueError(f"n={n!r}: expected a count >= 0")
    statements = in_turns(split, seed, tuple(families))
    if len(statements) < n:
        raise ValueError(f"n={n!r}: the {split} split holds {len(statements)} problems of {', '.join(families)}")
    return list(statements[:n])


@lru_cache(maxsize=16)
def in_turns(split: Split, seed: int | str, families: tuple[str, ...]) -> Sequence[str]:
    """List every statement of ``split``: one of each family in turn, each family shuffled by ``seed``."""
    queues = [
        Random(f"code-duel/{family}/{split}/{seed}").sample(statements, len(statements))
        for family in families
        for statements in [_statements(family)[split]]
    ]
    longest = max(map(len, queues), default=0)
    return [queue[index] for index in range(longest) for queue in queues if index < len(queue)]


@cache
def _statements(family: str) -> dict[Split, list[str]]:
    splits: dict[Split, list[str]] = {"train": [], "validation": [], "eval": []}
    for statement in catalogue(family):
        splits[split_of(statement)].append(statement)
    return splits


@lru_cache(maxsize=65_536)
def _compiled(program: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(compile(program, "problem", "exec"), namespace)
    function: Callable[..., Any] = namespace["f"]
    return function


def run_trusted(program: str, arguments: Arguments) -> Any:
    """Run a program of *this module* in this process and return its result. Never run a model's program here."""
    return _compiled(program)(*arguments)
