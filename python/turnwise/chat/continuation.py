"""Continues chats on the sampled tokens, so that a later prompt begins with exactly what the model saw and wrote.

Where a chat is rendered again, :class:`Anchors` renders only what is behind its latest answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.chat.formats import ChatFormat
from turnwise.chat.histories import Histories, SampledCall
from turnwise.chat.messages import ChatError, Tool, characters
from turnwise.sandbox.templates import TemplateLimitError
from turnwise.types import Message, Messages
from turnwise.types.prompts import GIVEN, Prefix, as_tokens

REASONS = ("history", "tools", "output", "thinking", "renderer")
"""Reasons why a prompt doesn't continue the sampled tokens although the chat holds an answer of this session.
``history``: earlier messages were changed. ``tools``: other tools than before. ``output``: another form of the answer
than the one that the model was shown. ``thinking``: the reasoning that was sent back is not the sampled one.
``renderer``: the format can't extend this chat."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one call. ``reused`` counts its first tokens that an earlier call of the session saw or sampled.

    ``rewritten`` is one of :data:`REASONS`, or ``""``.
    """

    ids: Prefix[int]
    reused: int = 0
    rewritten: str = ""
    escapes: int = 0
    """Control tokens that the new messages spell, which became text."""
    continues: Any = None
    """The ``mark`` of the call that the chat continues."""
    chat: Prefix[Message] = field(default_factory=lambda: Prefix.of_messages([]))
    """The messages; those of an earlier call are shared with it."""


class LongChatError(Exception):
    """Raised for a chat that is too long to be rendered as a whole here."""


class Conversations:
    """The calls of one actor in one session: finds the call that a chat continues, and extends its tokens.

    A chat continues the longest earlier chat that it begins with, the answer included; among equal ones, the latest.
    :class:`~turnwise.chat.histories.Histories` lists the changes of an answer that don't count.

    Example::

        chats = Conversations(format)
        prompt = chats.prompt(messages)
        chats.add(messages, (), prompt.ids, completion_ids, answer)
        longer = chats.prompt([*messages, answer, {"role": "user", "content": "Go on."}])
        assert longer.ids[: longer.reused] == prompt.ids + completion_ids
    """

    def __init__(self, format: ChatFormat) -> None:
        self.format = format
        self._histories = Histories()

    def new_characters(self, messages: Messages) -> int:
        """Return the length of the messages behind those of an earlier chat."""
        return characters(messages[self._histories.known(messages) :])

    def prompt(
        self,
        messages: Messages,
        tools: Sequence[Tool] = (),
        form: str = "",
        request: str = "",
        *,
        continues_answer: bool = False,
        most: float = math.inf,
    ) -> Prompt:
        """Return the token ids of a chat of plain messages, see :func:`~turnwise.chat.messages.plain_messages`.

        ``form`` is an instruction for the whole chat, and becomes part of its system message. ``request`` is one for
        this answer alone, and comes last. With ``continues_answer``, a chat that ends with the assistant's message is
        continued in that message. Raises :class:`LongChatError` if the whole chat must be rendered and has ``most``
        characters or more.
        """
        if messages[-1]["role"] != "assistant" or not continues_answer:
            length, call, rewritten = self._histories.find(messages, list(tools))
            prompt = self._prompt(messages, tools, form, request, (length, call, rewritten), most)
            return replace(prompt, chat=_shared(messages, length - 1, call))
        if messages[-1].get("tool_calls"):
            raise ChatError("messages", "the last message calls tools: expected their results")
        length, whole, _ = self._histories.find(messages, list(tools))
        same = whole is not None and whole.answer["content"] == messages[-1]["content"] and not whole.stop
        if whole is not None and length == len(messages) and same and whole.form == form and not request:
            # The agent lets the model go on with its answer.
            ended = whole.completion[-1:] and whole.completion[-1] in self.format.stop_token_ids
            ids = whole.prompt.followed(whole.completion[:-1] if ended else whole.completion, [], GIVEN)
            return Prompt(ids, len(ids), continues=whole.mark, chat=Prefix.of_messages(messages))
        before = messages[:-1] or [{"role": "user", "content": ""}]
        prompt = self._prompt(before, tools, form, request, self._histories.find(before, list(tools)), most)
        begun = self.format.begun_ids(messages[-1], prompt.ids)
        return replace(prompt, ids=prompt.ids.followed([], begun, GIVEN), chat=Prefix.of_messages(messages))

    def _prompt(
        self,
        messages: Messages,
        tools: Sequence[Tool],
        form: str,
        request: str,
        found: tuple[int, SampledCall | None, str],
        most: float,
    ) -> Prompt:
        asked = [{"role": "system", "content": request}] if request else []

        def whole() -> Prefix[int]:
            if most < math.inf and characters(messages) >= most:
                raise LongChatError
            lead = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
            shown = [{"role": "system", "content": form}] if form else []
            chat = [*messages[:lead], *shown, *messages[lead:], *asked]
            return Prefix(None, 0, as_tokens(self.format.prompt_ids(chat, tools)), GIVEN)

        length, call, rewritten = found
        new = messages[length:]
        escapes = self.format.escapes(new)
        if call is None:
            return Prompt(whole(), 0, rewritten, escapes)
        if not rewritten and call.form not in ("", form):
            rewritten = "output"
        if rewritten:
            return Prompt(whole(), 0, rewritten, escapes, call.mark)
        shown = [{"role": "system", "content": form}] if form != call.form else []
        sent = messages[length - 1].get("tool_calls")  # the client's ids of the calls, which the results have
        answer = {**call.answer, "tool_calls": sent} if sent else call.answer
        after = self.format.following(call.prompt, call.completion, [*new, *shown, *asked], tools, answer)
        if after is not None:
            ids = call.prompt.followed(call.completion, after, GIVEN)
            return Prompt(ids, len(call.prompt) + len(call.completion), "", escapes, call.mark)
        ids, seen = whole(), [*call.prompt, *call.completion]
        if ids[: len(seen)] == seen:
            return Prompt(ids, len(seen), "", escapes, call.mark)
        return Prompt(ids, 0, "renderer", escapes, call.mark)

    def add(
        self,
        messages: Messages,
        tools: Sequence[Tool],
        prompt: Sequence[int],
        completion: Sequence[int],
        answer: Message,
        mark: Any = None,
        *,
        form: str = "",
        stop: str | None = None,
        chat: Prefix[Message] | None = None,
    ) -> None:
        """Keep a finished call, so that later chats may continue it; their prompts have its ``mark``.

        ``messages``, ``tools`` and ``form`` are those of :meth:`prompt`. ``stop`` is the stop string that ended the
        completion, and that ``answer`` lacks. ``chat`` is that of the :class:`Prompt`.
        """
        kept_prompt = prompt if isinstance(prompt, Prefix) else Prefix(None, 0, as_tokens(prompt), GIVEN)
        call = SampledCall(kept_prompt, list(completion), answer, list(tools), form, (stop or "").strip(), mark, chat)
        self._histories.add(messages, call)


def _shared(messages: Messages, length: int, call: SampledCall | None) -> Prefix[Message]:
    """Return a chat that goes on behind ``length`` messages of ``call``, which share them if they are equal."""
    chat = None if call is None else call.chat
    if chat is None or len(chat) != length or messages[:length] != chat.whole():
        return Prefix.of_messages(messages)
    return chat.followed(messages[length : length + 1], messages[length + 1 :])


# -- the end of a long chat --------------------------------------------------------------------------------------------
ASK: Message = {"role": "user", "content": "x"}
ROLES = {"user", "assistant"}
"""Roles whose messages are rendered alone. Others may change what stands before them."""


class Anchors:
    """Where answers end in the tokens of chats of one format, so that a longer chat needs only what is behind.

    An *anchor* is the end of the text of an assistant's message, before the template closes the turn.

    Example::

        anchors = Anchors(format)
        ids = format.prompt_ids(chat)
        place = anchors.place(ids, chat[-2], chat[-1:])
        longer = ids[:place] + anchors.rest(chat[-2], [*chat[-1:], answer, question])
        assert longer == format.prompt_ids([*chat, answer, question])

    Each method returns ``None`` for a template that renders a message otherwise elsewhere: render the whole chat then.
    """

    def __init__(self, format: ChatFormat, tools: Sequence[Tool] = ()) -> None:
        self.format, self.tools = format, list(tools)
        self._close: list[int] | None = None

    def rest(self, answer: Message, rest: Messages) -> list[int] | None:
        """Return what follows the text of ``answer`` in a prompt that ends with ``rest``."""
        whole, before = self._ids([ASK, answer, *rest], True), self._to_the_end(answer)
        if not whole or not before or whole[: len(before)] != before:
            return None
        return whole[len(before) :]

    def up_to(self, answer: Message, rest: Messages) -> list[int] | None:
        """Return what follows the text of ``answer`` up to the end of the text of the last of ``rest``, an answer."""
        before, after = self._to_the_end(answer), self._to_the_end(*rest, before=[answer])
        if not before or not after or after[: len(before)] != before:
            return None
        return after[len(before) :]

    def place(self, ids: Sequence[int], answer: Message, rest: Messages) -> int | None:
        """Return how many of a prompt's ``ids`` end with the text of ``answer``, behind which is ``rest``."""
        after = self.rest(answer, rest)
        if not after or list(ids[-len(after) :]) != after:
            return None
        return len(ids) - len(after)

    def _to_the_end(self, *messages: Message, before: Messages | None = None) -> list[int] | None:
        """Return the tokens of a short chat up to the end of the text of its last message, an answer in its middle."""
        if self._close is None:
            close = self.format.written_after_answers(self.tools)
            self._close = close
        ids, close = self._ids([ASK, *(before or ()), *messages, ASK], False), self._close
        if not close or not ids or ids[-len(close) :] != close:
            return None
        return ids[: -len(close)]

    def _ids(self, messages: Messages, asks: bool) -> list[int] | None:
        if not all(message["role"] in ROLES and len(message) == 2 for message in messages):
            return None
        try:
            return self.format.prompt_ids(messages, self.tools, add_generation_prompt=asks)
        except TemplateLimitError:
            raise
        except Exception:  # a template may raise anything for a chat that it doesn't expect
            return None
