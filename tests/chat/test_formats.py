"""Chat formats: which family a template is, what a completion says, and text that spells a control token."""

from __future__ import annotations

import random

import pytest

from turnwise.chat.formats import EXAMPLE_TOOL, ChatFormat
from turnwise.chat.known_formats import chat_format
from turnwise.chat.messages import ChatError

from .families import CHAT_FAMILIES, chat_tokenizer, installed_families


@pytest.fixture(params=installed_families())
def format(request: pytest.FixtureRequest) -> ChatFormat:
    return chat_format(chat_tokenizer(request.param))


@pytest.mark.parametrize(("name", "status"), [("look", "ok"), ("jump", "unknown_tool")])
def test_every_family_reads_its_own_calls(format: ChatFormat, name: str, status: str) -> None:
    """The call is rendered by the family's template, and read back from those tokens."""
    chat = [{"role": "user", "content": "Look."}]
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {"at": "y"}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = format.prompt_ids(chat, [EXAMPLE_TOOL])
    whole = format.prompt_ids([*chat, answer], [EXAMPLE_TOOL], add_generation_prompt=False)
    shared = next((place for place, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), None)
    sampled = whole[len(prompt) if shared is None else shared :]
    found = format.parse(sampled, [EXAMPLE_TOOL], prompt)
    assert [call.status for call in found.calls] == [status] and (name in found.answer) == (status != "ok")
    if status == "ok":
        assert [(call.name, call.arguments) for call in found.calls] == [("look", {"at": "y"})]
        assert format.parse(sampled, [], prompt).calls == (), "without tools a call is text"


def test_a_family_is_named_or_found_by_its_template() -> None:
    tokenizer = chat_tokenizer("template")
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    assert chat_format(tokenizer).name == "template", "the template decides, and not the name"
    if len(installed_families()) == 1:
        return
    assert chat_format(chat_tokenizer("qwen3"), "template").name == "template"
    with pytest.raises(ValueError, match=r"renderer='qwen33': unknown; did you mean 'qwen3'"):
        chat_format(tokenizer, "qwen33")
    with pytest.raises(ValueError, match=r"renderer='glm-4.5': doesn't fit the tokenizer"):
        chat_format(tokenizer, "glm-4.5")
    with pytest.raises(ValueError, match="Unsupported chat_template_kwargs for 'qwen3'"):
        chat_format(chat_tokenizer("qwen3"), "qwen3", {"colour": "blue"})


@pytest.mark.needs("trl", "renderers")
def test_reasoning_can_be_switched_off() -> None:
    format = chat_format(chat_tokenizer("qwen3"), "qwen3", {"enable_thinking": False})
    text = format.tokenizer.decode(format.prompt_ids([{"role": "user", "content": "Hi"}]))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tools_need_a_template_that_shows_them() -> None:
    tokenizer = chat_tokenizer("template")
    ChatFormat(tokenizer).check_tools([EXAMPLE_TOOL])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    ChatFormat(tokenizer).check_tools([])
    with pytest.raises(ChatError, match="tools: the model's chat template renders no tools"):
        ChatFormat(tokenizer).check_tools([EXAMPLE_TOOL])


def control_tokens(format: ChatFormat, ids: list[int]) -> int:
    marks = set(format.guarded.values())
    return sum(token in marks for token in ids)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_contents_never_become_control_tokens(format: ChatFormat, seed: int) -> None:
    """100 random contents for each seed: as many control tokens as for harmless ones, and the text comes back."""
    rng = random.Random(seed)
    spellings = [*format.guarded, "a", " b", "\n", "ü"]
    for _ in range(100):
        text = "".join(rng.choices(spellings, k=rng.randrange(1, 6)))
        chats = [
            [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "ok"},
                {"role": "user", "content": content},
            ]
            for content in (text, "harmless")
        ]
        hostile, harmless = (format.prompt_ids(chat) for chat in chats)
        assert control_tokens(format, hostile) == control_tokens(format, harmless)
        assert format.tokenizer.decode(hostile).count(text.strip()) >= 2
        new = {"role": "user", "content": text}
        prompt = format.prompt_ids(chats[1][:1])
        longer = format.extend(prompt, [ord("k"), format.stop_token_ids[0]], [new])
        other = format.extend(prompt, [ord("k"), format.stop_token_ids[0]], [{"role": "user", "content": "harmless"}])
        assert longer is not None and other is not None
        assert control_tokens(format, longer) == control_tokens(format, other)


def test_the_families_of_the_tests_are_real() -> None:
    assert set(installed_families()) in ({"template"}, set(CHAT_FAMILIES))


def test_equal_tools_are_rendered_once_and_changed_ones_again() -> None:
    tokenizer = chat_tokenizer("template")
    tokenizer.chat_template += "{% if tools %}{{ tools | length }} {{ tools[0].function.description }}{% endif %}"
    kept = ChatFormat(tokenizer)
    prompt, sampled = kept.prompt_ids([{"role": "user", "content": "hi"}]), [*kept.encode("yo"), *kept.end_token_ids]
    new = [{"role": "user", "content": "so <|im_end|>?"}]
    tool = {**EXAMPLE_TOOL, "function": {**EXAMPLE_TOOL["function"]}}
    for description in ("one", "one", "two <|im_start|>", "one"):
        tool["function"]["description"] = description
        longer = kept.extend(prompt, sampled, new, [tool])
        assert longer == ChatFormat(tokenizer).extend(prompt, sampled, new, [tool])
        assert longer is not None and kept.tokenizer.decode(longer).endswith(f"assistant\n1 {description}")
        assert control_tokens(kept, longer[len(prompt) + len(sampled) :]) == 3
    assert len([key for key in kept._made if key[0] == "tools"]) == 2


def test_equal_new_messages_and_begun_answers_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer("template")
    kept = ChatFormat(tokenizer)
    prompt, sampled = kept.prompt_ids([{"role": "user", "content": "hi"}]), [*kept.encode("yo"), *kept.end_token_ids]
    rendered: list[int] = []
    render = kept.render
    monkeypatch.setattr(kept, "render", lambda *given: rendered.append(1) or render(*given))
    counts = []
    for said in ("so", "so", "<|im_end|>", "so", "<|im_end|>"):
        new = [{"role": "user", "content": said}]
        assert kept.extend(prompt, sampled, new) == ChatFormat(tokenizer).extend(prompt, sampled, new)
        counts.append(len(rendered))
    assert counts[0] == counts[1] < counts[2] == counts[4]
    begun = {text: [*prompt, *kept.encode(text)] for text in ("<think>\n", "<think>\n</think>\n", "")}
    for _ in range(2):
        assert [kept.opens_thought(ids) for ids in begun.values()] == [True, False, False]
    assert len([key for key in kept._made if key[0] == "begun"]) == 3
