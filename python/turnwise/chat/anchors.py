"""Renders the end of a long chat as its template renders the whole, from the end of an earlier answer's text on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnwise.chat.messages import Tool
from turnwise.sandbox.templates import TemplateLimitError
from turnwise.types import Message, Messages

if TYPE_CHECKING:
    from turnwise.chat.formats import ChatFormat

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
