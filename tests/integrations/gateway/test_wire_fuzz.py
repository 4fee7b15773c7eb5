"""Random damage to requests of all dialects: each one is parsed, or refused with a sentence."""

from __future__ import annotations

import copy
import json
import random

import pytest

from turnwise.chat.messages import ChatError
from turnwise.integrations.gateway.wire import anthropic_messages, openai_chat, openai_responses
from turnwise.integrations.gateway.wire.request import Earlier, WireError

from .helpers import ADD

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "solver",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ],
    "tools": [ADD],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}},
    "n": 2,
    "stop": ["x"],
    "seed": 7,
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "metadata": {"turn": "1"},
    "max_tokens": 9,
    "logit_bias": {},
}
RESPONSES = {
    "model": "solver",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ],
    "tools": [{"type": "function", **ADD["function"]}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "text": {"format": {"type": "json_schema", "name": "sum", "schema": {"type": "object"}}, "verbosity": "low"},
    "previous_response_id": "resp_1",
    "reasoning": {},
    "max_output_tokens": 9,
}
MESSAGES = {
    "model": "solver",
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "y"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "4"}]}],
        },
    ],
    "tools": [{"name": "add", "input_schema": ADD["function"]["parameters"]}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "thread": {"type": "continue", "previous_message_id": "msg_1"},
    "max_tokens": 9,
}
EARLIER = Earlier({"1": ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], [])})
EARLIER.answers["c"] = {"role": "assistant", "content": "hm"}
WHOLE = {
    "chat": (openai_chat, CHAT),
    "responses": (openai_responses, RESPONSES),
    "messages": (anthropic_messages, MESSAGES),
}
VALUES = [
    None,
    True,
    0,
    -1,
    2.5,
    10**30,
    float("inf"),
    "",
    "x",
    "\ud800",
    [],
    [None],
    [[]],
    ["x"],
    {},
    {"type": "x"},
    [{}],
]


def places(value, path=()):
    """Return the paths of all parts of ``value``."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in parts for place in places(part, (*path, key)))]


def damaged(body, rng):
    """Return a copy of ``body`` in which one to three parts are another value, or gone."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        *path, key = rng.choice([place for place in places(body) if place])
        holder = body
        for step in path:
            holder = holder[step]
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        if not body:
            return body
    return body


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_damaged_request_is_parsed_or_refused(name, seed):
    dialect, body = WHOLE[name]
    rng, parsed = random.Random(seed), 0
    for _ in range(1500):
        given = damaged(body, rng)
        try:
            ask = dialect.parse(copy.deepcopy(given), EARLIER)
        except (WireError, ChatError) as error:
            assert str(error)
            continue
        except Exception as error:
            raise AssertionError(f"{given}: {type(error).__name__}: {error}") from error
        parsed += 1
        # What was parsed can be rendered and compared.
        json.dumps([ask.messages, ask.tools, ask.instructions(), ask.readable_tools])
        assert all(isinstance(message["content"], str) for message in ask.messages)
        assert isinstance(ask.model, str) and 1 <= ask.n <= 16
    assert parsed > 50
