"""Chats of clients in plain messages. One that begins as an earlier chat of its actor costs what is new in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from turnwise.chat.messages import ChatError, Tool, plain_message, results_in_order
from turnwise.chat.parts import JoinParts, Neighbours, call_ids
from turnwise.types import Message, Messages
from turnwise.types.prompts import Prefix

MAX_SETTLED = 256
"""Beginnings of chats that are kept for each dialect and actor."""
Notes = tuple[str, ...]


class Sent(list[Any]):
    """The messages of a request, which nobody changes. Those that an earlier request has too are the same objects."""


@dataclass(frozen=True, eq=False, slots=True)
class Dialect:
    """How the messages of a dialect become plain ones.

    Example: ``Dialect("messages", lambda message, where, offered: [message], never)``
    """

    field: str
    """The field of a request that holds the chat."""
    convert: Callable[[Any, str, Mapping[str, Tool]], Messages]
    """Returns a message, found at a place of the request, in the form that ``plain_messages`` takes. The
    tools are those that a result may show by their names."""
    neighbours: Neighbours
    """Says which parts of answers are joined, see :class:`~turnwise.chat.parts.JoinParts`."""
    moves_results: bool = False
    notes: Callable[[Any], Notes] = lambda message: ()
    """Returns what a message says that is not shown to the model."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """A chat up to a message behind which nothing changes what stands before.

    That is so behind any message but an answer, unless a later message has the id of a call, or of an answer, that the
    chat has before: then the parts of that answer are joined.
    """

    last: Any = None
    """The last message as it came. It is kept so that no other object has its identity."""
    plain: Prefix[Message] = field(default_factory=lambda: Prefix.of_messages([]))
    converted: int = 0
    """Messages before they were joined."""
    ids: dict[str | int, int] = field(default_factory=dict)
    """For each id of a call, and identity of an answer: the messages before it. Chats that go on from here share it,
    so those of a place behind this one don't count."""
    notes: Notes = ()


class _JoinsError(Exception):
    """Raised if a message is a part of an answer before the settled place, or a result of its calls."""


class PlainChats:
    """The chats of one actor in one dialect, as :func:`~turnwise.chat.messages.plain_messages` returns them.

    Example: ``messages, notes = PlainChats(DIALECT, earlier.find_answer).read(Sent(body["messages"]))``
    """

    def __init__(
        self,
        dialect: Dialect,
        answer_of: Callable[[Any], Message | None],
        offered: Mapping[str, Tool] = MappingProxyType({}),
    ) -> None:
        self.dialect, self.answer_of, self.offered = dialect, answer_of, offered
        self._join = JoinParts(answer_of, dialect.neighbours, moves_results=dialect.moves_results)
        self._kept: OrderedDict[int, _Settled] = OrderedDict()
        """By the identity of the last message, as it came or as it was returned. No other messages are before it."""

    def forget(self) -> None:
        """Read all chats anew, as an id in them is that of another answer now."""
        self._kept = OrderedDict()  # a thread may be filling the old one

    def settled(self, messages: Any) -> tuple[int, _Settled]:
        """Return the number of first messages that are settled, and the chat up to there."""
        kept = self._kept
        for place in range(len(messages) if isinstance(messages, Sent) and kept else 0, 0, -1):
            key = id(messages[place - 1])
            if (found := kept.pop(key, None)) is not None:
                kept[key] = found  # those in use stay the longest
                return place, found
        return 0, _Settled()

    def read(
        self, messages: Sequence[Any], lead: int = 0, *, is_converted: bool = False
    ) -> tuple[Prefix[Message], Notes]:
        """Return the plain messages and their notes. Raises :class:`WireError` and :class:`ChatError`.

        ``lead`` is the number of messages that the caller puts before them. If the chat ``is_converted``, it is in the
        form that ``plain_messages`` takes.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not (messages or lead):
            raise ChatError("messages", f"got {str(messages)[:80]!r}, expected a list of at least one message")
        kept = self._kept
        count, settled = self.settled(messages)
        reading = _Reading(self, kept, messages, lead, is_converted)
        try:
            return reading.behind(count, settled, self._join)
        except _JoinsError:
            return reading.behind(0, _Settled(), self._join, at_once=True)


@dataclass(frozen=True, eq=False, slots=True)
class _Reading:
    """One chat that is being read."""

    chats: PlainChats
    kept: OrderedDict[int, _Settled]
    messages: Sequence[Any]
    lead: int
    is_converted: bool

    def behind(
        self, count: int, settled: _Settled, join: JoinParts, *, at_once: bool = False
    ) -> tuple[Prefix[Message], Notes]:
        """Read the messages behind the ``count`` ``settled`` ones. The parts of answers are joined wherever they stand
        if all is read ``at_once``. Raises :class:`_JoinsError` if they must be.
        """
        new = self.messages[count:]
        plain, ids, ends = self._plain(new, count, self.lead + (count if self.is_converted else settled.converted))
        if count and plain and plain[0]["role"] == "tool":
            raise _JoinsError
        parts: list[tuple[int, int, Messages, bool]] = []
        """Joined messages: how many came and were converted up to here, the messages, and whether these settle."""
        begin = before = 0
        waiting: set[str] = set()
        """The calls whose results may still come, wherever they stand."""
        for number, end in enumerate(ends, 1):
            is_last = number == len(ends)
            roles = [message["role"] for message in plain[end - 1 : end + 1]]
            if join.moves_results:
                for message in plain[before:end]:
                    waiting = (waiting | {*call_ids(message)}) - {message.get("tool_call_id", "")}
            before = end
            if not is_last and (at_once or waiting or roles[0] == "assistant" or roles[1] == "tool"):
                continue
            part = join(plain[begin:end], ids[begin:end])
            settles = "assistant" not in (roles[0], part[-1]["role"])
            if is_last or settles:
                self._note_ids(settled, settled.converted + begin, plain[begin:end], ids[begin:end])
                parts.append((number, end, part, settles))
                begin = end
        return self._ordered(new, settled, parts)

    def _ordered(
        self, new: Sequence[Any], settled: _Settled, parts: Sequence[tuple[int, int, Messages, bool]]
    ) -> tuple[Prefix[Message], Notes]:
        """Return the whole chat, of which the ``parts`` follow the ``settled`` one, and keep where it settles."""
        begin, before = 0, settled.converted
        for number, end, part, settles in parts:
            ordered = results_in_order(part, self.lead + len(settled.plain))
            every = [] if self.is_converted else map(self.chats.dialect.notes, new[begin:number])
            notes = tuple(dict.fromkeys([*settled.notes, *(note for each in every for note in each)]))
            if not settles:
                return settled.plain.followed([], ordered), notes
            longer = settled.plain.followed(ordered, [])
            settled = _Settled(new[number - 1], longer, before + end, settled.ids, notes)
            self._keep(settled)
            begin = number
        if settled.plain:
            self._keep(replace(settled, last=settled.plain[-1]))  # an agent may continue it by the id of its answer
        return settled.plain, settled.notes

    def _plain(self, new: Sequence[Any], count: int, first: int) -> tuple[Messages, list[Any], list[int]]:
        """Return plain messages with their ids, and how many there are behind each of the ``new`` ones."""
        dialect = self.chats.dialect
        forms = [
            [message]
            if self.is_converted
            else dialect.convert(message, f"{dialect.field}[{place}]", self.chats.offered)
            for place, message in enumerate(new, count)
        ]
        plain: Messages = []
        ids: list[Any] = []
        ends: list[int] = []
        for form in forms:
            for message in form:
                plain.append(plain_message(message, f"messages[{first + len(plain)}]"))
                ids.append(message.get("id"))
            ends.append(len(plain))
        return plain, ids, ends

    def _note_ids(self, settled: _Settled, first: int, plain: Messages, ids: Sequence[Any]) -> None:
        """Note the ids of calls and answers. Raises :class:`_JoinsError` for those of the ``first`` messages."""
        own: set[str] = set()
        for place, (message, part) in enumerate(zip(plain, ids, strict=True), first):
            calls = call_ids(message)
            answers = [id(found) for name in (part, *calls) if name and (found := self.chats.answer_of(name))]
            result_of = {message.get("tool_call_id", "")} - own if message["role"] == "tool" else set()
            before: list[str | int] = [*answers, *result_of]
            if any(settled.ids.get(name, first) < first for name in before):
                raise _JoinsError
            own.update(calls)
            names: list[str | int] = [*answers, *calls]
            for name in names:
                settled.ids[name] = min(place, settled.ids.get(name, place))

    def _keep(self, settled: _Settled) -> None:
        self.kept[id(settled.last)] = settled
        if len(self.kept) > MAX_SETTLED:
            self.kept.popitem(last=False)
