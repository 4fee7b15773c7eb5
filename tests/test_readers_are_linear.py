"""Readers of what models write take time in proportion to its length, on texts that are written to take more."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from turnwise.arena import read_choice, read_number
from turnwise.arena.runtime import private_text
from turnwise.chat.calls.families import READERS
from turnwise.chat.calls.reading import json_at
from turnwise.chat.formats import EXAMPLE_TOOL
from turnwise.chat.messages import results_in_order
from turnwise.chat.thoughts import find_thoughts, spoken
from turnwise.tasks.code_duel.scoring import parse_program
from turnwise.tasks.gsm8k.reader import extract_answer
from turnwise.tasks.proposer_solver.arithmetic import Size, read_problem

CPU_SECONDS = 10
"""Hundreds of times what the readers take. The kernel ends a process that takes more."""


def calls(family: str, text: str) -> None:
    reader = READERS[family]()
    reader.read(text, [EXAMPLE_TOOL])
    find_thoughts(text, calls=reader)
    find_thoughts(f"<think>{text}", calls=reader)


def hidden(text: str) -> None:
    private_text.hidden_parts(f"{text} b", f"{text[: len(text) // 2]} c")


def results(text: str) -> None:
    """A chat with a call and a result for each character."""
    ids = [f"call_{place}" for place in range(len(text))]
    chat = [{"role": "assistant", "content": "", "tool_calls": [{"id": name} for name in ids]}]
    assert results_in_order([*chat, *({"role": "tool", "tool_call_id": name, "content": ""} for name in ids)])


CALL = "<tool_call>\n<function=look>\n<parameter=at>x</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>look<arg_key>at</arg_key><arg_value>"
CASES: dict[str, tuple[Callable[[str], Any], int, tuple[str, ...]]] = {
    "choice": (
        read_choice,
        50_000,
        ("<", "[[", "# ", "★ ", "A>", "A = ", "prefer A ", "A is better ", "tie ", "\n#", "A is far ", "verdict: A\n"),
    ),
    "choice in a word": (lambda text: read_choice(f"A{text}b"), 50_000, ("_", "'", "*_", " ", "a")),
    "number": (read_number, 4_000, ("1 ", "1,", "1,000 ", "(1", "5\n", "1-", "1.", "from 1 ", "out of ", "1 000 ")),
    "number behind": (lambda text: read_number(f"Score: 5{text}x"), 100_000, (" ", "\t\u00a0", "1", "-", ".", "=")),
    "spoken": (spoken, 200_000, ("<think>", "</think>", "<think>a</think>", "<tool_call>", "◁think▷")),
    "qwen3": (
        partial(calls, "qwen3"),
        200_000,
        ("<tool_call>", "<tool_call>{}x", "<tool_call>{", "<tool_call>{}</tool_call>", "<tool_call><think>"),
    ),
    "qwen3.5": (
        partial(calls, "qwen3.5"),
        100_000,
        (CALL, "<tool_call>", "<tool_call>\n<function=look>\n<parameter=at>", "</parameter></tool_call>"),
    ),
    "glm-4.5": (
        partial(calls, "glm-4.5"),
        100_000,
        (GLM, "<tool_call>look", "</arg_value> ", "<tool_call></tool_call>"),
    ),
    "kimi-k2": (partial(calls, "kimi-k2"), 200_000, ("<|tool_call_begin|>", "<|tool_call_begin|>a.a.")),
    "llama-3": (partial(calls, "llama-3"), 100_000, ('{"name":"look","parameters":{}};', "; ", "{")),
    "gemma4": (partial(calls, "gemma4"), 100_000, ("<|tool_call>call:look{", '<|"|>', "{a", "{,")),
    "JSON": (
        lambda text: json_at("{" + ",".join(f'"k{n}":1' for n in range(len(text))) + ',"k9":2}', 0),
        100_000,
        (" ",),
    ),
    "results": (results, 100_000, ("x",)),
    "hidden words": (hidden, 200_000, ("a ", "a b ")),
    "hidden tags": (private_text._parts_of, 200_000, ("<a>", "[a]", "<aa>b", "a!")),
    "a statement": (lambda text: private_text.is_stated(text, "one two three"), 200_000, ("\n", "one two\n")),
    "an answer": (extract_answer, 100_000, ("1,000", "1,0000", "1/", "+ ", "1 ")),
    "a program": (parse_program, 200_000, ("```", "```\n", "```a")),
    "a problem": (lambda text: read_problem(text, Size()), 100_000, ("(", "(1\n", "1+")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reader_ends(name: str) -> None:
    read, size, units = CASES[name]
    for unit in units:
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            with contextlib.suppress(ValueError):
                read(unit * (size // len(unit)))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, f"{unit!r} took more than {CPU_SECONDS} s"


@pytest.mark.parametrize("text", ["Score: 1e999", "1e400", "Score: -1e999"])
def test_a_score_is_finite(text: str) -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        read_number(text)
