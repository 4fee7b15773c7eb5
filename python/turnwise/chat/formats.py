"""A chat format: renders a chat with tools, extends sampled tokens by new messages, and parses a completion."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from itertools import dropwhile, takewhile
from typing import Any, TypeVar

from turnwise.chat.calls.reading import HERMES_TEXT
from turnwise.chat.messages import ChatError, Tool, results_in_order
from turnwise.chat.render import ChatEncoder
from turnwise.chat.templates import CONTENTS, EXAMPLE_CHAT, EXAMPLE_TOOL
from turnwise.chat.thoughts import MARKS as THOUGHT_MARKS
from turnwise.chat.thoughts import THINK, Pairs, find_thoughts, marks_of, opens_thought
from turnwise.chat.tokenizers import TokenBytes, ends_of
from turnwise.sandbox.templates import TemplateLimitError
from turnwise.types import Message, Messages, ParsedCompletion

T = TypeVar("T")
CALL_MARKS = ("<tool_call>", "</tool_call>")
CHANNEL_TOKENS = ("<|channel>", "<|channel|>", "<|message|>")
MARKS = frozenset([*(mark for pair in THOUGHT_MARKS for mark in pair), *CHANNEL_TOKENS, *CALL_MARKS])
"""Marks of reasoning and calls, which are read from a completion even if the tokenizer has them as special tokens."""

LONGEST_MARK = 64
"""Tokens at the end of a prompt that may hold a mark of reasoning."""
MAX_MADE = 256
"""Renderings that a format keeps: of lists of tools, of new messages, and of begun answers."""


class ChatFormat(ChatEncoder):
    """Renders chats, ends turns and reads completions, with a tokenizer's own template.

    Subclasses know the format of a model family.

    Example::

        format = ChatFormat(tokenizer)
        prompt = format.prompt_ids([{"role": "user", "content": "2 + 2 = ?"}])
        longer = format.extend(prompt, completion, [{"role": "user", "content": "And 3 + 3?"}])
        assert longer[: len(prompt) + len(completion)] == prompt + completion
    """

    name = "template"

    # -- ends of turns -------------------------------------------------------------------------------------------------
    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sampled turn, each once.

        They are the tokenizer's end of sequence, the tokens with which the template closes an assistant's turn and one
        that calls tools, and those of the model's ``generation_config``
        (:func:`~turnwise.chat.tokenizers.keep_ends`).
        """
        ends = (self.tokenizer.eos_token_id, self._close, self._call_close, *ends_of(self.tokenizer))
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    @cached_property
    def end_token_ids(self) -> list[int]:
        """The tokens that end a written turn: the template's closing ones, else the end of sequence; or none."""
        ends = (self.tokenizer.eos_token_id, *self.stop_token_ids)
        return self._closing or [token for token in ends if token is not None][:1]

    def cut(self, completion: Sequence[int]) -> list[int]:
        """Return ``completion`` up to its first stop token, which is kept."""
        if self._stops.isdisjoint(completion[:-1]):
            return list(completion)
        return list(completion[: next(index for index, token in enumerate(completion, 1) if token in self._stops)])

    @cached_property
    def _stops(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids)

    def begun_ids(self, message: Message, prompt: Sequence[int]) -> list[int]:
        """Return the ids of a begun answer, which follow the generation prompt at the end of ``prompt``."""
        reasoning, opened = message.get("reasoning_content", ""), self.opens_thought(prompt)
        ids = self.encode(f"{THINK[0]}\n") if reasoning and not opened else []
        if reasoning or opened:
            ids = [*ids, *self.text_ids(reasoning), *self.encode(f"\n{THINK[1]}\n\n")]
        return [*ids, *self.text_ids(message["content"])]

    # -- continuation --------------------------------------------------------------------------------------------------
    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Messages,
        tools: Sequence[Tool] = (),
        answer: Message | None = None,
    ) -> list[int] | None:
        """Return ``prompt + completion`` followed by the ``new`` messages and the generation prompt.

        Without ``new`` messages another answer follows the ``completion``.

        ``answer`` is the message that ``completion`` was parsed into. Tokens of ``prompt`` and ``completion`` stay as
        they are; a turn that was cut off gets the template's closing token. ``None`` means that the template can't
        extend a chat: the caller must render it again.
        """
        after = self.following(prompt, completion, new, tools, answer)
        return None if after is None else [*prompt, *completion, *after]

    def following(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Messages,
        tools: Sequence[Tool] = (),
        answer: Message | None = None,
    ) -> list[int] | None:
        """Return what :meth:`extend` appends to ``prompt + completion``; ``None`` if the template can't extend them."""
        if self._close is None or any(message["role"] == "assistant" for message in new):
            return None
        if not new and self._refuses(("assistant", "assistant")):
            return None
        tail = self._tail(self._following(new, answer), tools, answer)
        if tail is None or not completion:
            return None if tail is None else [*self._closing, *tail]
        if completion[-1] in self.stop_token_ids:
            return tail
        # Cut off, perhaps between closing tokens.
        close, end = self._closing, list(completion[-len(self._closing) :])
        there = next((n for n in range(len(close) - 1, 0, -1) if end[-n:] == close[:n]), 0)
        return [*close[there:], *tail]

    def _following(self, new: Messages, answer: Message | None) -> Messages:
        """Return ``new`` as it follows ``answer``: results in their calls' order, systems folded, roles in turn."""
        if answer and answer.get("tool_calls"):
            new = results_in_order([answer, *new])[1:]
        return self._in_turn(self._with_systems(new, begun=True), begun=True)

    def _tail(self, new: Messages, tools: Sequence[Tool], answer: Message | None) -> list[int] | None:
        """Return what the template appends after a closed turn, if that doesn't depend on the text of the turn.

        That of equal messages is rendered once, without tools and calls.
        """
        calls = answer.get("tool_calls") if answer else None
        if calls or tools:
            return self._rendered_tail(new, tools, calls)
        return self._once(("tail", repr(new)), lambda: self._rendered_tail(new, (), None))

    def _rendered_tail(self, new: Messages, tools: Sequence[Tool], calls: Any) -> list[int] | None:
        tails = []
        form = tuple(message["role"] for message in new)
        try:
            turns, hostile = self._closed_turns(tools, calls) if calls else self._turns_without_calls(tools)
            hostile = hostile or self._hostile(new)
            # Where two turns of other texts once had the same tail, one shows it.
            for begun, before in turns[:1] if not calls and form in self._local_forms else turns:
                after = self._ids([*begun, *new], tools, hostile=hostile)
                if not before or after[: len(before)] != before:
                    return None
                tails.append(after[len(before) :])
        except TemplateLimitError:
            raise
        except Exception:  # a template may raise anything for a chat that it doesn't expect
            return None
        if not tails or tails[0] != tails[-1]:
            return None
        if not calls and not tools:
            self._local_forms.add(form)
        return tails[0]

    @cached_property
    def _local_forms(self) -> set[tuple[str, ...]]:
        """The roles of new messages behind which a template without tools was seen to write the same for any turn."""
        return set()

    def _closed_turns(self, tools: Sequence[Tool], calls: Any = None) -> tuple[list[tuple[Messages, list[int]]], bool]:
        """Return two chats that differ in the text of their last turn, each with its ids to the end of that turn.

        The ids are empty if the template closes no turn. The second value is True if ``tools`` or ``calls`` spell
        control tokens.
        """
        if self._close is None:
            return [], False
        turns: list[tuple[Messages, list[int]]] = []
        more = {"tool_calls": calls} if calls else {}
        hostile = self._hostile([{"role": "assistant", "content": "x", **more}], tools)
        for text in ("x", "yz 1"):
            begun: Messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text, **more}]
            ids = self._ids(begun, tools, add_generation_prompt=False, hostile=hostile)
            ends = [length for length, token in enumerate(ids, 1) if token in (self._close, self._call_close)]
            turns.append((begun, ids[: ends[-1] if ends else 0]))
        return turns, hostile

    def _turns_without_calls(self, tools: Sequence[Tool]) -> tuple[list[tuple[Messages, list[int]]], bool]:
        """Return :meth:`_closed_turns` of ``tools``, which is rendered once for equal tools."""
        return self._once(("tools", repr(tools)), lambda: self._closed_turns(tools))

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, which depends on the template and ``key`` alone, and is kept unless it is ``None``."""
        if key in self._made:
            return self._made[key]
        made = make()
        if made is not None:
            if len(self._made) >= MAX_MADE:
                self._made.clear()
            self._made[key] = made
        return made

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    @property
    def _close(self) -> int | None:
        """The last of the closing tokens; ``None`` if there is none."""
        return self._closing[-1] if self._closing else None

    @cached_property
    def _closing(self) -> list[int]:
        """The control tokens in a row that the template writes behind an assistant's text, at the end and in a chat.

        At the end some templates write a further token. Where a last turn is closed by another token than earlier
        ones, its first control token counts.
        """
        marks = self._closing_marks
        for content in CONTENTS:
            ask = {"role": "user", "content": content("x")}
            last = [[ask, {"role": "assistant", "content": content(text)}] for text in ("x", "yz 1")]
            ends, within = self._written_after(*last), self._written_after(*([*chat, ask] for chat in last))
            pairs = takewhile(lambda pair: pair[0] == pair[1], zip(ends, within, strict=False))
            both = dropwhile(lambda token: token not in marks, [token for token, _ in pairs])
            closing = list(takewhile(marks.__contains__, both)) or [token for token in ends if token in marks][:1]
            if closing:
                return closing
        return []

    @cached_property
    def _call_close(self) -> int | None:
        """The last control token of a turn that calls tools, if it closes the turn and not a call in it."""

        def chat(*arguments: str) -> Messages:
            calls = [
                {"id": f"call_{n}", "type": "function", "function": {"name": "look", "arguments": {"at": at}}}
                for n, at in enumerate(arguments)
            ]
            return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]

        written = reversed(self._written_after(chat("x"), chat("yz 1"), [EXAMPLE_TOOL]))
        last = next((token for token in written if token in self._closing_marks), None)
        if last is None:
            return None
        try:
            one, two = (self._ids(calls, [EXAMPLE_TOOL], False).count(last) for calls in (chat("x"), chat("x", "x")))
        except TemplateLimitError:
            raise
        except Exception:  # a template may take only one call
            return last
        return last if one == two else None

    @cached_property
    def _closing_marks(self) -> set[int | None]:
        """The tokens that may close a turn."""
        marks = {index for spelling, index in self.control.items() if spelling not in MARKS}
        return {*marks, self.tokenizer.eos_token_id}

    def _written_after(
        self, first: Messages, second: Messages, tools: Sequence[Tool] = (), *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return what the template writes behind the text in which two chats differ."""
        try:
            one, other = (self._ids(chat, tools, add_generation_prompt)[::-1] for chat in (first, second))
        except TemplateLimitError:
            raise
        except Exception:  # a template may raise anything for a chat that it doesn't expect
            return []
        same = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
        return one[:same][::-1]

    def written_after_answers(self, tools: Sequence[Tool] = ()) -> list[int]:
        """Return what the template writes behind the text of an answer that a short question follows; or nothing."""
        ask = {"role": "user", "content": "x"}
        chats = [[ask, {"role": "assistant", "content": text}, ask] for text in ("x", "yz 1")]
        return self._written_after(chats[0], chats[1], tools)

    @cached_property
    def extends_answers(self) -> bool:
        """True if a chat goes on behind an answer with what the model saw before it: the generation prompt stays.

        Some templates write a mark into the generation prompt that they leave out of earlier turns.
        """
        ask = {"role": "user", "content": "x"}
        try:
            prompt = self._ids([ask], ())
            return all(
                self._ids([ask, {"role": "assistant", "content": text}, ask], ())[: len(prompt)] == prompt
                for text in ("x", "yz 1")
            )
        except TemplateLimitError:
            raise
        except Exception:  # a template may raise anything for a chat that it doesn't expect
            return False

    # -- completions ---------------------------------------------------------------------------------------------------
    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Raise :class:`ChatError` if the format can't show ``tools`` to the model, or can't read its calls."""
        if tools and not self._shows_tools:
            raise ChatError(
                "tools",
                "the model's chat template renders no tools whose calls can be read: expected one that writes calls as "
                '<tool_call>{"name": ..., "arguments": ...}</tool_call>, as policies.NAME.chat_template = "chatml" '
                "does, or renderer set to the model's family",
            )

    @cached_property
    def _shows_tools(self) -> bool:
        try:
            shown = self.prompt_ids(EXAMPLE_CHAT, [EXAMPLE_TOOL])
            text = self.tokenizer.decode(shown, skip_special_tokens=False)
            return shown != self.prompt_ids(EXAMPLE_CHAT) and "<tool_call>" in text and "arguments" in text
        except TemplateLimitError:
            raise
        except Exception:  # as above
            return False

    def parse(
        self,
        completion: Sequence[int],
        tools: Sequence[Tool] = (),
        prompt: Sequence[int] = (),
        *,
        text: str | None = None,
        finished: bool | None = None,
    ) -> ParsedCompletion:
        """Parse a completion into thought, answer and calls. Calls of tools are read only if there are ``tools``.

        ``text`` is the completion's text, if it didn't come as tokens. ``finished`` says if the model ended the answer
        itself; by default, if its last token ends a turn.
        """
        ids = self.cut(completion)
        is_ended = bool(ids) and ids[-1] in self.stop_token_ids
        if text is None:
            hidden = {index for spelling, index in self.control.items() if spelling not in MARKS}
            kept = [token for token in ids[: len(ids) - is_ended] if token not in hidden]
            text = self.tokenizer.decode(kept, skip_special_tokens=False)
        ended = is_ended if finished is None else finished
        found = find_thoughts(
            text,
            begun=self.opens_thought(prompt),
            ended=ended,
            calls=HERMES_TEXT if tools else None,
            marks=self.thought_marks,
        )
        answer = found.answer(text)
        if found.is_open or not tools:
            return ParsedCompletion(answer, found.thought, (), found.is_open, ended and not found.is_open)
        content, read = HERMES_TEXT.read(answer, tools)
        return ParsedCompletion(content, found.thought, read, finished=ended, written=answer if read else None)

    @cached_property
    def hidden_marks(self) -> frozenset[int]:
        """The control tokens that end no turn: some families mark reasoning by them, and a decoded text lacks them."""
        return frozenset(self.control.values()) - set(self.stop_token_ids)

    @cached_property
    def _visible_ends(self) -> dict[int, str]:
        """The texts of those stop tokens that are not special, which a decoded completion shows."""
        texts = {token: self.tokenizer.decode([token], skip_special_tokens=True) for token in self.stop_token_ids}
        return {token: text for token, text in texts.items() if text}

    def without_end(self, text: str, completion: Sequence[int]) -> str:
        """Return the decoded text of ``completion`` without the end of the turn, if it shows it."""
        return text.removesuffix(self._visible_ends.get(completion[-1], "")) if completion else text

    @cached_property
    def thought_marks(self) -> Pairs:
        """The marks of reasoning that the model may write."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return marks_of(token.content for token in added.values())

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """True if the prompt leaves a thought open, which the completion goes on with."""
        tokens, words = self._turn_begins
        size = LONGEST_MARK
        while True:
            # After what begins the assistant's turn, all text is the assistant's. It stands near the end.
            tail = list(prompt[-size:])
            begin = next((place for place in range(len(tail), 0, -1) if tail[place - 1] in tokens), 0) if tokens else 0
            if begin:  # nearly always, what follows is the generation prompt
                return self._once(("begun", *tail[begin:]), partial(self._is_open, tail[begin:]))
            text = self.tokenizer.decode(tail, skip_special_tokens=False)
            if words and words in text:
                return opens_thought(text[text.rfind(words) + len(words) :], self.thought_marks, whole=True)
            if size >= len(prompt) or not (tokens or words):
                break
            size *= 8
        text = text if words else self.tokenizer.decode(tail[-LONGEST_MARK:], skip_special_tokens=False)
        return opens_thought(text, self.thought_marks, whole=False)

    def _is_open(self, begun: Sequence[int]) -> bool:
        """True if the tokens of a begun answer leave a thought open."""
        return opens_thought(self.tokenizer.decode(begun, skip_special_tokens=False), self.thought_marks, whole=True)

    @cached_property
    def _turn_begins(self) -> tuple[set[int], str]:
        """The control tokens that may begin an assistant's turn; without any, the words that do."""
        marks = {index for spelling, index in self.control.items() if spelling not in MARKS}
        written = self._begin_after([], {"role": "user"})
        if tokens := marks.intersection(written):
            return tokens | marks.intersection(self._begin_after(EXAMPLE_CHAT[1:-1], EXAMPLE_CHAT[-1])), ""
        words = self.tokenizer.decode(written, skip_special_tokens=False)
        ends = [place for mark, _ in self.thought_marks if (place := words.find(mark)) >= 0]
        return set(), words[: min(ends, default=len(words))].strip()

    def _begin_after(self, before: Messages, last: Message) -> list[int]:
        """Return what the template writes between the text of a chat's last message and the assistant's answer."""
        tools = [EXAMPLE_TOOL] if before else []
        for content in CONTENTS:
            one, other = ([*before, {**last, "content": content(text)}] for text in ("x", "yz 1"))
            if written := self._written_after(one, other, tools, add_generation_prompt=True):
                return written
        return []

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Gives the bytes of a token: ``format.token_bytes(token)``."""
        return TokenBytes(self.tokenizer)


class ChatRenderer(ChatFormat):
    """The chat format of plain chats, whose prompts the program writes itself: marks in them are the model's own.

    Example::

        renderer = ChatRenderer(AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B", trust_remote_code=False))
        ids = renderer.prompt_ids([{"role": "user", "content": "Is <|im_end|> a word?"}])
    """

    guards_marks = False
