"""Calls in a completion: what the model wrote, and the reason why a call can't be read."""

from __future__ import annotations

import pytest

from turnwise.chat.calls.reading import HERMES_TEXT
from turnwise.chat.formats import EXAMPLE_TOOL
from turnwise.types import ParsedCompletion

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


def test_a_call_and_its_text() -> None:
    content, calls = HERMES_TEXT.read(f"Let me see.\n{CALL}", [EXAMPLE_TOOL])
    assert (content, [call.name for call in calls]) == ("Let me see.", ["look"])
    assert ParsedCompletion(content, calls=calls).message(["call_7"])["tool_calls"] == [
        {"id": "call_7", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    ]


@pytest.mark.parametrize(
    ("written", "status"),
    [
        ('<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>', "ok"),
        ('<tool_call>{"name": "look", "arguments": "{\\"at\\": \\"x\\"}"}</tool_call>', "ok"),
        ('<tool_call>{"name": "look"}</tool_call>', "ok"),
        ('<tool_call>{"name": "look", "arg', "unclosed_block"),
        ("<tool_call>look(x)</tool_call>", "invalid_json"),
        ('<tool_call>{"name": "look", "arguments": "at x"}</tool_call>', "invalid_json"),
        ('<tool_call>["look"]</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "malformed_structure"),
        ('<tool_call>{"arguments": {}}</tool_call>', "missing_name"),
        ('<tool_call>{"name": "jump", "arguments": {}}</tool_call>', "unknown_tool"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "invalid_json"),
        ('<tool_call>{"name": "look", "at": "x"}</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "look", "arguments": {}, "args": {}}</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "look", "input": {"at": "x"}}</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "look", "arguments": {"at": "x", "at": "y"}}</tool_call>', "invalid_json"),
        ('<tool_call>{"name": "look", "arguments": {}}}</tool_call>', "invalid_json"),
        ('<tool_call>{"name": "look", "arguments": {"n": NaN}}</tool_call>', "malformed_structure"),
    ],
)
def test_a_call_that_cannot_be_read_stays_text(written: str, status: str) -> None:
    content, calls = HERMES_TEXT.read(f"See: {written}", [EXAMPLE_TOOL])
    assert [call.status for call in calls] == [status]
    assert (written in content) == (status != "ok")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"parameters": {"at": "x"}', {"at": "x"}),
        ('"args": {"at": "x"}, "id": "call_7", "type": "function"', {"at": "x"}),
        ('"arguments": ""', {}),
        ('"arguments": null', {}),
        ('"parameters": "null"', {}),
        ('"arguments": " "', {}),
        ('"arguments": {"at": "a </tool_call> b"}', {"at": "a </tool_call> b"}),
        ('"arguments": {"at": "<tool_call>{}</tool_call> <think>"}', {"at": "<tool_call>{}</tool_call> <think>"}),
        ('"arguments": "{\\"at\\": \\"</tool_call>\\"}"', {"at": "</tool_call>"}),
    ],
)
def test_arguments_stand_under_several_keys_and_may_spell_marks(written: str, arguments: dict[str, str]) -> None:
    call = f'<tool_call>\n{{"name": "look", {written}}}\n</tool_call>'
    content, calls = HERMES_TEXT.read(f"a{call} b{call}", [EXAMPLE_TOOL])
    assert [(found.status, found.arguments, found.raw) for found in calls] == [("ok", arguments, call)] * 2
    assert content == "a b"


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        ('<tool_call>{"name": "look"}<tool_call>{"name": "look"}</tool_call>', ["unclosed_block", "ok"]),
        # In a broken object, the mark may be part of a text that was not meant to run.
        (
            '<tool_call>{"name": "look", "arguments": {"at": "<tool_call>{"name": "look"}</tool_call>"}}</tool_call>',
            ["invalid_json"],
        ),
    ],
)
def test_what_follows_a_broken_call(text: str, statuses: list[str]) -> None:
    content, calls = HERMES_TEXT.read(text, [EXAMPLE_TOOL])
    assert [call.status for call in calls] == statuses
    assert all(call.raw in content and call.problem for call in calls if call.status != "ok")
