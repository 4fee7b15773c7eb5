"""Calls as each family writes them: what goes into an argument comes out, or the call has a status."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from turnwise.chat.calls.families import READERS
from turnwise.chat.calls.values import kinds_of, typed
from turnwise.chat.known_formats import KnownFormat, families
from turnwise.types import OK, ParsedCompletion

from .families import MARKS_OF, all_families, kind_tokenizer

TEXTS = [
    *("", " ", "\n", "\n\n", "    return x\n", "a\n\n", "\ta", "a\r\n", "ü🙂 \u2028", "&lt;", "%s {x} {{y}}", "a;b"),
    *(
        "7",
        "007",
        "1e5",
        "true",
        "null",
        "None",
        "True",
        "NaN",
        "1e999",
        "[1]",
        '{"a": 1}',
        '"quoted"',
        "\\n",
        'a\\"b',
        "```",
    ),
]
SCHEMAS: dict[str, tuple[Any, list[Any]]] = {
    "text": ({"type": "string"}, TEXTS),
    "count": ({"type": "integer"}, [0, -3, 10**18]),
    "share": ({"type": "number"}, [0.5, -1e-7, 2.0]),
    "flag": ({"type": "boolean"}, [True, False]),
    "items": ({"type": "array"}, [[], ["a\n", {"b": [1, None, True, "</x>"]}], [[[]]]]),
    "map": ({"type": "object"}, [{}, {"a": {"b": {"c": [1.5, "ü\n  "]}}}, {"1": "2", " k": "v "}]),
    "maybe": ({"type": "string", "nullable": True}, ["a\n", "buy milk", "7", None, "", "{"]),
    "either": ({"type": ["boolean", "string"]}, [True, False, "maybe", "7", " x", "[1]"]),
    "number_or_text": ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, [7, "noon", "true", "07", " 7", "[1]"]),
    "any": ({}, ["a", 7, [1], {"a": 1}, " x\n", True, None]),
    "choice": ({"enum": ["x", 1]}, ["x", 1]),
    "named": ({"$ref": "#/$defs/Name"}, ["7", "true"]),
}
VALUES = {f"{kind}_{n}": value for kind, (_, values) in SCHEMAS.items() for n, value in enumerate(values)}
TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "x",
        "parameters": {
            "type": "object",
            "properties": {
                **{f"{kind}_{n}": schema for kind, (schema, values) in SCHEMAS.items() for n in range(len(values))},
                **{f"mark_{n}": {"type": "string"} for n in range(99)},
            },
            "$defs": {"Name": {"type": "string"}},
        },
    },
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(params=all_families())
def format(request: pytest.FixtureRequest) -> KnownFormat:
    return KnownFormat(kind_tokenizer(all_families()[request.param]), request.param)


def written(format: KnownFormat, *calls: dict[str, Any], hostile: bool = False) -> tuple[list[int], list[int]]:
    """Return the prompt and the completion with calls of ``edit``, as the family's template writes them.

    ``hostile`` means that marks in the arguments are no tokens.
    """
    made = [
        {"id": f"functions.edit:{n}", "type": "function", "function": {"name": "edit", "arguments": arguments}}
        for n, arguments in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": "So.", "reasoning_content": "hm", "tool_calls": made}
    prompt = format.prompt_ids([USER], [TOOL])
    render = format._ids if hostile else lambda *chat: format.render(format.tokenizer, *chat)
    whole = render([USER, answer], [TOOL], False)
    same = next((n for n, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    return prompt if same == len(prompt) else [], whole[same:]


def read(format: KnownFormat, *calls: dict[str, Any], hostile: bool = False) -> ParsedCompletion:
    prompt, completion = written(format, *calls, hostile=hostile)
    return format.parse(completion, [TOOL], prompt)


def marks(format: KnownFormat) -> list[str]:
    """The family's marks but those that end its turn, and a call as the family writes it, whole and in two parts."""
    _, completion = written(format, {"mark_0": "x"})
    reader, stops = format._reader, [format.tokenizer.decode([token]) for token in format.stop_token_ids]
    assert reader is not None
    shown = reader.text_of([token for token in completion if token not in format.stop_token_ids])
    text = reader.plain(shown[reader.opening.search(shown).start() :]).replace("So.", "")  # type: ignore[union-attr]
    begin = text.index("x", text.index("mark_0"))
    return [mark for mark in [*MARKS_OF[all_families()[format.name]], text, text[begin + 1 :]] if mark not in stops]


def test_every_family_has_its_reader() -> None:
    if all_families():
        assert set(READERS) == set(families()) - {"gpt-oss"} == set(all_families())


def test_what_goes_in_comes_out(format: KnownFormat) -> None:
    calls = [VALUES] if format.name == "llama-3" else [VALUES, {}, {"text_0": "a\n"}]
    parsed = read(format, *calls)
    assert [(call.status, call.arguments, call.problem) for call in parsed.calls] == [(OK, one, "") for one in calls]
    shown, expected = (json.dumps(one, sort_keys=True) for one in (parsed.calls[0].arguments, VALUES))
    assert shown == expected, "types too: 1 is not True"
    assert parsed.answer == ("" if format.name == "llama-3" else "So.")


@pytest.mark.parametrize("hostile", [False, True], ids=["tokens", "text"])
def test_marks_in_a_text_are_text(format: KnownFormat, hostile: bool) -> None:
    spelled = [mark for mark in marks(format) if '<|"|>' not in mark]  # Gemma's end of a text has no other spelling
    texts = [text for mark in spelled for text in (mark, f"see {mark} here\n")]
    if format.name in ("minimax-m2", "deepseek-v4"):  # an end and a beginning in one text have two readings
        texts = [text for text in texts if "edit" not in text or text.startswith("see")]
    for some in (texts[:90], texts[90:]):
        arguments = {f"mark_{n}": text for n, text in enumerate(some)}
        parsed = read(format, arguments, hostile=hostile)
        assert [(call.status, call.problem, call.arguments) for call in parsed.calls] == [(OK, "", arguments)]


def ran(format: KnownFormat, text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a completion with a text, by their status."""
    prompt = format.prompt_ids([USER], [TOOL])
    opened = "x</think>" if format.opens_thought(prompt) else ""
    ids = [*format.encode(opened + text), format.stop_token_ids[0]]
    return [(call.status, call.arguments) for call in format.parse(ids, [TOOL], prompt).calls]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_texts_of_marks_come_out_or_have_a_status(format: KnownFormat, seed: int) -> None:
    rng, spelled = random.Random(seed), marks(format)
    pieces = [*spelled, *re.findall(r"<[^<>]*>|[^<>]+", spelled[-2]), "<think>", "</think>", "a", "\n", " b "]
    # Two arguments, and the end of Gemma's text: nothing says that these are part of a text.
    has_two_readings = re.compile(r"</parameter>\s*<parameter|<\|\"\|>")
    for number in range(6 if seed == 0 else 30):
        texts = ["".join(rng.choices(pieces, k=rng.randrange(1, 6))) for _ in range(2)]
        if any(map(has_two_readings.search, texts)):
            continue
        calls = [{"mark_0": texts[0]}, {"mark_1": texts[1], "mark_2": "z\n"}][: 1 if format.name == "llama-3" else 2]
        found = read(format, *calls, hostile=bool(number % 2)).calls
        assert found and all(call.status != OK or call.arguments in calls for call in found), texts
        assert all(call.problem for call in found if call.status != OK)


QWEN = "<tool_call>\n<function=edit>\n{}</function>\n</tool_call>"
ONE = "<parameter={}>\n{}\n</parameter>\n"
GLM = "<tool_call>edit{}</tool_call>"
PAIR = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"
GOOD = (OK, {"mark_0": "x"})
FORMS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("qwen3.6", QWEN.format("<parameter=mark_0>x</parameter>"), [GOOD]),
    ("qwen3.6", QWEN.format(ONE.format("mark_0", "x")).replace("</function>\n", ""), [GOOD]),
    ("qwen3.6", QWEN.format(""), [(OK, {})]),
    ("qwen3.6", f"{QWEN.format(ONE.format('mark_0', 'x'))} and {QWEN.format('')}", [GOOD, (OK, {})]),
    ("qwen3.6", QWEN.format(ONE.format("count_0", " 7 ")), [(OK, {"count_0": 7})]),
    ("qwen3.6", QWEN.format(ONE.format("flag_0", "True")), [(OK, {"flag_0": True})]),
    ("qwen3.6", QWEN.format(ONE.format("count_0", "seven")), [("invalid_json", {"count_0": "seven"})]),
    ("qwen3.6", QWEN.format(ONE.format("mark_0", "x") * 2), [("malformed_structure", {})]),
    ("qwen3.6", QWEN.format("<parameter=mark_0>\nx\n" + ONE.format("mark_1", "y")), [("malformed_structure", {})]),
    ("qwen3.6", QWEN.format("<parameter=mark_0>\nx\n"), [("unclosed_block", {})]),
    ("qwen3.6", "<tool_call>\nedit x\n</tool_call>", [("malformed_structure", {})]),
    ("qwen3.6", "<tool_call>\nedit x", [("unclosed_block", {})]),
    ("qwen3.6", QWEN.format(ONE.format("mark_0", "x")).replace("edit", "jump"), [("unknown_tool", {"mark_0": "x"})]),
    ("glm-5", GLM.format(PAIR.format("mark_0", "x")), [GOOD]),
    ("glm-5", GLM.format(""), [(OK, {})]),
    ("glm-5", GLM.format("<arg_value>x</arg_value>"), [("malformed_structure", {})]),
    ("glm-5", GLM.format("<arg_key>mark_0</arg_key><arg_value>x"), [("unclosed_block", {})]),
    (
        "glm-5",
        GLM.format("<arg_key>mark_0</arg_key><arg_value>x" + PAIR.format("mark_1", "y")),
        [("malformed_structure", {})],
    ),
    ("minimax-m2", '<invoke name="edit"></invoke>', []),
    ("minimax-m2", "<minimax:tool_call>\n</minimax:tool_call>", [("malformed_structure", {})]),
    ("minimax-m2", '<minimax:tool_call><invoke name="edit"></invoke></minimax:tool_call>', [(OK, {})]),
    ("llama-3", '{"name": "edit", "parameters": {"mark_0": "x"}}', [GOOD]),
    ("llama-3", '<|python_tag|>{"name": "edit", "parameters": {"mark_0": "x"}}', [GOOD]),
    ("llama-3", '{"name": "edit", "arguments": {"mark_0": "x"}}; {"name": "edit", "args": {}}', [GOOD, (OK, {})]),
    (
        "llama-3",
        '{"name": "edit", "parameters": {"mark_0": "x"}}\n{"name": "edit", "parameters": null}',
        [GOOD, (OK, {})],
    ),
    ("llama-3", '{"name": "edit", "parameters": {"mark_0": "x",}}', [("invalid_json", {})]),
    ("llama-3", "<|python_tag|>edit.call(1)", [("invalid_json", {})]),
    ("llama-3", '{"name": "edit", "mark_0": "x"}', [("malformed_structure", {})]),
    ("llama-3", '{"name": "Bob", "age": 3}', []),
    ("llama-3", '{"age": 3', []),
    ("kimi-k2", "<|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|><|tool_call_end|>", [(OK, {})]),
    ("kimi-k2", "<|tool_call_begin|>functions.edit:0<|tool_call_end|>", [("malformed_structure", {})]),
    ("deepseek-v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit<｜tool▁call▁end｜>", [(OK, {})]),
    ("gemma4", '<|tool_call>call:edit{mark_0:<|"|>x<|"|>,mark_1:<|"|>y}<tool_call|>', [("unclosed_block", {})]),
    ("gemma4", "<|tool_call>call:edit{mark_0}<tool_call|>", [("invalid_json", {})]),
]


@pytest.mark.needs("renderers")
@pytest.mark.parametrize(("family", "text", "calls"), FORMS)
def test_what_models_write_is_read_or_has_a_status(
    family: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    assert ran(KnownFormat(kind_tokenizer(all_families()[family]), family), text) == calls


@pytest.mark.parametrize(
    ("text", "schema", "value", "fits"),
    [
        ("7", {"type": "string"}, "7", True),
        ("7", {"type": ["integer", "string"]}, 7, True),
        ("07", {"type": ["integer", "string"]}, "07", True),
        ("7.5", {"type": ["integer", "string"]}, "7.5", True),
        ("7", {"type": ["number", "null"]}, 7, True),
        ("null", {"type": "string", "nullable": True}, None, True),
        ("null", {"type": "string"}, "null", True),
        ("maybe", {"oneOf": [{"type": "string"}, {"type": "boolean"}]}, "maybe", True),
        ("maybe", {"type": "boolean"}, "maybe", False),
        ("[1]", {"anyOf": [{"type": "array"}, {"type": "string"}]}, [1], True),
        ("[1]", {"allOf": [{"type": "string"}]}, "[1]", True),
        ('"7"', {}, '"7"', True),
        ("1e999", {}, "1e999", True),
        ("7", {"anyOf": [{"type": "string"}, {}]}, 7, True),
        ("x", {"const": 1}, "x", False),
        ("7", {"type": "varchar"}, 7, True),
    ],
)
def test_a_text_has_the_type_of_its_schema(text: str, schema: Any, value: Any, fits: bool) -> None:
    found = typed(text, kinds_of(schema, {}))
    assert (found, type(found[0])) == ((value, fits), type(value))


@pytest.mark.needs("renderers")
def test_llama_shows_each_of_several_calls_with_its_result() -> None:
    format = KnownFormat(kind_tokenizer("llama"), "llama-3")
    calls = [{"id": name, "function": {"name": "edit", "arguments": {"text_0": name}}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"done {name}"} for name in "ba"]
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results, USER]
    shown = format.tokenizer.decode(format.prompt_ids(chat, [TOOL])).split("<|eot_id|>")[2:6]
    assert [text.rpartition("\n\n")[2] for text in shown] == [
        '{"name": "edit", "parameters": {"text_0": "a"}}',
        '"done a"',
        '{"name": "edit", "parameters": {"text_0": "b"}}',
        '"done b"',
    ]
