"""Finds the call that a chat continues, and the earlier answers that the chat has changed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.chat.messages import Tool, message_key
from turnwise.chat.thoughts import find_thoughts
from turnwise.types import Message, Messages
from turnwise.types.prompts import Prefix

LATEST = 8
"""Chats of an actor that are remembered with their path, so that each costs what is new in it."""
DISTINCT = 40
"""Characters of an answer that is recognised wherever it stands. A shorter one may equal an example of the agent's."""


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A finished call: its tokens, and the message that the agent got. ``mark`` is the caller's own."""

    prompt: Prefix[int]
    completion: list[int]
    answer: Message
    tools: list[Tool]
    form: str = ""
    """The instruction about the form of answers that the model was shown."""
    stop: str = ""
    """The stop string that ended the answer, without outer white space; the tokens hold it, ``answer`` doesn't."""
    mark: Any = None
    chat: Prefix[Message] | None = None
    """The messages of the prompt, which later chats share."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """An answer that the agent may have got, where it now sends a message. ``stop`` was put back behind it."""

    message: Message
    stop: str = ""

    def may_be(self, call: SampledCall) -> bool:
        return self.stop in ("", call.stop)

    def likeness(self, call: SampledCall) -> tuple[bool, bool]:
        """Compare what :func:`message_key` leaves out: the reasoning, if there is one, and outer white space."""
        same_reasoning = _reasoning(self.message) in ("", _reasoning(call.answer))
        return same_reasoning, self.message["content"] == call.answer["content"]


@dataclass(eq=False, slots=True)
class _Node:
    """A message, after the messages of the nodes above it."""

    next: dict[Hashable, _Node] = field(default_factory=dict)
    calls: list[SampledCall] = field(default_factory=list)
    """The calls that this message answers."""
    asked: bool = False
    """A finished call's chat ended with this message."""
    agents_own: bool = False
    """An assistant message that the agent wrote itself, such as an example."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A chat that was found, up to what may be read otherwise next time."""

    messages: Messages = field(default_factory=list)
    path: list[tuple[_Node, _Reading]] = field(default_factory=list)
    """The node of each message, and the reading by which it was found."""
    keeping: int = 0
    """The first messages whose answers came back with their reasoning, or without any."""


class Histories:
    """The chats of one actor as a tree of messages.

    An answer may come back with other outer white space, with the stop string that ended it, without its reasoning, or
    with its reasoning as ``<think>`` text before the content.
    """

    def __init__(self) -> None:
        self._root = _Node()
        self._stops: dict[str, None] = {}
        """The stop strings that ended answers, as a set in order."""
        self._answers: dict[Hashable, list[tuple[int, Hashable]]] = {}
        """By the key of an answer: its index in its chat, and the key of the message before it."""
        self._latest: tuple[_Found, ...] = ()
        """The chats that were found last, the latest one first. It is replaced as a whole: a thread may read it."""

    def add(self, messages: Messages, call: SampledCall) -> None:
        """Keep a finished call of ``messages``."""
        path = self._path(messages).path
        node = path[-1][0] if path else self._root
        key = message_key(call.answer)
        node.asked = True
        node.next.setdefault(key, _Node()).calls.append(call)
        before = message_key(messages[-1]) if messages else None
        self._answers.setdefault(key, []).append((len(messages), before))
        if call.stop:
            self._stops[call.stop] = None

    def find(self, messages: Messages, tools: Sequence[Tool]) -> tuple[int, SampledCall | None, str]:
        """Return the longest beginning of ``messages`` that a call with ``tools`` ended, and the likest such call.

        Among equal calls the latest counts. The third value is the reason why the chat is no continuation of the calls
        before it: ``"history"``, ``"tools"``, ``"thinking"``, or ``""`` if it is one, or begins a new chat.
        """
        found = self._path(messages)
        path, length, parent = found.path, len(messages), None
        while length and parent is None:
            node, sent = path[length - 1]
            calls = [call for call in reversed(node.calls) if call.tools == tools and sent.may_be(call)]
            parent = max(calls, key=sent.likeness, default=None)
            length -= parent is None
        reason = self._change(messages, path, length)
        if not reason:
            if all(_keeps_reasoning(node, sent) for node, sent in path[found.keeping : length]):
                self._remember(replace(found, keeping=length))
            else:
                reason = "thinking"
            for node, sent in path[length:-1]:
                node.agents_own = sent.message["role"] == "assistant"
        return length, parent, reason

    def known(self, messages: Messages) -> int:
        """Return how many first messages those of a chat are that was found before."""
        return len(self._begun(messages).messages)

    def _begun(self, messages: Messages) -> _Found:
        """Return the longest of the latest chats that ``messages`` begin with."""
        begun = (each for each in self._latest if messages[: len(each.messages)] == each.messages)
        return max(begun, key=lambda found: len(found.messages), default=_Found())

    def _path(self, messages: Messages) -> _Found:
        """Find all messages of a chat."""
        begun = self._begun(messages)
        known = len(begun.path)
        path = [*begun.path, *self._walk(messages[known:], begun.path[-1][0] if known else self._root)]
        found = _Found(messages, path, begun.keeping)
        self._remember(found)
        return found

    def _remember(self, found: _Found) -> None:
        """Remember a chat instead of those that it begins with."""
        # What stands before the last answer that was found stays as it is, whatever is added later.
        sure = next((n for n in range(len(found.path), 0, -1) if found.path[n - 1][0].calls), 0)
        if sure:
            new = _Found(found.messages[:sure], found.path[:sure], min(found.keeping, sure))
            others = [each for each in self._latest if each.messages != new.messages[: len(each.messages)]]
            self._latest = (new, *others[: LATEST - 1])

    def _walk(self, messages: Messages, node: _Node) -> Iterator[tuple[_Node, _Reading]]:
        for message in messages:
            for reading in self._readings(message):
                known = node.next.get(message_key(reading.message))
                if known is not None and any(map(reading.may_be, known.calls)):
                    node = known
                    break
            else:
                reading = _Reading(message)
                node = node.next.setdefault(message_key(message), _Node())
            yield node, reading

    def _readings(self, message: Message) -> Iterator[_Reading]:
        yield _Reading(message)
        if message["role"] != "assistant":
            return
        content = message["content"].strip()
        if (found := find_thoughts(content)).thoughts:
            content = found.answer(content)
            message = {**message, "content": content, "reasoning_content": found.thought}
            yield _Reading(message)
        for stop in tuple(self._stops):  # a thread may render another chat
            if content.endswith(stop):
                yield _Reading({**message, "content": content.removesuffix(stop)}, stop)

    def _change(self, messages: Messages, path: Sequence[tuple[_Node, _Reading]], begin: int) -> str:
        """Return the reason if an assistant message from index ``begin`` on shows a changed history; else ``""``.

        The last message may be an answer that the agent began.
        """
        for index in range(begin, len(messages) - 1):
            node, _ = path[index]
            if messages[index]["role"] != "assistant" or node.agents_own:
                continue
            if node.calls:
                return "tools"
            before = path[index - 1][0] if index else self._root
            if before.asked or self._was_sampled(messages, index):
                return "history"
        return ""

    def _was_sampled(self, messages: Messages, index: int) -> bool:
        """True if the message answered an earlier call, and has other messages before it now."""
        before = message_key(messages[index - 1]) if index else None
        for reading in self._readings(messages[index]):
            places = self._answers.get(message_key(reading.message), ())
            distinct = len(reading.message["content"].strip()) >= DISTINCT
            if any(distinct or index == place or before == neighbour for place, neighbour in places):
                return True
        return False


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or "").strip()


def _keeps_reasoning(node: _Node, sent: _Reading) -> bool:
    """True unless an answer came back with other reasoning than was sampled."""
    given = _reasoning(sent.message)
    return not given or not node.calls or any(given == _reasoning(call.answer) for call in node.calls)
