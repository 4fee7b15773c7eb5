"""Imperfect demonstrations for a supervised warm start: calls are well formed, and often look up something else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from turnwise.tasks.base import Demonstration, check_demonstrations
from turnwise.tasks.lookup.table import FRIEND, FRUITS, NAMES, Question, Table
from turnwise.types import Messages

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
    """Make one ``(actor id, messages, completion)`` per question, in turns of each of its answers.

    ``quality`` in [0, 1] is the chance that a call has the right arguments. The result is copied, also a wrong one. So
    the model learns to write calls and to answer what they return, and reinforcement learning finds what to ask.
    """
    check_demonstrations((SOLVER,), quality)
    rng = Random(f"lookup-demonstrations/{seed}")
    made: list[Demonstration] = []
    for index, question in enumerate(map(Question.parse, keys)):
        table, hops = Table(question.table), question.hops
        messages: Messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}]
        asked, found = question.name, ""
        for hop in range(hops + 1):
            right = (asked, FRIEND if hop < hops - 1 else question.fruit)
            name, column = right if rng.random() < quality else _other(rng, hop < hops - 1)
            completion = found if hop == hops else call_text(name, column)
            if index % (hops + 1) == hop:
                made.append((SOLVER, messages, completion))
                break
            found = table.look_up(name, column)
            messages, asked = with_result(messages, name, column, found), found
    return made


def _other(rng: Random, is_friend: bool) -> tuple[str, str]:
    return rng.choice(NAMES), FRIEND if is_friend else rng.choice(FRUITS)
