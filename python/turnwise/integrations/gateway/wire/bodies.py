"""Decodes the bodies of requests. Of one that begins as an earlier body did, only the rest is decoded.

Agents send their whole chat with each request, so a body mostly repeats the one before. Two JSON objects whose texts
agree up to the end of a message have the same messages up to there.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from turnwise.chat.messages import well_formed_texts
from turnwise.integrations.gateway.wire.chats import Sent
from turnwise.integrations.gateway.wire.request import WireError, invalid

MAX_VALUES = 20_000
"""Objects and lists of one request: messages, parts, tools and their schemas."""
DEEPEST = 100
"""Levels of them in each other."""
LATEST = 8
"""Chats of a session whose latest body is kept."""
CHATS = ("messages", "input")
"""Fields that hold a chat, in the APIs that the gateway serves."""
CHAT_BEGINS = re.compile(rb'(?<!\\)"(messages|input)"[ \t\n\r]*:[ \t\n\r]*\[')
PLACES = 4
"""Places of a body that may be the beginning of its chat: a schema may have such a field too."""
NO_VALUE = secrets.token_hex(16)
"""Stands for a value in a text. No client knows it."""

_decode = json.JSONDecoder().raw_decode
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_space = re.compile(r"[ \t\n\r]*")


class Body(dict[str, Any]):
    """The fields of a request."""

    chat = ""
    """The name of the field that holds the chat, a list; ``""`` if there is none, or two."""
    chat_digest = b""
    ends: Sequence[int] = ()
    """Bytes up to the end of each message of the chat, if they are known."""
    begin = 0
    """Bytes before the first message."""
    size = 0
    """Bytes in all."""

    def behind(self, count: int) -> int:
        """Return the bytes without those of the chat's first ``count`` messages."""
        return self.size - (self.ends[count - 1] - self.begin if count and self.ends else 0)

    def digest(self) -> bytes:
        """Return a digest that is equal for equal values, whatever the order of their fields."""
        text = _encode({name: value for name, value in self.items() if name != self.chat})
        return blake2b(self.chat_digest + text.encode(errors="surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Beginning:
    """A body up to the last message of its chat. ``ends``, ``messages`` and ``values`` have an item for each."""

    text: bytes
    """The body; what is behind the last message doesn't count."""
    chat: str
    """The name of the field that holds the chat."""
    begin: int
    """Bytes before the first message."""
    ends: list[int]
    """Bytes up to the end of each message."""
    messages: list[Any]
    values: list[int]
    """Objects and lists in the messages up to each."""
    hashes: dict[int, blake2b]
    """Hashes of the chat's first messages, by their number: of all, and of all but the last, which may be a note."""

    def shared(self, text: bytes) -> int:
        """Return how many messages ``text`` begins with too."""
        own, count = memoryview(self.text), len(self.ends)
        if not count or text.startswith(own[: self.ends[-1]]):
            return count
        return bisect_left(range(count), True, key=lambda place: not text.startswith(own[: self.ends[place]]))

    def first(self, count: int) -> Beginning:
        """Return the beginning up to the first ``count`` messages."""
        if count == len(self.ends):
            return self
        ends, messages, values = self.ends[:count], self.messages[:count], self.values[:count]
        return Beginning(self.text, self.chat, self.begin, ends, messages, values, self.hashes)


class Bodies:
    """The latest bodies of a session, one of each chat.

    Example: ``body, beginning = parse_body(text, bodies.beginning(text))``, and then ``bodies.keep(beginning)``.
    """

    def __init__(self) -> None:
        self._latest: list[Beginning] = []

    def beginning(self, text: bytes) -> Beginning | None:
        """Return what ``text`` has in common with an earlier body; ``None`` if that is no message."""
        found, most = None, 0
        for each in self._latest:
            if (count := each.shared(text)) > most:
                found, most = each, count
        return None if found is None else found.first(most)

    def keep(self, new: Beginning | None) -> None:
        """Keep a body for later ones. It replaces the one before of the same chat, whose last message may be gone."""
        if new is not None:
            others = [each for each in self._latest if each.shared(new.text) < max(len(each.ends) - 1, 1)]
            self._latest = [*others[1 - LATEST :], new]


def parse_body(text: bytes, known: Beginning | None = None) -> tuple[Body, Beginning | None]:
    """Return the fields of a body that begins with ``known``, and its own beginning.

    Raises :class:`WireError` for what is no JSON object, or has too many values.
    """
    try:
        return _parse_behind(text, known or _before_the_chat(text))
    except (ValueError, IndexError, RecursionError):  # it is wrong or unusual: read it as a whole
        return _parse_whole(text), None


def _parse_whole(text: bytes) -> Body:
    try:
        fields = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the request is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid(None, "the request is no JSON object")
    _check(count_values(fields, 1))
    body = Body(_well_formed(fields, text))
    chats = [name for name in CHATS if isinstance(body.get(name), list)]
    if len(chats) == 1:
        body.chat = chats[0]
        body.chat_digest = _hashed(body[body.chat]).digest()
    body.size = len(text)
    return body


def _before_the_chat(text: bytes) -> Beginning:
    """Return the beginning up to the chat, without any message."""
    for _, place in zip(range(PLACES), CHAT_BEGINS.finditer(text), strict=False):
        try:
            json.loads(text[: place.end()].decode() + "]}")
        except ValueError:  # not a field of the body itself
            continue
        return Beginning(text, place[1].decode(), place.end(), [], [], [], {})
    raise ValueError("no chat")


def _parse_behind(text: bytes, known: Beginning) -> tuple[Body, Beginning]:
    """Decode what is behind ``known``. Raises ``ValueError`` for an unusual body, such as one with two chats."""
    name, head = known.chat, text[: known.begin]
    begin = known.ends[-1] if known.ends else known.begin
    rest = text[begin:]
    decoded = rest.decode()
    new, ends, end = _decode_messages(decoded, is_first=not known.ends)
    after = json.loads(f'{{"{name}":"{NO_VALUE}"{decoded[end:]}')
    if after.pop(name) != NO_VALUE:
        raise ValueError("the chat's field comes twice")
    body = Body(_well_formed(json.loads(head.decode() + "]}"), head) | _well_formed(after, rest))
    if any(isinstance(body.get(other), list) for other in CHATS if other != name):
        raise ValueError("two chats")
    new, values = _well_formed(new, rest), list(known.values)
    for message in new:
        values.append(count_values(message, 3) + (values[-1] if values else 0))
    _check(count_values(body, 1) + values[-1])
    messages, count = Sent([*known.messages, *new]), len(known.ends)
    hashes = {count: known.hashes.get(count) or _hashed(known.messages)}
    if new:
        but_last = _hashed(new[:-1], count, hashes[count])
        hashes = {len(messages) - 1: but_last, len(messages): _hashed(new[-1:], len(messages) - 1, but_last)}
    whole_ends = known.ends + [begin + place for place in _in_bytes(ends, decoded)]
    body[name], body.chat, body.chat_digest = messages, name, hashes[len(messages)].digest()
    body.size, body.begin, body.ends = len(text), known.begin, whole_ends
    return body, Beginning(text, name, known.begin, whole_ends, messages, values, hashes)


def _decode_messages(text: str, *, is_first: bool) -> tuple[list[Any], list[int], int]:
    """Return the objects of the rest of a list, the place behind each, and the place behind the list's end."""
    messages: list[Any] = []
    ends: list[int] = []
    place = _skip(text, 0)
    while is_first or text[place] == ",":
        message, place = _decode(text, _skip(text, place + (not is_first)))
        if type(message) is not dict or len(messages) > MAX_VALUES:
            raise ValueError("no chat of objects")
        messages.append(message)
        ends.append(place)
        place, is_first = _skip(text, place), False
    if text[place] != "]":
        raise ValueError("no end of the list")
    return messages, ends, place + 1


def _skip(text: str, place: int) -> int:
    """Return the place behind white space."""
    found = _space.match(text, place)
    return place if found is None else found.end()


def _in_bytes(places: list[int], text: str) -> list[int]:
    """Return places of ``text`` as numbers of its bytes."""
    if text.isascii():
        return places
    found, before, size = [], 0, 0
    for place in places:
        size += len(text[before:place].encode())
        before = place
        found.append(size)
    return found


def count_values(value: Any, depth: int) -> int:
    """Return the number of objects and lists in ``value``, itself included, which is at ``depth``."""
    left: list[tuple[Any, int]] = [(value, depth)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        _check(count)
        if depth > DEEPEST:
            raise invalid(None, f"the request is nested too deeply: more than {DEEPEST} levels")
        parts = value.values() if isinstance(value, dict) else value
        left += [(part, depth + 1) for part in parts if isinstance(part, (dict, list))]
    return count


def _check(values: int) -> None:
    if values > MAX_VALUES:
        raise WireError(413, "body_too_large", f"the request has more than {MAX_VALUES} objects and lists")


def _well_formed(value: Any, text: bytes) -> Any:
    """Return ``value``, which ``text`` spells, without lone surrogates."""
    return value if b"\\ud" not in text.lower() else well_formed_texts(value)


def _hashed(messages: list[Any], count: int = 0, before: blake2b | None = None) -> blake2b:
    """Return the hash of ``messages`` behind ``count`` others: the same whether they are added at once or singly."""
    found = blake2b(digest_size=16) if before is None else before.copy()
    if messages:
        text = ("," if count else "") + _encode(messages)[1:-1]
        found.update(text.encode(errors="surrogatepass"))
    return found
