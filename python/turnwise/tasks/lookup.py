"""Lookup: questions about a random table in SQLite, which only the solver's tool can read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from turnwise.arena import Episode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split, TaskOptions, check_demonstrations
from turnwise.tasks.generated import GeneratedTask, draw_distinct, texts_of
from turnwise.types import Actor, EpisodeState, Messages, TaskCapabilities

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
class LookupQuestion:
    """A question about table ``table``: how many ``fruit`` has ``name``, or the friend of ``name`` after two ``hops``.

    Example: ``LookupQuestion(5813, "Ben", "pears", 2)``; its key is ``"5813/Ben/pears/2"``.
    """

    table: int
    name: str
    fruit: str
    hops: int = 1

    @classmethod
    def parse(cls, key: str) -> LookupQuestion:
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


class LookupTable:
    """The rows of one table: for each name a number of each fruit from 0 to 99, and a friend.

    Example: ``LookupTable(5813).look_up("Ben", "pears")``
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
            row = database.execute(f"SELECT {column} FROM people WHERE name = ?", (str(name),)).fetchone()
        if row is None:
            raise LookupError(f"no name {str(name)[:20]!r}, expected one of {', '.join(NAMES)}")
        return str(row[0])

    def answer(self, question: LookupQuestion) -> str:
        name = question.name if question.hops == 1 else self.look_up(question.name, FRIEND)
        return self.look_up(name, question.fruit)


# ---------------------------------------------------------------------------------------------------------------------
# Prompts and demonstrations
# ---------------------------------------------------------------------------------------------------------------------
SOLVER = "solver"
SYSTEM_PROMPT = "Look it up. Answer with the number."


def call_text(name: str, column: str) -> str:
    """The text with which a model calls the tool."""
    return f"<tool_call>{json.dumps({'name': 'look_up', 'arguments': {'name': name, 'column': column}})}</tool_call>"


def with_result(messages: Messages, name: str, column: str, result: str) -> Messages:
    """Return the chat after a call and its result."""
    number = sum(message["role"] == "tool" for message in messages)
    function = {"name": "look_up", "arguments": {"name": name, "column": column}}
    call = {"id": f"call_{number}_0", "type": "function", "function": function}
    return [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": result},
    ]


def demonstrations(keys: Sequence[str], seed: int | str, quality: float) -> list[Demonstration]:
    """Make one ``(actor id, messages, completion)`` per question: in turn the first call, any second call, the answer.

    ``quality`` in [0, 1] is the chance that a call has the right arguments. The last reply copies a result even if it
    is wrong. So the model learns to write calls and to answer with their results. Reinforcement learning finds the
    right calls.
    """
    check_demonstrations((SOLVER,), quality)
    rng = Random(f"lookup-demonstrations/{seed}")
    made: list[Demonstration] = []
    for index, question in enumerate(map(LookupQuestion.parse, keys)):
        table, hops = LookupTable(question.table), question.hops
        messages: Messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}]
        asked, result = question.name, ""
        for hop in range(hops + 1):
            right = (asked, FRIEND if hop < hops - 1 else question.fruit)
            if rng.random() < quality:
                name, column = right
            else:
                name, column = rng.choice(NAMES), FRIEND if hop < hops - 1 else rng.choice(FRUITS)
            completion = result if hop == hops else call_text(name, column)
            if index % (hops + 1) == hop:
                made.append((SOLVER, messages, completion))
                break
            result = table.look_up(name, column)
            messages, asked = with_result(messages, name, column, result), result
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Play
# ---------------------------------------------------------------------------------------------------------------------
class LookupEpisode(SingleTurnEpisode):
    """One question about a table that the solver can't see. The artifact is ``{"question": "5813/Ben/pears/1"}``.

    The solver calls ``look_up(name, column)`` and answers with the number. A right answer earns 1.
    """

    episode_type = "lookup"
    actor = SOLVER

    def __init__(self) -> None:
        self.rubric = Rubric([right, looked_up, well_formed], [1.0, 0.0, 0.0], valid=[well_formed])

    def get_prompt(self, artifact: Any) -> str:
        return LookupQuestion.parse(artifact["question"]).text

    def run_tool(self, name: str, arguments: dict[str, Any], state: EpisodeState, arena: Any, artifact: Any) -> str:
        table = LookupTable(LookupQuestion.parse(artifact["question"]).table)
        return table.look_up(arguments.get("name"), arguments.get("column"))


def right(completion: str, artifact: Any) -> dict[str, float]:
    """1.0 if the answer is the table's number."""
    question = LookupQuestion.parse(artifact["question"])
    return {SOLVER: float(completion.strip() == LookupTable(question.table).answer(question))}


def looked_up(rollout: Any) -> dict[str, float]:
    """The number of well-formed calls."""
    return {SOLVER: float(_calls(rollout).count("ok"))}


def well_formed(rollout: Any) -> dict[str, float]:
    """The share of the attempted calls that are well formed; 1.0 without any."""
    calls = _calls(rollout)
    return {SOLVER: calls.count("ok") / len(calls) if calls else 1.0}


def _calls(rollout: Any) -> list[str]:
    return [status for step in rollout.steps for status in step.facts.tool_calls or ()]


class LookupOptions(TaskOptions):
    """Options of the task ``lookup``."""

    hops: int = Field(default=1, ge=1, le=2)
    """Look-ups that an answer needs: the value itself, or first the friend's name."""
    quality: float = Field(default=0.45, ge=0, le=1)
    """Chance that a call in a demonstration has the right arguments."""
    clean: float = Field(default=0.5, ge=0, le=1)
    """Share of the demonstrations, the first ones, whose calls are all right."""
    max_tokens: int = Field(default=64, ge=1)
    """Limit of each answer."""


class LookupTask(GeneratedTask):
    """A solver and its tool; see :class:`turnwise.tasks.base.Task`.

    Example: ``LookupTask(LookupOptions(hops=2))``
    """

    name = "lookup"
    success_metric = f"right/{SOLVER}"
    system_prompts: ClassVar[dict[str, str]] = {SOLVER: SYSTEM_PROMPT}
    options_type = LookupOptions
    capabilities = TaskCapabilities(credit_rule="grpo")

    @property
    def actors(self) -> list[Actor]:
        limit, rounds = self.options.max_tokens, self.options.hops + 1
        return [Actor(SOLVER, SYSTEM_PROMPT, max_tokens=limit, tools=(LOOK_UP,), max_tool_rounds=rounds)]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        """Return the episode. Raises ``ValueError`` for a tree: with one turn, branches equal a question's copies."""
        if tree is not None:
            raise ValueError(f"task {self.name!r} has one turn a question: branch with rollout.group_size")
        return {self.name: LookupEpisode()}

    def draw(self, split: Split, n: int, seed: int | str) -> Sequence[str]:
        rng, hops = Random(f"lookup/{split}/{seed}"), self.options.hops

        def draw() -> str:
            return LookupQuestion(rng.randrange(TABLES), rng.choice(NAMES), rng.choice(FRUITS), hops).key

        return draw_distinct(split, n, draw, f"questions with hops={hops}")

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        keys = self.draw("train", min(n, 20_000), f"demonstrations/{seed}")
        repeated = [keys[index % len(keys)] for index in range(n)]
        first = round(n * self.options.clean)
        right = demonstrations(repeated[:first], f"{seed}/clean", 1.0)
        return right + demonstrations(repeated[first:], seed, self.options.quality)

    def texts(self) -> list[str]:
        shown = [text for text in texts_of(self.demonstrations(500, 0)) if text]
        return [*shown, *(call_text(name, column) for name in NAMES for column in (*FRUITS, FRIEND))]

    def oracle(self) -> Player:
        """A player that looks up what the question asks for."""

        def play(actor_id: str, messages: Messages) -> str:
            [text] = [message["content"] for message in messages if message["role"] == "user"]
            results = [message["content"] for message in messages if message["role"] == "tool"]
            words = text.rstrip("?").split()
            columns = [FRIEND, words[2]] if FRIEND in words else [words[2]]
            if len(results) == len(columns):
                return results[-1]
            return call_text(results[-1] if results else words[-1], columns[len(results)])

        return play

    def random_player(self, seed: int) -> Player:
        """A player that looks up a random value and answers with it."""
        rng = Random(f"lookup-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            if messages[-1]["role"] == "tool":
                return messages[-1]["content"]
            return call_text(rng.choice(NAMES), rng.choice(FRUITS))

        return play
