"""Joins the parts of an answer that a client sends back as several messages, perhaps with results between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.chat.messages import joined_parts
from turnwise.types import Message, Messages

AnswerOf = Callable[[Any], Message | None]
"""The sampled answer that a call or an item belongs to, by its id; ``None`` for an unknown one."""


@dataclass(eq=False, slots=True)
class _Group:
    """A message, and the results of its calls. ``answer`` is the sampled one that it is a part of, if that is known."""

    message: Message
    answer: Message | None = None
    results: Messages = field(default_factory=list)
    parts: int = 1

    def add(self, part: Message, answer: Message | None) -> None:
        """Add a part; calls are in the order of the answer."""
        self.message, self.parts = _joined(self.message, part), self.parts + 1
        self.answer = self.answer or answer
        if self.answer is not None and "tool_calls" in self.message:
            ids = [call["id"] for call in self.answer.get("tool_calls", ())]
            place = {name: index for index, name in enumerate(ids)}
            self.message["tool_calls"].sort(key=lambda call: place.get(call.get("id"), len(ids)))


class JoinParts:
    """Makes the parts of one answer one message, so that the chat goes on from it.

    The ids of calls and of items say which answer a part belongs to, across the results of other calls. A part without
    a known id may belong to the part beside it, as ``neighbours`` decides of the two, and of the answer if that is
    known: :func:`equal_to_answer`, :func:`always`, or :func:`other_parts`. With ``moves_results``, a result belongs to
    its call wherever it stands.

    Example: two calls of one answer, each with its result behind it, become one message with both calls, and the
    results.
    """

    def __init__(
        self,
        answer_of: AnswerOf,
        neighbours: Callable[[Message, Message, Message | None], bool],
        *,
        moves_results: bool = False,
    ) -> None:
        self.answer_of, self.neighbours, self.moves_results = answer_of, neighbours, moves_results

    def __call__(self, messages: Messages, ids: Sequence[Any]) -> Messages:
        """Return the chat of plain ``messages``. ``ids`` are those of items, ``None`` for others."""
        groups: list[_Group] = []
        known: dict[int, _Group] = {}
        by_call: dict[Hashable, _Group] = {}
        last: _Group | None = None
        """The group of the message before, if that is a part of an answer."""
        for message, name in zip(messages, ids, strict=True):
            if message["role"] == "tool":
                owner = by_call.get(message.get("tool_call_id"))
                moves = owner is not None and (self.moves_results or owner.parts > 1)
                if moves and owner is not None:
                    owner.results.append(message)
                else:
                    groups.append(_Group(message))
                last = None
                continue
            if message["role"] != "assistant":
                groups.append(_Group(message))
                known, last = {}, None
                continue
            calls = [call.get("id") for call in message.get("tool_calls") or ()]
            answer = next((found for part in (name, *calls) if part and (found := self.answer_of(part))), None)
            group = None if answer is None else known.get(id(answer))
            if group is not None and any(by_call.get(call) is group for call in calls if call):
                group = None  # the same call once more
            if last is not None and last is not group and self._fits(last, message, answer):
                if group is None:
                    group = last
                elif last.answer is None and groups[-1] is last:  # a part without an id, before one with an id
                    groups.pop()
                    message = _joined(last.message, message)
            if group is None:
                groups.append(group := _Group(message, answer))
            else:
                group.add(message, answer)
            by_call |= dict.fromkeys(filter(None, calls), group)
            if group.answer is not None:
                known[id(group.answer)] = group
            last = group
        return [message for group in groups for message in (group.message, *group.results)]

    def _fits(self, group: _Group, message: Message, answer: Message | None) -> bool:
        if group.answer is not None and answer is not None and group.answer is not answer:
            return False
        return self.neighbours(group.message, message, group.answer or answer)


def equal_to_answer(first: Message, second: Message, answer: Message | None) -> bool:
    """True if two parts have all text of the answer."""
    return answer is not None and (first["content"] + second["content"]).strip() == answer["content"].strip()


def always(first: Message, second: Message, answer: Message | None) -> bool:
    """True: as in an API that joins messages of one role."""
    return True


def other_parts(first: Message, second: Message, answer: Message | None) -> bool:
    """True unless both have text, or both have reasoning; also if they have all text of the answer."""
    repeated = [name for name in ("content", "reasoning_content") if first.get(name) and second.get(name)]
    return not repeated or equal_to_answer(first, second, answer)


def _joined(first: Message, second: Message) -> Message:
    return joined_parts(first, second, first["content"] + second["content"])
