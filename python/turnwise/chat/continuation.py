"""Continues chats on the sampled tokens, so that a later prompt begins with exactly what the model saw and wrote."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import ChatError, Tool, message_key, tools_key
from turnwise.types import Message, Messages

REASONS = ("history", "tools", "output", "thinking", "renderer")
"""Reasons why a prompt doesn't continue the sampled tokens although the chat holds an answer of this session.
``history``: earlier messages were changed. ``tools``: other tools than before. ``output``: another form of the answer
than the one that the model was shown. ``thinking``: the reasoning that was
sent back is not the sampled one. ``renderer``: the format can't extend this chat."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one call. ``reused`` counts its first tokens that an earlier call of the session saw or sampled.

    ``rewritten`` is one of :data:`REASONS`, or ``""``.
    """

    ids: list[int]
    reused: int = 0
    rewritten: str = ""
    escapes: int = 0
    """Control tokens that the new messages spell, which became text."""
    continues: Any = None
    """The ``mark`` of the call that the chat continues."""


@dataclass(frozen=True, slots=True)
class _SampledCall:
    prompt: list[int]
    completion: list[int]
    answer: Message
    mark: Any
    form: str


class Conversations:
    """The calls of one actor in one session: finds the call that a chat continues, and extends its tokens.

    A chat continues the longest earlier chat that it begins with, the answer included; among equal ones, the latest.
    An answer that comes back without its reasoning counts as the one that was returned.

    Example::

        chats = Conversations(format)
        prompt = chats.prompt(messages)
        chats.add(messages, (), prompt.ids, completion_ids, answer)
        longer = chats.prompt([*messages, answer, {"role": "user", "content": "Go on."}])
        assert longer.ids[: longer.reused] == prompt.ids + completion_ids
    """

    def __init__(self, format: ChatFormat) -> None:
        self.format = format
        self._calls: dict[Hashable, _SampledCall] = {}
        self._tools: dict[bytes, bytes] = {}
        """The tools of the latest call with this history."""
        self._answers: set[bytes] = set()
        self._reasoning: dict[bytes, str] = {}

    def prompt(
        self,
        messages: Messages,
        tools: Sequence[Tool] = (),
        form: str = "",
        request: str = "",
        *,
        continues_answer: bool = False,
    ) -> Prompt:
        """Return the token ids of a chat of plain messages, see :func:`~turnwise.chat.messages.plain_messages`.

        ``form`` is an instruction for the whole chat, and becomes part of its system message. ``request`` is one for
        this answer alone, and comes last. With ``continues_answer``, a chat that ends with the assistant's message is
        continued in that message.
        """
        if messages[-1]["role"] != "assistant" or not continues_answer:
            return self._prompt(messages, tools, form, request)
        if messages[-1].get("tool_calls"):
            raise ChatError("messages", "the last message calls tools: expected their results")
        whole = self._calls.get((tools_key(tools), _histories(messages)[-1]))
        if whole is not None and whole.form == form and not request:  # the agent lets the model go on with its answer
            ended = whole.completion[-1:] and whole.completion[-1] in self.format.stop_token_ids
            ids = [*whole.prompt, *(whole.completion[:-1] if ended else whole.completion)]
            return Prompt(ids, len(ids), continues=whole.mark)
        prompt = self._prompt(messages[:-1] or [{"role": "user", "content": ""}], tools, form, request)
        return replace(prompt, ids=[*prompt.ids, *self.format.begun_ids(messages[-1], prompt.ids)])

    def _prompt(self, messages: Messages, tools: Sequence[Tool], form: str, request: str) -> Prompt:
        histories = _histories(messages)
        asked = [{"role": "system", "content": request}] if request else []

        def whole() -> list[int]:
            lead = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
            shown = [{"role": "system", "content": form}] if form else []
            return self.format.prompt_ids([*messages[:lead], *shown, *messages[lead:], *asked], tools)

        tool_key = tools_key(tools)
        begun = [length for length, message in enumerate(messages, 1) if message["role"] == "assistant"]
        length = next((length for length in reversed(begun) if (tool_key, histories[length]) in self._calls), 0)
        if not length:
            shared = any(message_key(messages[length - 1]) in self._answers for length in begun)
            other = any(histories[length] in self._tools for length in begun)
            reason = ("tools" if other else "history") if shared else ""
            return Prompt(whole(), 0, reason, self.format.escapes(messages))
        call, new = self._calls[tool_key, histories[length]], messages[length:]
        seen = [*call.prompt, *call.completion]
        escapes = self.format.escapes(new)
        if not self._keeps_reasoning(messages, histories, length):
            return Prompt(whole(), 0, "thinking", escapes, call.mark)
        if call.form not in ("", form):
            return Prompt(whole(), 0, "output", escapes, call.mark)
        shown = [{"role": "system", "content": form}] if form != call.form else []
        ids = self.format.extend(call.prompt, call.completion, [*new, *shown, *asked], tools, call.answer)
        if ids is None or ids[: len(seen)] != seen:
            ids = whole()
        if ids[: len(seen)] == seen:
            return Prompt(ids, len(seen), "", escapes, call.mark)
        return Prompt(ids, 0, "renderer", escapes, call.mark)

    def _keeps_reasoning(self, messages: Messages, histories: Sequence[bytes], until: int) -> bool:
        """True if no answer of this session came back with other reasoning than was sampled."""
        for length, message in enumerate(messages[:until], 1):
            sent = str(message.get("reasoning_content") or "").strip()
            if sent and sent != self._reasoning.get(histories[length], sent).strip():
                return False
        return True

    def add(
        self,
        messages: Messages,
        tools: Sequence[Tool],
        prompt: Sequence[int],
        completion: Sequence[int],
        answer: Message,
        mark: Any = None,
        form: str = "",
    ) -> None:
        """Keep a finished call, so that later chats may continue it; their prompts have its ``mark``.

        ``messages``, ``tools`` and ``form`` are those of :meth:`prompt`.
        """
        after = _histories([*messages, answer])[-1]
        tool_key = tools_key(tools)
        self._calls[tool_key, after] = _SampledCall(list(prompt), list(completion), answer, mark, form)
        self._tools[after] = tool_key
        self._answers.add(message_key(answer))
        self._reasoning[after] = answer.get("reasoning_content", "")


def _histories(messages: Messages) -> list[bytes]:
    """Return a key of the first ``n`` messages for each ``n``, from 0."""
    keys = [b""]
    for message in messages:
        keys.append(blake2b(keys[-1] + message_key(message), digest_size=16).digest())
    return keys
