"""A completion's thought, answer and calls: what begins and ends a thought, in every family, finished and cut."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from turnwise.arena.runtime.model_call import with_parse
from turnwise.chat import ChatRenderer
from turnwise.chat.formats import EXAMPLE_TOOL, ChatFormat
from turnwise.chat.known_formats import chat_format
from turnwise.chat.thoughts import CALL_MARKS, find_thoughts, spoken
from turnwise.types import FinishReason, ModelRequest, ModelResponse, Sampling

from .families import byte_tokenizer, chat_tokenizer, installed_families

CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
MARKED = '<tool_call>{"name": "look", "arguments": {"at": "a </think> b <think> c"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("4", "", "4"),
        ("<think>\nhm\n</think>\n\n4", "hm", "4"),
        (" <think>hm</think>4", "hm", " 4"),
        ("<think>a</think>4, or <think>b</think>5", "a\n\nb", "4, or 5"),
        ("<think>a</think>b</think>4", "a\n\nb", "4"),
        ("a</think>4", "a", "4"),
        ("4 </think>", "", "4 </think>"),
        ("<think>hm, 4", "hm, 4", None),
        ("<think>a</think>4 <think>or 5", "a\n\nor 5", None),
        ("Write the <think> tag.", "", "Write the <think> tag."),
        ("<think>a <think> b</think>4", "a <think> b", "4"),
        ("<think></think>4", "", "4"),
        ("", "", ""),
    ],
)
def test_the_thought_and_the_answer_of_a_text(text: str, thought: str, answer: str | None) -> None:
    found = find_thoughts(text)
    assert (found.thought, found.answer(text), found.is_open) == (thought, answer or "", answer is None)
    assert spoken(text) == (answer or "")


@pytest.mark.parametrize(
    ("text", "answer"), [("hm</think>4", "4"), ("hm <think> 4", None), ("<think>hm</think>4", "4")]
)
def test_the_prompt_began_the_thought(text: str, answer: str | None) -> None:
    found = find_thoughts(text, begun=True)
    assert (found.answer(text), found.is_open) == (answer or "", answer is None)


@pytest.mark.parametrize("text", ["4 <think>or", "4</think>", "<think>4", "<thi", " <"])
def test_a_cut_text_that_may_be_a_thought_has_no_answer(text: str) -> None:
    assert find_thoughts(text, ended=False).answer(text) == ""


def test_marks_in_a_call_are_text() -> None:
    text = f"<think>a</think>So: {MARKED} done <think>b</think>"
    found = find_thoughts(text, calls=CALL_MARKS)
    assert (found.thought, found.answer(text)) == ("a\n\nb", f"So: {MARKED} done ")
    assert found.answer_without_calls(text) == "So:  done "


def test_a_call_without_an_end_hides_no_thought() -> None:
    text = "<think>a</think>I may <tool_call> it. <think>b <tool_call> c</think>4"
    found = find_thoughts(text, calls=CALL_MARKS)
    assert (found.thought, found.answer(text)) == ("a\n\nb <tool_call> c", "I may <tool_call> it. 4")
    assert found.answer_without_calls(text) == "I may "
    assert find_thoughts(text[:50], calls=CALL_MARKS, ended=False).is_open


@pytest.fixture(params=installed_families())
def format(request: pytest.FixtureRequest) -> ChatFormat:
    return chat_format(chat_tokenizer(request.param))


def written_call(format: ChatFormat) -> str:
    """Return a call as the family's template writes it."""
    chat = [{"role": "user", "content": "Look."}]
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"at": "y"}}}
    ids = format.prompt_ids([*chat, {"role": "assistant", "content": "", "tool_calls": [call]}], [EXAMPLE_TOOL])
    text = format.tokenizer.decode(ids, skip_special_tokens=False)
    begin = text.rindex("<tool_call>" if "</tool_call>" in text else '{"name": "look"')
    return (
        text[begin : text.index("</tool_call>", begin) + 12]
        if "</tool_call>" in text
        else text[begin : text.index("<|", begin)]
    )


@pytest.mark.parametrize(
    ("text", "ended", "thought", "answer", "calls"),
    [
        ("a</think>\n\n4", True, "a", "4", 0),
        ("a {call} b</think>\n\n4", True, "a {call} b", "4", 0),
        ("a</think>\n\nSo. <think>b {call} c</think>\n\n4", True, None, "So. 4", 0),
        ("a</think>\n\n{call}", True, "a", "", 1),
        ("a</think>\n\nSo {call}", True, "a", "So", 1),
        ("a {call} b", False, "a {call} b", None, 0),
        ("a {call}", False, "a {call}", None, 0),
        ("a {call}", True, "a", "", 1),
        ("a, so 4", True, "a, so 4", None, 0),
        ("a</think>\n\n4 <think>b {call}", False, None, None, 0),
        ("a</think>\n\n4", False, "a", "4", 0),
    ],
)
def test_no_family_reads_an_answer_or_a_call_in_a_thought(
    format: ChatFormat, text: str, ended: bool, thought: str | None, answer: str | None, calls: int
) -> None:
    call = written_call(format)
    if not call.startswith("<tool_call>") and ended and answer != "4":
        return  # this family's calls have no marks, so one at the end of a thought is part of it
    prompt = format.prompt_ids([{"role": "user", "content": "Say <think>."}], [EXAMPLE_TOOL])
    begun = "" if format.opens_thought(prompt) else "<think>"
    ids = format.encode(begun + text.replace("{call}", call))
    found = format.parse([*ids, format.stop_token_ids[0]] if ended else ids, [EXAMPLE_TOOL], prompt)
    assert [one.status for one in found.calls] == ["ok"] * calls
    assert (" ".join(found.answer.split()), found.in_thought) == (answer or "", answer is None)
    assert found.finished == (ended and answer is not None)
    if thought is not None:
        assert found.thought.strip() == thought.replace("{call}", call).strip()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("opens", [False, True])
def test_marks_count_whether_or_not_the_tokenizer_hides_them(special: bool, opens: bool) -> None:
    tokenizer = chat_tokenizer("template")
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in ("<think>", "</think>")])
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}" if opens else ""
    format = ChatRenderer(tokenizer)
    prompt = format.prompt_ids([{"role": "user", "content": "Think in <think>."}])
    assert format.opens_thought(prompt) == opens
    ids = [*format.encode(("" if opens else "<think>") + "my secret</think>B"), *format.end_token_ids]
    found = format.parse(ids, (), prompt)
    assert (found.thought, found.answer) == ("my secret", "B")
    assert format.parse(ids[:3], (), prompt).in_thought


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nBEGUN{% endif %}",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: BEGUN{% endif %}",
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}BEGUN{% endif %}",
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\nBEGUN{% endif %}",
)
"""Templates whose turns begin with a control token, and with plain text; the last two end turns with one."""


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("begun", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_a_prompt_leaves_a_thought_open_in_the_assistants_turn_alone(turns: str, begun: str) -> None:
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|image_pad|>"]
    format = ChatRenderer(byte_tokenizer("", special, [], chatml=turns.replace("BEGUN", begun)))
    opens = begun == "<think>\n"
    ask = {"role": "user", "content": "Begin with <think>."}
    for chat in (
        [ask],
        [ask, {"role": "assistant", "content": "<think>a"}, {"role": "user", "content": "Use <think>"}],
    ):
        prompt = format.prompt_ids(chat)
        assert format.opens_thought(prompt) == opens
        # The assistant's turn goes on, with a token in it that begins no turn.
        thought = format.encode(("" if opens else "<think>") + "a thought that is <|image_pad|> longer than its mark")
        assert format.opens_thought([*prompt, *thought])
        assert not format.opens_thought([*prompt, *thought, *format.encode("</think>4, a longer answer")])


@pytest.mark.parametrize(
    ("marks", "written"),
    [
        (("<|channel>", "<channel|>"), "<|channel>thought\nsecret<channel|>4"),
        (("<|channel|>", "<|message|>"), "<|channel|>analysis<|message|>secret<|channel|>final<|message|>4"),
        (("<|channel|>", "<|message|>"), "<|channel|>final<|message|>4"),
        (("[THINK]", "[/THINK]"), "[THINK]secret[/THINK]4"),
        (("◁think▷", "◁/think▷"), "◁think▷secret◁/think▷4"),
        (("<seed:think>", "</seed:think>"), "<seed:think>secret</seed:think>4"),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_no_part_of_a_thought_is_an_answer_wherever_it_is_cut(
    marks: tuple[str, ...], written: str, special: bool
) -> None:
    tokenizer = chat_tokenizer("template")
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    format = ChatRenderer(tokenizer)
    ids = format.encode(written)
    for end in range(1, len(ids)):
        assert answer_of(format, ids[:end], "length") == ""
    assert answer_of(format, [*ids, *format.end_token_ids], "stop") == "4"


def answer_of(format: ChatFormat, ids: list[int], reason: FinishReason) -> str:
    """Return the answer in a response whose text lacks what the tokenizer hides, as an engine's does."""
    text = format.tokenizer.decode(ids, skip_special_tokens=True)
    response = ModelResponse(text, ids, [0.0] * len(ids), reason, [(len(ids), 0)])
    return with_parse(response, ModelRequest([], Sampling(), "default"), format).text


def test_an_answer_without_marks_is_an_answer_in_every_family(format: ChatFormat) -> None:
    """Some families' own parsers take it for a thought, as their templates let the model open one."""
    prompt = format.prompt_ids([{"role": "user", "content": "2 + 2?"}])
    begun = "hm</think>" if format.opens_thought(prompt) else ""
    found = format.parse([*format.encode(f"{begun}4"), format.stop_token_ids[0]], (), prompt)
    assert (found.answer.strip(), found.in_thought) == ("4", False)
