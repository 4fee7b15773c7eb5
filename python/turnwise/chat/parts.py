"""Joins the parts of an answer that a client sends back as several messages, perhaps with results between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.chat.messages import joined_parts
from turnwise.types import Message, Messages

Neighbours = Callable[[Message, Message, Message | None, Message | None], bool]
"""Says whether two assistant's messages behind each other are one, from both, the message behind them, and the second
one's answer if that is known."""


@dataclass(eq=False, slots=True)
class _Group:
    """The parts of a message, and the results of its calls. ``answer`` is the sampled one, if that is known."""

    parts: Messages
    answer: Message | None = None
    results: Messages = field(default_factory=list)
    begun: Message = field(init=False)
    """The first part, with the first text and reasoning of any part."""

    def __post_init__(self) -> None:
        self.begun = self.parts[0]

    def add(self, part: Message, answer: Message | None) -> None:
        self.parts.append(part)
        self.answer = self.answer or answer
        found = {
            key: part[key] for key in ("content", "reasoning_content") if part.get(key) and not self.begun.get(key)
        }
        self.begun = {**self.begun, **found}

    def whole(self) -> Message:
        """Return the message of all parts, with calls in the order of the answer."""
        if len(self.parts) == 1:
            return self.parts[0]
        whole = joined_parts(self.parts, "".join(part["content"] for part in self.parts))
        if self.answer is not None and "tool_calls" in whole:
            ids = [call["id"] for call in self.answer.get("tool_calls", ())]
            place = {name: index for index, name in enumerate(ids)}
            whole["tool_calls"].sort(key=lambda call: place.get(call.get("id"), len(ids)))
        return whole


class JoinParts:
    """Makes the parts of one answer one message, so that the chat goes on from it.

    The ids of calls and of items say which answer a part belongs to, across the results of other calls; ``answer_of``
    returns the sampled answer of such an id. A part without a known id belongs to the answer of the part beside it if
    it is in that answer. Other parts behind each other are joined as ``neighbours`` decides: :func:`never`,
    :func:`always`, or :func:`as_items`. With ``moves_results``, a result belongs to its call wherever it stands.

    Example: two calls of one answer, each with its result behind it, become one message with both calls, and the
    results.
    """

    def __init__(
        self,
        answer_of: Callable[[Any], Message | None],
        neighbours: Neighbours,
        *,
        moves_results: bool = False,
    ) -> None:
        self.answer_of, self.neighbours, self.moves_results = answer_of, neighbours, moves_results

    def __call__(self, messages: Messages, ids: Sequence[Any]) -> Messages:
        """Return the chat of plain ``messages``. ``ids`` are those of items, ``None`` for others."""
        groups: list[_Group] = []
        known: dict[int, _Group] = {}
        by_call: dict[str, _Group] = {}
        last: _Group | None = None
        """The group of the message before, if that is a part of an answer."""
        followers = [*messages[1:], None]
        for message, follower, answer in zip(messages, followers, self._answers(messages, ids), strict=True):
            if message["role"] == "tool":
                owner, last = by_call.get(message.get("tool_call_id", "")), None
                if owner is not None and (self.moves_results or len(owner.parts) > 1):
                    owner.results.append(message)
                else:
                    groups.append(_Group([message]))
            elif message["role"] != "assistant":
                groups.append(_Group([message]))
                known, last = {}, None
            elif self._repeats(message, by_call):
                continue
            else:
                calls = call_ids(message)
                group = None if answer is None else known.get(id(answer))
                if group is not None and any(by_call.get(call) is group for call in calls):
                    group = None  # the same call once more
                if group is None and last is not None and (answer is None or last.answer in (None, answer)):
                    group = last if self.neighbours(last.begun, message, follower, answer) else None
                if group is None:
                    groups.append(group := _Group([message], answer))
                else:
                    group.add(message, answer)
                by_call |= dict.fromkeys(calls, group)
                if group.answer is not None:
                    known[id(group.answer)] = group
                last = group
        return [message for group in groups for message in (group.whole(), *group.results)]

    def _repeats(self, message: Message, by_call: dict[str, _Group]) -> bool:
        """True if ``message`` is a call that the chat has before and that has no result yet: it was sent again."""
        owners = [(by_call.get(call), call) for call in call_ids(message)] if self.moves_results else []
        return bool(owners) and all(
            owner is not None and call not in [result.get("tool_call_id") for result in owner.results]
            for owner, call in owners
        )

    def _answers(self, messages: Messages, ids: Sequence[Any]) -> list[Message | None]:
        """Return the sampled answer of each part: that of its ids, else the one beside it that holds the part."""
        answers = [
            next((answer for name in (part, *call_ids(message)) if name and (answer := self.answer_of(name))), None)
            for message, part in zip(messages, ids, strict=True)
        ]
        parts_of: dict[int, Messages] = {}
        for message, answer in zip(messages, answers, strict=True):
            if answer is not None:
                parts_of.setdefault(id(answer), []).append(message)
        # The part behind it counts first, as reasoning and text come before calls.
        for places, step in ((range(len(messages) - 2, -1, -1), 1), (range(1, len(messages)), -1)):
            for place in places:
                beside = answers[place + step]
                is_part = messages[place]["role"] == messages[place + step]["role"] == "assistant"
                if answers[place] is None and beside is not None and is_part:
                    own = [name for name in ("content", "reasoning_content") if messages[place].get(name)]
                    if _lacks(beside, parts_of[id(beside)], messages[place], own):
                        answers[place] = beside
                        if own:  # a part of nothing is in no one's way
                            parts_of[id(beside)].append(messages[place])
        return answers


def call_ids(message: Message) -> list[str]:
    """Return the ids of a message's calls that have any."""
    return [call["id"] for call in message.get("tool_calls") or () if call.get("id")]


def _lacks(answer: Message, others: Messages, part: Message, own: Sequence[str]) -> bool:
    """True if ``part`` has no calls, and its fields ``own`` are those of ``answer``, which the ``others`` lack."""
    same = all(part[name].strip() == str(answer.get(name) or "").strip() for name in own)
    return "tool_calls" not in part and same and not any(other.get(name) for other in others for name in own)


def never(first: Message, second: Message, follower: Message | None, answer: Message | None) -> bool:
    """False: each message is whole."""
    return False


def always(first: Message, second: Message, follower: Message | None, answer: Message | None) -> bool:
    """True: as in an API that joins messages of one role."""
    return True


def as_items(first: Message, second: Message, follower: Message | None, answer: Message | None) -> bool:
    """True unless both have text, or both have reasoning, or the answer has none of what the first one has.

    Reasoning begins an answer if more of one follows.
    """
    own = [name for name in ("content", "reasoning_content") if first.get(name)]
    if any(second.get(name) or (answer is not None and not answer.get(name)) for name in own):
        return False
    return "reasoning_content" not in second or follower is None or follower["role"] != "assistant"
