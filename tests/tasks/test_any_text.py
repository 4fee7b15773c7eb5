"""Text that a policy writes never crashes an episode: random strings for every actor of every task.

A slow test plays a thousand strings per task, or as many as ``TURNWISE_FUZZ=10000`` says.
"""

from __future__ import annotations

import json
import math
import os
import re
from random import Random
from typing import Any

import pytest

from turnwise.arena import Arena
from turnwise.inference.scripted import ByteTokenizer, ScriptedClient
from turnwise.tasks import TASKS, build_task
from turnwise.tasks.code_duel import Returned, SandboxRun, parse_cases, parse_program
from turnwise.tasks.gsm8k import answers_match, extract_answer
from turnwise.tasks.kuhn_poker.game import KuhnRules
from turnwise.tasks.math_orchestra import parse_verdict
from turnwise.tasks.negotiation import NegotiationRules
from turnwise.tasks.proposer_solver.arithmetic import Size, read_answer, read_problem
from turnwise.tasks.refine_loop import parse_draft, parse_review
from turnwise.tasks.routes import parse_route
from turnwise.tasks.search_orchestra.corpus import normalize
from turnwise.tasks.search_orchestra.prompts import parse_line
from turnwise.tasks.search_orchestra.prompts import parse_route as parse_search_route
from turnwise.tasks.sudoku import parse_grid
from turnwise.tasks.tic_tac_toe.board import TicTacToeRules
from turnwise.types import ModelResponse, Sampling

STRINGS = int(os.environ.get("TURNWISE_FUZZ", "1000"))

NUMBERS = ("0", "-1", "7", "9" * 20, "9" * 4400, "1e999", "-0.0", "1/0", "0/0", "1/" + "3" * 39, "0x" + "f" * 30, "1_0")
UNICODE = (
    "²",
    "٣",
    "൬",
    "Ⅷ",
    "½",
    "−",
    "×",
    "→",
    "\u2028",
    "\x85",
    "\x0b",
    "\x00",
    "\ud800",
    "\udc00x",
    "İ",
    "ß",
    "💥",
)
VALUES = (*NUMBERS, "b'x'", "[b'x']", "{1: 2}", "{1, 2}", "...", "1j", "None", "-1", "'a'", "(1,)", "[[]]", "٣", "²")
WORDS = (
    "UDLR", "U R R D", "up, down", "1 2 3 4", "1234\n3412\n2143\n4321", "#### ", "verdict: ", "approve", "reject",
    "[keep", "]", "[keep 1 0 1]", "[accept]", "[bet]", "[4]", "f(", "f([1]) == ", "b'x'", "[b'x']", "{1: 2}", "{1, 2}",
    "lambda: 0", "*x", "f(**{})", "def f(xs):\n    return xs", "```python\n", "```", "<think>", "</think>",
    "wrong: sum", "ok", "search", "answer", "query:", "Draft:", "Route: ", "\\", "'", '"', "(", ")", ",", " ", "\n",
)  # fmt: skip
REPEATED = (
    "(",
    "[",
    "{",
    "-",
    "+",
    " ",
    "\n",
    "a:",
    "A ",
    "1,",
    "1 ",
    "9",
    "**",
    "`",
    "[[",
    "f(",
    "not ",
    "keep 1 ",
    "<",
    "\t",
)


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


def task_of(name, tmp_path):
    options = {}
    if name in ("gsm8k", "math_orchestra"):
        path = tmp_path / "questions.jsonl"
        rows = [{"question": f"{n} + {n} = ?", "answer": f"So.\n#### {2 * n}"} for n in range(100)]
        path.write_text("\n".join(map(json.dumps, rows)))
        options = {"path": str(path)}
    if name == "search_orchestra":
        options = {"hops": 1}
    return build_task(name, options)


@pytest.mark.parametrize("strings", [200, pytest.param(STRINGS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TASKS)
async def test_no_text_crashes_an_episode(name, tmp_path, strings):
    task, rng = task_of(name, tmp_path), Random(0)
    valid, said = [reply for *_, reply in task.demonstrations(40, 0)], []

    def reply(request):
        said.append(any_text(rng, valid))
        return said[-1]

    tools = any(actor.tools for actor in task.actors)
    client, tokenizer = (Writer(reply), ByteTokenizer()) if tools else (Babbler(reply), Blind())
    arena = Arena(client, tokenizer, sampling=Sampling(max_tokens=4096), failure_threshold=1.0)
    for actor in task.actors:
        arena.add_actor(actor)
    for kind, episode in task.episodes().items():
        if name == "code_duel":
            episode.sandbox = NoSandbox(rng)
        arena.add_episode(kind, episode)
    step = 0
    while len(said) < strings:
        first = len(said)
        asked = task.requests(step, questions=50, copies=1) if step % 2 else task.eval_requests("validation", 5)
        for result in await arena.generate_rollouts(asked):
            assert result.rollout.error is None, f"{said[first:]!r:.2000}\n{result.rollout.error}"
            assert all(map(math.isfinite, result.rollout.rewards.values()))
        step += 1


PARSERS = (
    parse_route, parse_grid, parse_program, parse_verdict, parse_draft, parse_review, parse_line, parse_search_route,
    read_answer, normalize, KuhnRules().parse, NegotiationRules().parse, TicTacToeRules().parse,
    lambda text: parse_cases(text, 4), lambda text: read_problem(text, Size()),
    lambda text: extract_answer(f"#### {text}"), lambda text: answers_match(text, "1"),
)  # fmt: skip


@pytest.mark.parametrize(
    "part", [*REPEATED, "A", "1 - ", "```\n", "<think>", "a b: ", "f(1) == 1\n", "1 million ", "'"]
)
def test_no_parser_looks_at_a_long_text_more_than_a_few_times(part):
    """One that took the square of its length would be here for minutes: that is the failure, no clock is read."""
    for opening in ("", "[keep "):
        for parse in PARSERS:
            parse(opening + part * (20_000 // len(part)))
