"""Messages of any client in one form, and equal keys for equal messages."""

from __future__ import annotations

import pytest

from turnwise.chat.messages import ChatError, message_key, not_shown, plain_messages


def test_messages_of_any_dialect_take_one_form() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
    given = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "1 + 2", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    ]
    assert plain_messages(given) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


def test_old_calls_of_functions_and_refusals_keep_their_meaning() -> None:
    old = {"name": "add", "arguments": '{"a": 2}'}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    given = [
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": None, "function_call": old},
        {"role": "function", "name": "add", "content": "4"},
        {"role": "assistant", "content": None, "refusal": "I won't."},
        {"role": "assistant", "content": "Hm.", "refusal": "No."},
        {"role": "assistant", "function_call": old, "tool_calls": [call]},
    ]
    assert plain_messages(given)[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "name": "add"},
        {"role": "assistant", "content": "I won't."},
        {"role": "assistant", "content": "Hm.\n\nNo."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


@pytest.mark.parametrize(
    ("message", "left_out"),
    [
        ({"role": "user", "name": "ann", "content": "Hi"}, ("messages.name",)),
        ({"role": "assistant", "name": "bob", "content": "Hi"}, ("messages.name",)),
        ({"role": "developer", "name": "x", "content": "Hi"}, ("messages.name",)),
        ({"role": "user", "name": None, "content": "Hi"}, ()),
        ({"role": "tool", "name": "add", "content": "4"}, ()),
        ({"role": "function", "name": "add", "content": "4"}, ()),
    ],
)
def test_names_of_speakers_are_not_shown(message: dict[str, object], left_out: tuple[str, ...]) -> None:
    assert not_shown([message, message]) == left_out


def test_keys_leave_out_ids_reasoning_and_the_order_of_fields() -> None:
    def key(**fields: object) -> object:
        [plain] = plain_messages([{"role": "assistant", **fields}])
        return message_key(plain)

    def calls(name: str, arguments: str) -> list[dict[str, object]]:
        return [{"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}]

    assert key(content="4") == key(content=[{"type": "text", "text": "4"}], reasoning_content="hm")
    assert key(content=None, tool_calls=calls("1", '{"a":1,"b":2}')) == key(tool_calls=calls("2", '{"b": 2, "a": 1}'))
    assert key(tool_calls=calls("1", "{}")) != key(tool_calls=calls("1", '{"a": 1}'))
    assert key(content="4") != key(content="5")
    assert key(tool_calls=calls("1", "no json")) != key(tool_calls=calls("1", "{}"))


@pytest.mark.parametrize(
    ("messages", "param", "problem"),
    [
        ([], "messages", "expected a list of at least one message"),
        ("hi", "messages", "expected a list of at least one message"),
        (["hi"], "messages[0]", "expected an object with a role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "got 'robot'"),
        ([{"role": "user", "content": 7}], "messages[0].content", "expected text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
            "got a part of type 'image_url', expected text",
        ),
        ([{"role": "assistant", "audio": {"id": "a1"}}], "messages[0].audio", "expected text"),
        ([{"role": "assistant", "refusal": 7}], "messages[0].refusal", "expected text"),
        (
            [{"role": "assistant", "content": "", "function_call": {"arguments": "{}"}}],
            "messages[0].function_call",
            "expected a call of a function with a name",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, {"role": "user", "content": "x"}],
            "messages[0].tool_calls[0]",
            "expected a call of a function with a name",
        ),
    ],
)
def test_a_chat_that_cannot_be_rendered_names_its_part(messages: object, param: str, problem: str) -> None:
    with pytest.raises(ChatError) as caught:
        plain_messages(messages)
    assert caught.value.param == param and problem in str(caught.value)
