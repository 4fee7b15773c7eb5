"""Random text as a policy may write it, and clients that answer with it."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from turnwise.inference.scripted import ByteTokenizer, ScriptedClient
from turnwise.sandbox import Returned, SandboxRun
from turnwise.types import ModelResponse

NUMBERS = ("0", "-1", "7", "9" * 20, "9" * 4400, "1e999", "-0.0", "1/0", "0/0", "1/" + "3" * 39, "0x" + "f" * 30, "1_0")
UNICODE = (
    "²", "٣", "൬", "Ⅷ", "½", "−", "×", "→", "\u2028", "\x85", "\x0b", "\x00", "\ud800", "\udc00x", "İ", "ß", "💥",
)  # fmt: skip
VALUES = (*NUMBERS, "b'x'", "[b'x']", "{1: 2}", "{1, 2}", "...", "1j", "None", "-1", "'a'", "(1,)", "[[]]", "٣", "²")
WORDS = (
    "UDLR", "U R R D", "up, down", "1 2 3 4", "1234\n3412\n2143\n4321", "#### ", "verdict: ", "approve", "reject",
    "[keep", "]", "[keep 1 0 1]", "[accept]", "[bet]", "[4]", "f(", "f([1]) == ", "b'x'", "[b'x']", "{1: 2}", "{1, 2}",
    "lambda: 0", "*x", "f(**{})", "def f(xs):\n    return xs", "```python\n", "```", "<think>", "</think>",
    "wrong: sum", "ok", "search", "answer", "query:", "Draft:", "Route: ", "\\", "'", '"', "(", ")", ",", " ", "\n",
)  # fmt: skip
REPEATED = (
    "(", "[", "{", "-", "+", " ", "\n", "a:", "A ", "1,", "1 ", "9", "**", "`", "[[", "f(", "not ", "keep 1 ", "<",
    "\t",
)  # fmt: skip


def any_text(rng: Random, valid: list[str]) -> str:
    """Parts of the task's own replies, of every task's, of odd numbers and characters, and deep or long repetitions."""
    parts = []
    for _ in range(rng.randint(1, 6)):
        kind = rng.random()
        if kind < 0.3:
            parts.append(spoilt(rng.choice(valid), rng))
        elif kind < 0.6:
            parts.append(rng.choice(WORDS))
        elif kind < 0.75:
            parts.append(rng.choice(NUMBERS))
        elif kind < 0.9:
            parts.append(rng.choice(UNICODE))
        elif kind < 0.98:
            parts.append("".join(map(chr, rng.choices(range(1, 0x250), k=rng.randint(1, 12)))))
        else:
            parts.append(rng.choice(REPEATED) * rng.choice((200, 10_000)))
    rng.shuffle(parts)
    return rng.choice(("", "", " ", "\n")).join(parts)


def spoilt(reply: str, rng: Random) -> str:
    """A valid reply as it is, cut off, or with another number, value or character in it."""
    place, kind = rng.randint(0, len(reply)), rng.random()
    if kind < 0.2:
        return reply
    if kind < 0.4:
        return reply[:place]
    if kind < 0.8:
        return re.sub(r"\d+", lambda found: rng.choice(VALUES) if rng.random() < 0.5 else found[0], reply)
    return reply[:place] + rng.choice(UNICODE) + reply[place:]


class Babbler(ScriptedClient):
    """Answers every request with the next text, as an endpoint may hand it over: not always well-formed Unicode."""

    async def generate(self, requests):
        return [ModelResponse(self.script(request), [7], [0.0], "stop", [(1, 0)]) for request in requests]


class Writer(ScriptedClient):
    """Answers with the next text as tokens, from which calls of tools are read."""

    async def generate(self, requests):
        texts = [[*self.script(request).encode(errors="replace"), 256] for request in requests]
        return [ModelResponse("", ids, [0.0] * len(ids), "stop", [(len(ids), 0)]) for ids in texts]


class Blind(ByteTokenizer):
    """Gives every chat the same ids, so long texts cost nothing, but only text that can be encoded."""

    def apply_chat_template(self, conversation, **kwargs: Any):
        json.dumps(conversation, ensure_ascii=False).encode()
        return [1]


class NoSandbox:
    """Runs nothing, and answers with what a program may claim."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    async def call(self, program, function, inputs):
        program.encode()
        values = [
            0,
            1,
            None,
            "x",
            [1],
            [[]],
            {"a": []},
            1e308,
            float("inf"),
            float("nan"),
            [[b"x"]],
            {"a": [1.0, None]},
        ]
        results = [Returned(self.rng.choice(values)) for _ in inputs]
        return SandboxRun(results, "ok", "", 0.0)
