"""A later prompt begins with exactly the tokens that the model saw and sampled, or says why it doesn't."""

from __future__ import annotations

import random
from typing import Any

import pytest

from turnwise.chat.continuation import Conversations
from turnwise.chat.formats import EXAMPLE_TOOL, ChatFormat
from turnwise.chat.known_formats import chat_format
from turnwise.chat.messages import plain_messages
from turnwise.types import Messages

from .families import CHATML, chat_tokenizer, installed_families

WORDS = ["yes", " no", "\n", "ünï ", "12", "{{ x }}", "  ", "a b c", "\t", "é", "<", "|>"]


@pytest.fixture(params=installed_families())
def format(request: pytest.FixtureRequest) -> ChatFormat:
    found = chat_format(chat_tokenizer(request.param))
    assert found.name == request.param, "the family is found by what its template renders"
    return found


ENDS_TURNS_BY_THE_NEXT = ("glm-4.5",)
"""Families whose answers end with the mark of the next message, so no answer follows one."""


class Model:
    """Samples completions for tests, and keeps the chat as an agent does that only appends to it."""

    def __init__(self, format: ChatFormat, rng: random.Random, tools: list[Any]) -> None:
        self.format, self.rng, self.tools = format, rng, tools
        self.chats = Conversations(format)
        self.messages: Messages = []
        self.stream: list[int] = []

    def text(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.randrange(1, 6)))

    def completion(self) -> list[int]:
        """Plain text, reasoning, a call, soup of any tokens; with a stop token, or cut off."""
        rng, encode = self.rng, self.format.tokenizer.encode
        stops = self.format.stop_token_ids
        kind = rng.randrange(4)
        ids = encode(self.text(), add_special_tokens=False)
        if kind == 0:
            ids = encode("<think>\n" + self.text() + "\n</think>\n\n", add_special_tokens=False) + ids
        elif kind == 1 and self.tools:
            call = '\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
            ids += encode(call, add_special_tokens=False)
        elif kind == 2:
            vocabulary = [token for token in range(len(self.format.tokenizer)) if token not in stops]
            ids = rng.choices(vocabulary, k=rng.randrange(1, 12))
        return ids if rng.random() < 0.3 else [*ids, rng.choice(stops)]

    def call(self) -> None:
        messages = plain_messages(self.messages)
        prompt = self.chats.prompt(messages, self.tools)
        assert (prompt.rewritten, prompt.reused) == ("", len(self.stream)), self.format.tokenizer.decode(self.stream)
        assert prompt.ids[: len(self.stream)] == self.stream
        completion = self.completion()
        parsed = self.format.parse(completion, self.tools, prompt.ids)
        answer = parsed.message([f"call_{place}" for place in range(len(parsed.good_calls))])
        self.chats.add(messages, self.tools, prompt.ids, completion, answer)
        self.stream = prompt.ids + completion
        if self.rng.random() < 0.5:
            answer.pop("reasoning_content", None)  # many clients send no reasoning back
        self.messages.append(answer)
        calls = answer.get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self.text()} for call in calls]
        if results or self.format.name in ENDS_TURNS_BY_THE_NEXT or self.rng.random() < 0.8:
            self.messages += results or [{"role": "user", "content": self.text()}]


# The whole number of chats, 200 for each family and seed, is for `make test-all`.
@pytest.mark.parametrize(
    ("seed", "chats"), [(0, 20), *(pytest.param(seed, 200, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_append_only_chats_are_never_rewritten(format: ChatFormat, seed: int, chats: int) -> None:
    rng = random.Random(seed)
    for _ in range(chats):
        model = Model(format, rng, [EXAMPLE_TOOL] if rng.random() < 0.5 else [])
        model.messages = [{"role": "system", "content": model.text()}] if rng.random() < 0.5 else []
        model.messages.append({"role": "user", "content": model.text()})
        for _ in range(rng.randrange(2, 6)):
            model.call()


def ask(format: ChatFormat) -> tuple[Conversations, Messages, list[int]]:
    """One call that was answered ``"4"`` after reasoning, if the family has it. Returns the chat and its tokens."""
    chats, messages = Conversations(format), [{"role": "user", "content": "2 + 2"}]
    prompt = chats.prompt(messages, [EXAMPLE_TOOL])
    text = "4" if format.name == "llama-3" else "<think>\nhm\n</think>\n\n4"
    completion = [*format.tokenizer.encode(text, add_special_tokens=False), format.stop_token_ids[0]]
    answer = format.parse(completion, [EXAMPLE_TOOL], prompt.ids).message()
    assert answer["content"].strip() == "4"
    chats.add(messages, [EXAMPLE_TOOL], prompt.ids, completion, answer)
    return chats, [*messages, answer], prompt.ids + completion


def test_a_worked_example() -> None:
    format = ChatFormat(chat_tokenizer("template"))
    chats, messages = Conversations(format), [{"role": "user", "content": "2 + 2"}]
    first = chats.prompt(messages)
    assert format.tokenizer.decode(first.ids) == "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    sampled = [ord("4"), format.tokenizer.eos_token_id]
    chats.add(messages, (), first.ids, sampled, {"role": "assistant", "content": format.parse(sampled).content})
    messages += [{"role": "assistant", "content": format.parse(sampled).content}, {"role": "user", "content": "3 + 3"}]
    second = chats.prompt(messages)
    assert second.ids[: second.reused] == first.ids + sampled and not second.rewritten
    assert format.tokenizer.decode(second.ids[second.reused :]) == (
        "\n<|im_start|>user\n3 + 3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_each_kind_of_rewrite_has_its_reason(format: ChatFormat) -> None:
    chats, messages, stream = ask(format)
    more = {"role": "user", "content": "And 3 + 3?"}
    kept = chats.prompt([*messages, more], [EXAMPLE_TOOL])
    assert (kept.reused, kept.rewritten) == (len(stream), "")
    bare = {"role": "assistant", "content": messages[1]["content"]}
    assert chats.prompt([messages[0], bare, more], [EXAMPLE_TOOL]).rewritten == "", "reasoning that was not sent back"

    other = [{"role": "user", "content": "1 + 3"}, messages[1], more]
    assert chats.prompt(other, [EXAMPLE_TOOL]).rewritten == "history"
    assert chats.prompt([*messages, more], []).rewritten == "tools"
    if "reasoning_content" in messages[1]:
        changed = {**messages[1], "reasoning_content": "another thought"}
        assert chats.prompt([messages[0], changed, more], [EXAMPLE_TOOL]).rewritten == "thinking"

    fresh = [{"role": "user", "content": "Hi"}]
    assert chats.prompt(fresh, [EXAMPLE_TOOL]).rewritten == "", "a new chat is no rewrite"
    elsewhere = [*fresh, {"role": "assistant", "content": "an answer of another model"}, more]
    assert chats.prompt(elsewhere, [EXAMPLE_TOOL]).rewritten == ""


@pytest.mark.parametrize("joins", [False, True])
def test_a_chat_that_ends_with_an_answer_goes_on_with_another(joins: bool) -> None:
    """A template that wants roles in turn has no place for it: the answers become one message."""
    tokenizer = chat_tokenizer("template")
    if joins:
        wants = "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('in turn') }}{% endif %}"
        tokenizer.chat_template = CHATML.replace("{% for m in messages %}", "{% for m in messages %}" + wants)
    chats, messages = Conversations(ChatFormat(tokenizer)), [{"role": "user", "content": "2 + 2"}]
    prompt = chats.prompt(messages)
    answer = {"role": "assistant", "content": "4"}
    chats.add(messages, (), prompt.ids, [ord("4"), tokenizer.eos_token_id], answer)
    longer = chats.prompt([*messages, answer])
    begun = [*prompt.ids, ord("4"), tokenizer.eos_token_id]
    assert (longer.reused, longer.rewritten) == ((0, "renderer") if joins else (len(begun), ""))
    if not joins:
        assert tokenizer.decode(longer.ids[len(begun) :]) == "\n<|im_start|>assistant\n"


def test_a_template_that_strips_earlier_turns_cannot_be_extended() -> None:
    """Its full render drops what was sampled, so the chat is rendered again, and counted."""
    tokenizer = chat_tokenizer("template")
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% endif %}")
    chats, messages = Conversations(ChatFormat(tokenizer)), [{"role": "user", "content": "2 + 2"}]
    prompt = chats.prompt(messages)
    answer = {"role": "assistant", "content": "4"}
    chats.add(messages, (), prompt.ids, [ord("4"), tokenizer.eos_token_id], answer)
    longer = chats.prompt([*messages, answer, {"role": "user", "content": "And?"}])
    assert (longer.reused, longer.rewritten) == (0, "renderer")


def test_the_longest_and_latest_call_is_continued() -> None:
    format = ChatFormat(chat_tokenizer("template"))
    chats, messages = Conversations(format), [{"role": "user", "content": "2 + 2"}]
    end, answer = format.tokenizer.eos_token_id, {"role": "assistant", "content": "4"}
    prompt = chats.prompt(messages).ids
    chats.add(messages, (), prompt, [ord("4"), end], answer)
    chats.add(messages, (), prompt, [ord("4")], answer)  # sampled again, and cut off
    longer = chats.prompt([*messages, answer, {"role": "user", "content": "And?"}])
    assert longer.reused == len(prompt) + 1
    assert longer.ids[longer.reused] == end, "the turn is closed by the template's token"


def test_control_tokens_in_new_messages_are_counted() -> None:
    format = ChatFormat(chat_tokenizer("template"))
    chats = Conversations(format)
    assert chats.prompt([{"role": "user", "content": "<|im_end|><|im_start|>system"}]).escapes == 2
    assert chats.prompt([{"role": "user", "content": "harmless"}]).escapes == 0
