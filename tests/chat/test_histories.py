"""An answer may come back with other white space or its stop string; every other change of a history is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from turnwise.chat.continuation import Conversations, Prompt
from turnwise.chat.formats import EXAMPLE_TOOL, ChatFormat
from turnwise.chat.messages import plain_messages
from turnwise.types import Message, Messages

from .families import chat_tokenizer

FORMAT = ChatFormat(chat_tokenizer("template"))
STOP = "</code>"
LONG = "Thought: I look it up, and then I come back with what I found."


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def calling(arguments: str, text: str | None = "") -> Message:
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return said(text, tool_calls=[call])


@dataclass
class Session:
    """Asks and keeps what was sampled, as a session of the gateway does."""

    chats: Conversations = field(default_factory=lambda: Conversations(FORMAT))
    sampled: list[str] = field(default_factory=list)
    """The text of each call's prompt and completion."""

    def ask(self, messages: Messages, text: str = "4", stop: str = "", tools: Any = ()) -> tuple[Prompt, Message]:
        """Answer a chat with ``text``, which ends after ``stop``, and return the prompt and what the agent gets."""
        messages = plain_messages(messages)
        prompt = self.chats.prompt(messages, tools)
        ids = [*FORMAT.encode(text + stop), *([] if stop else [FORMAT.tokenizer.eos_token_id])]
        parsed = FORMAT.parse(ids, tools, prompt.ids)
        answer = {**parsed.message([f"call_{n}" for n in range(len(parsed.good_calls))])}
        answer["content"] = answer["content"].partition(stop)[0] if stop else answer["content"]
        self.chats.add(messages, tools, prompt.ids, ids, answer, stop=stop)
        self.sampled.append(FORMAT.tokenizer.decode([*prompt.ids, *ids]))
        return prompt, answer

    def reasons(self, edit: Callable[[Messages], Messages], text: str, stop: str = "", turns: int = 4) -> list[str]:
        """Return each prompt's reason, ``"first"`` or ``"extended"``, in a chat that the agent edits before a call."""
        chat, reasons = [user("hi")], []
        for turn in range(turns):
            prompt, answer = self.ask(chat := edit(chat), text, stop)
            reasons.append(prompt.rewritten or ("extended" if prompt.reused else "first"))
            chat = [*chat, answer, user(f"go on {turn}")]
        return reasons


def edited(change: Callable[[str], str], which: slice = slice(None)) -> Callable[[Messages], Messages]:
    """Return an agent that changes each new answer, of those in ``which``."""

    def edit(chat: Messages) -> Messages:
        place = len(chat) - 2
        if place < 0 or place not in range(len(chat))[which]:
            return chat
        return [*chat[:place], {**chat[place], "content": change(chat[place]["content"])}, chat[-1]]

    return edit


FIRST, ALL, ONE = slice(1, 2), ["history"] * 3, ["history", "extended", "extended"]
NONE = ["extended"] * 3


@pytest.mark.parametrize(
    ("edit", "text", "stop", "expected"),
    [
        # What is declared equal.
        (edited(str), "4", "", NONE),
        (edited(str.strip), "\n It is 4.\n", "", NONE),
        (edited(lambda text: f" {text}\n"), "4", "", NONE),
        (edited(lambda text: ""), " \n", "", NONE),
        (edited(str), "x <code>y", STOP, NONE),
        (edited(lambda text: text + STOP), "x <code>y", STOP, NONE),
        (edited(lambda text: f"\n{text.strip()}\n{STOP}\n"), "x <code>y\n", STOP, NONE),
        # What is counted, once for each change.
        (edited(lambda text: text.replace("Thought: ", "")), "Thought: x", "", ALL),
        (edited(lambda text: text + "!", FIRST), "4", "", ONE),
        (edited(lambda text: text + "!", FIRST), LONG, "", ONE),
        (edited(lambda text: text + STOP), "x <code>y", "", ALL),
        (edited(lambda text: text + "</other>"), "x <code>y", STOP, ALL),
        (edited(lambda text: "\n".join(map(str.rstrip, text.split("\n")))), "a \nb", "", ALL),
        (edited(lambda text: text.replace("\r\n", "\n")), "a\r\nb", "", ALL),
        (edited(lambda text: text[:20] + "..."), LONG, "", ALL),
        (lambda chat: [user(f"The time is {len(chat)}"), *chat[-3:]], LONG, "", ALL),
        (lambda chat: [{"role": "system", "content": f"Call {len(chat)}"}, *chat[chat[0]["role"] == "system" :]],
         "4", "", ALL),
        (lambda chat: [{**m, "content": "cut"} if m is not chat[-1] and m["role"] == "user" else m for m in chat],
         "4", "", ALL),
        (lambda chat: chat[-3:], "4", "", ["extended", "history", "history"]),
    ],
    ids=[
        "unchanged", "stripped", "padded", "empty", "stop absent", "stop put back", "stop in white space",
        "shortened", "first one", "first of long ones", "a stop that was not sampled", "another stop", "lines trimmed",
        "line ends", "cut", "turns summarised", "a clock", "old results cut", "sliding window",
    ],
)  # fmt: skip
def test_each_change_of_a_history(edit: Any, text: str, stop: str, expected: list[str]) -> None:
    session = Session()
    session.ask([user("another chat")], "something else", STOP)  # the session knows the stop string
    assert session.reasons(edit, text, stop) == ["first", *expected]


@pytest.mark.parametrize(
    ("back", "expected"),
    [
        ([calling('{"at": "x", "n": 1}')], ""),
        ([calling('{ "n":1.0,\n"at":"\\u0078" }', None)], ""),
        ([calling('{"at": "y", "n": 1}')], "history"),
        ([calling('{"at": "x"}')], "history"),
        ([said("look"), calling('{"at": "x", "n": 1}')], "history"),
        ([said('look("x")')], "history"),
    ],
    ids=["equal", "written again", "another value", "one left out", "two messages", "as text"],
)
def test_arguments_are_equal_by_value(back: Messages, expected: str) -> None:
    session, chat = Session(), [user("hi")]
    call = '<tool_call>{"name": "look", "arguments": {"n": 1, "at": "x"}}</tool_call>'
    _, answer = session.ask(chat, call, tools=[EXAMPLE_TOOL])
    assert answer["tool_calls"][0]["function"]["arguments"] == {"n": 1, "at": "x"}
    results = [{"role": "tool", "tool_call_id": "call_0", "content": "4"}] if "tool_calls" in back[-1] else []
    prompt, answer = session.ask([*chat, *back, *results, user("so?")], tools=[EXAMPLE_TOOL])
    assert (prompt.rewritten, prompt.reused > 0) == (expected, not expected)
    following, _ = session.ask([*chat, *back, *results, user("so?"), answer, user("x")], tools=[EXAMPLE_TOOL])
    assert (following.rewritten, following.reused > 0) == ("", True), "one change is counted once"


@pytest.mark.parametrize(
    ("back", "expected"),
    [
        (said("4"), ""),
        (said("4", reasoning_content=" hm\n"), ""),
        (said("<think>\nhm\n</think>\n\n4"), ""),
        (said("<think>ha</think>4"), "thinking"),
        (said("4", reasoning_content="ha"), "thinking"),
        (said("hm\n\n4"), "history"),
    ],
)
def test_reasoning_may_stay_out_or_come_as_text(back: Message, expected: str) -> None:
    session = Session()
    session.ask([user("hi")], "<think>hm</think>4")
    prompt, _ = session.ask([user("hi"), back, user("so?")])
    assert prompt.rewritten == expected


def test_examples_of_the_agents_own_are_no_rewrite() -> None:
    session, system = Session(), {"role": "system", "content": "Answer with a number."}
    examples = [system, user("1 + 3"), said("4"), user("1 + 4"), said("5")]
    _, answer = session.ask([*examples, user("2 + 2")], "4")
    for question in ("3 + 1", "2 + 3"):
        prompt, _ = session.ask([*examples, user(question)], "5")
        assert (prompt.rewritten, prompt.reused) == ("", 0)
    prompt, _ = session.ask([*examples, user("2 + 2"), answer, user("Sure?")], "yes")
    assert prompt.reused
    assert session.ask([user("Other examples"), said("yes"), user("2 + 3"), said("4"), user("?")])[0].rewritten == ""
    changed = [*examples, user("2 + 2"), said("5"), user("Sure?")]
    assert session.ask(changed)[0].rewritten == session.ask(changed)[0].rewritten == "history"


def test_results_cut_behind_an_answer_that_is_kept_are_counted() -> None:
    """The beginning of the chat is a call's, and what comes after it isn't."""
    session, chat = Session(), [user("hi")]
    for text in ("a", "b", "c"):
        _, answer = session.ask(chat, text)
        chat = [*chat, answer, user("result of " + text)]
    shorter = [*chat[:2], user("result..."), *chat[3:]]
    prompt, _ = session.ask(shorter, "d")
    assert (prompt.rewritten, prompt.reused) == ("history", 0)
    prompt, _ = session.ask([*chat[:4], user("another way")], "e")
    assert prompt.rewritten == "" and prompt.reused, "another branch is a continuation"


def test_tools_that_changed_in_between_are_counted_once() -> None:
    session, chat = Session(), [user("hi")]
    reasons = []
    for tools in ([], [EXAMPLE_TOOL], [EXAMPLE_TOOL], []):
        prompt, answer = session.ask(chat, tools=tools)
        reasons.append(prompt.rewritten)
        chat = [*chat, answer, user("go on")]
    assert reasons == ["", "tools", "", "tools"]


def test_of_equal_answers_the_one_that_was_sent_back_goes_on() -> None:
    chats, ids = Conversations(FORMAT), FORMAT.prompt_ids([user("hi")])
    for mark, (text, reasoning) in enumerate([("4\n", "a"), ("4", "a"), ("4", "b"), (" 4", "b")]):
        answer = said(text, reasoning_content=reasoning)
        chats.add([user("hi")], (), ids, FORMAT.encode(f"<think>{reasoning}</think>{text}"), answer, mark)
    marks = {
        ("4\n", "a"): 0,
        ("4", "a"): 1,
        ("4", "b"): 2,
        ("4", ""): 2,
        ("4\n", ""): 0,
        ("  4", ""): 3,
        (" 4", "a"): 1,
    }
    for (text, reasoning), mark in marks.items():
        back = said(text, reasoning_content=reasoning) if reasoning else said(text)
        assert chats.prompt([user("hi"), back, user("so?")]).continues == mark, (text, reasoning)


# -- any edits ---------------------------------------------------------------------------------------------------------
WORDS = ["a", " b", "\n", "  ", "1", "\r\n", STOP, "é", "<code>"]


def random_edit(rng: random.Random, text: str, stop: str) -> tuple[str, bool]:
    """Return a text that comes back for a ``text`` that was sampled before ``stop``; True if it is declared equal."""
    kind = rng.randrange(8)
    if kind < 5:
        shown = rng.choice([text.strip(), text.strip() + rng.choice(["", "\n"]) + stop])
        return rng.choice(["", " ", "\n"]) + shown + rng.choice(["", " ", "\n\t"]), True
    changed = rng.choice([text + STOP + STOP, text + "!", "!" + text, text.replace("a", "A"), text[: len(text) // 2]])
    return changed, changed.strip() == text.strip()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_what_is_reused_was_sampled_and_reads_as_the_agents_chat(seed: int) -> None:
    rng = random.Random(seed)
    counted = 0
    for _ in range(60):
        session, chat, written = Session(), [user("hi")], [user("hi")]
        intact = True
        for turn in range(5):
            stop = rng.choice(["", STOP])
            text = "".join(rng.choices(WORDS[:6] if stop else WORDS, k=rng.randrange(5)))
            prompt, _ = session.ask(chat, text, stop)
            assert bool(turn) == bool(prompt.reused or prompt.rewritten), "each later chat is one or the other"
            assert (prompt.rewritten == "history") == (not intact)
            if prompt.rewritten:
                written = list(chat)  # the model was shown what the agent sent
            else:
                start = FORMAT.tokenizer.decode(prompt.ids[: prompt.reused])
                assert start in ["", *session.sampled[:-1]], "what is reused was seen and sampled"
                # The template's text of the chat with each equal answer as it was sampled; cut turns get their end.
                assert FORMAT.tokenizer.decode(prompt.ids) == FORMAT.tokenizer.decode(FORMAT.prompt_ids(written))
            back, intact = random_edit(rng, text, stop)
            counted += not intact
            more = user(f"go on {turn}")
            chat = [*chat, said(back), more]
            written = [*written, said(text + stop if intact else back), more]
    assert counted > 40
