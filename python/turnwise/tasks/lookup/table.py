"""A random table in SQLite, the questions about it, and the tool that looks a value up."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any

# fmt: off
NAMES = (
    "Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hal", "Ida", "Jon",
    "Kim", "Leo", "Mia", "Ned", "Ola", "Pam", "Quin", "Rob", "Sue", "Tom",
)
# fmt: on
FRUITS = ("apples", "pears", "plums", "figs")
FRIEND = "friend"
COLUMNS = (*FRUITS, FRIEND)
TABLES = 10_000
"""Number of different tables."""

LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a value in the table.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "column": {"type": "string", "enum": list(COLUMNS)}},
            "required": ["name", "column"],
        },
    },
}
"""The tool's schema, as the OpenAI API writes it."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about table ``table``: how many ``fruit`` has ``name``, or the friend of ``name`` after two ``hops``.

    Example: ``Question(5813, "Ben", "pears", 2)``; its key is ``"5813/Ben/pears/2"``.
    """

    table: int
    name: str
    fruit: str
    hops: int = 1

    @classmethod
    def parse(cls, key: str) -> Question:
        table, name, fruit, hops = key.split("/")
        return cls(int(table), name, fruit, int(hops))

    @property
    def key(self) -> str:
        return f"{self.table}/{self.name}/{self.fruit}/{self.hops}"

    @property
    def text(self) -> str:
        """The question as the solver reads it, without the number of the table."""
        who = self.name if self.hops == 1 else f"the friend of {self.name}"
        return f"How many {self.fruit} has {who}?"


class Table:
    """The rows of one table: for each name a number of each fruit from 0 to 99, and a friend.

    Example: ``Table(5813).look_up("Ben", "pears")``
    """

    def __init__(self, number: int) -> None:
        rng = Random(f"lookup/{number}")
        self.rows = [
            (name, *(rng.randrange(100) for _ in FRUITS), rng.choice([other for other in NAMES if other != name]))
            for name in NAMES
        ]

    def look_up(self, name: Any, column: Any) -> str:
        """Return a value as text. Raises ``LookupError`` for a name or column that isn't there."""
        if column not in COLUMNS:
            raise LookupError(f"no column {column!r}, expected one of {', '.join(COLUMNS)}")
        with closing(sqlite3.connect(":memory:")) as database:
            database.execute(f"CREATE TABLE people (name, {', '.join(COLUMNS)})")
            database.executemany(f"INSERT INTO people VALUES ({', '.join('?' * (1 + len(COLUMNS)))})", self.rows)
            # The column is one of COLUMNS; the name is the model's text, and stays a parameter.
            found = database.execute(f"SELECT {column} FROM people WHERE name = ?", (str(name),)).fetchone()
        if found is None:
            raise LookupError(f"no name {str(name)[:20]!r}, expected one of {', '.join(NAMES)}")
        return str(found[0])

    def answer(self, question: Question) -> str:
        name = question.name if question.hops == 1 else self.look_up(question.name, FRIEND)
        return self.look_up(name, question.fruit)
