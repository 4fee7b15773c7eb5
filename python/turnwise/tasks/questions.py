"""Questions of your own data. Their content tells them apart, so ids, listing order and size of a file don't matter."""

from __future__ import annotations

import json
import re
import unicodedata
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, NamedTuple, get_args

from turnwise.tasks.base import Split, check_split, key_of, split_of
from turnwise.utils.values import check_texts

_ID = re.compile(
    r"_*(id|idx|index|uid|uuid|guid)_*|.*[_-](id|idx|index|uid|uuid|guid)|.*[a-z](Id|ID|Idx|Index|Uuid|UUID)"
)
"""Keys that name a row or its place, and are no part of its content: ``id``, ``question_id``, ``taskId``, ``split``."""

_ASKS = ("question", "problem", "prompt", "instruction", "query", "input", "messages", "text")
"""Keys of the part of a row that a model is asked, by which rows with one question are found."""

_BITS = 64
_KEPT_ORDERS = 4


def identity_of(question: Any) -> Any:
    """Return what identifies ``question``, a text or JSON data: no ids, no outer whitespace, Unicode in its form C.

    Example: ``identity_of({"id": 7, "question": "2 + 2? "}) == {"question": "2 + 2?"}``
    """
    return _content(question) or question


def _content(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, dict):
        parts = {key: _content(part) for key, part in value.items() if not _ID.fullmatch(str(key))}
        return {key: part for key, part in parts.items() if part != {}}
    return [_content(part) for part in value] if isinstance(value, (list, tuple)) else value


class _Row(NamedTuple):
    """A question: the hash of its identity, its text or JSON, and its place, as errors name it."""

    digest: int
    key: str
    is_text: bool
    place: str

    @property
    def question(self) -> Any:
        """A copy of its own, which an episode may change."""
        return self.key if self.is_text else json.loads(self.key)


class QuestionSet:
    """The questions of a task in three splits, each in an order that their content alone decides.

    ``rows`` are pairs of a place, which errors name, and a question. ``identity(question)`` is the part that tells it
    apart: its hash decides split and draws. Equal rows count once; rows with one identity are in one split. Raises
    ``ValueError`` with the place of a row that JSON can't hold. ``what`` names the questions in messages. With
    ``ids_may_count``, whole rows are told apart, with a warning, where a split would be empty otherwise.

    Example: ``QuestionSet([("demo.jsonl:1", {"question": "2 + 2?", "answer": 4})]).draw("train", 1, 0)``
    """

    def __init__(
        self,
        rows: Iterable[tuple[str, Any]],
        identity: Callable[[Any], Any] = identity_of,
        *,
        split_of: Callable[[Any], Split] = split_of,
        what: str = "the questions",
        ids_may_count: bool = True,
    ) -> None:
        self.identity, self.what = identity, what
        rows = list(rows)
        asked = self._sort(rows, split_of)
        if ids_may_count and self._copies and not all(self._rows.values()):
            self.identity = lambda question: question
            asked = self._sort(rows, split_of)
            warnings.warn(
                f"{what}: rows that differ in their ids alone count as different questions, in any split, as a split "
                "would be empty without them. Let identity(question) return what tells questions apart",
                stacklevel=2,
            )
        asked.warn(what)

    def _sort(self, rows: Sequence[tuple[str, Any]], split_of: Callable[[Any], Split]) -> _Asked:
        """Put the rows into their splits, each in the order of their content."""
        self._orders: dict[tuple[Split, str], tuple[int, ...]] = {}
        self._rows: dict[Split, list[_Row]] = {split: [] for split in get_args(Split)}
        seen: set[tuple[str, bool]] = set()
        asked = _Asked()
        for place, question in rows:
            key, part = self._keys_of(place, question)
            row = _Row(_hash(part), key, isinstance(question, str), place)
            if (row.key, row.is_text) not in seen:
                seen.add((row.key, row.is_text))
                split = split_of(part)
                self._rows[split].append(row)
                asked.add(question, split, place)
        for found in self._rows.values():
            found.sort()
        # Rows of one identity are numbered, and lists begin with one row of each.
        numbered = {split: list(_numbered(found)) for split, found in self._rows.items()}
        self._copies = {(row.key, row.is_text): copy for found in numbered.values() for copy, row in found if copy}
        self._listed = {split: [row for _, row in sorted(found)] for split, found in numbered.items()}
        return asked

    def _keys_of(self, place: str, question: Any) -> tuple[str, str]:
        """Return the text or JSON of ``question``, and that of its identity."""
        try:
            check_texts(question)
            return key_of(question), key_of(self.identity(question))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{place}: {question!r:.80} is no question: expected a text, or data that JSON can hold: {error}"
            ) from None

    def listed(self, split: Split, most: int | None = None) -> list[Any]:
        """Return all questions of ``split``, or the first ``most``. In a larger file they keep their order."""
        return [row.question for row in self._listed[check_split(split)][:most]]

    def count(self, split: Split) -> int:
        return len(self._rows[check_split(split)])

    def first(self, split: Split, n: int) -> list[Any]:
        """Return the first ``n`` questions of ``split``. Raises ``ValueError`` if there are fewer."""
        self._check(split, n)
        return self.listed(split, n)

    def draw(self, split: Split, n: int, seed: int | str) -> list[Any]:
        """Draw ``n`` different questions. A larger ``n`` extends the draw, and more rows change few of its questions.

        Time and memory grow with ``n``, not with the number of rows. Raises ``ValueError`` if there are fewer.
        """
        self._check(split, n)
        rows, drawn = self._rows[split], dict[int, None]()
        few, attempt = min(n, len(rows) // 2), 0
        while len(drawn) < few:
            drawn[_descend(rows, Random(f"{seed}/{attempt}"))] = None
            attempt += 1
        if len(drawn) < n:  # most of them: then the rest in the order of a hash
            drawn.update(dict.fromkeys(self.order(split, seed)))
        return [rows[index].question for index in list(drawn)[:n]]

    def order(self, split: Split, seed: int | str) -> tuple[int, ...]:
        """Return the indices of all questions in an order that ``seed`` determines. The last few orders are kept."""
        if (split, str(seed)) not in self._orders:
            rows, salt = self._rows[split], blake2b(str(seed).encode(), digest_size=32).digest()
            keys = [_hash(f"{row.digest}", salt) for row in rows]
            kept = list(self._orders.items())[-_KEPT_ORDERS + 1 :]
            self._orders = dict([*kept, ((split, str(seed)), tuple(sorted(range(len(rows)), key=keys.__getitem__)))])
        return self._orders[split, str(seed)]

    def at(self, split: Split, index: int) -> Any:
        """Return the question with an index of :meth:`order`."""
        return self._rows[split][index].question

    def key(self, question: Any) -> str:
        """Return the name of a question by its content, numbered if several rows have the same one."""
        copy = self._copies.get((key_of(question), isinstance(question, str)), 0)
        return key_of(self.identity(question)) + (f"#{copy}" if copy else "")

    def _check(self, split: Split, n: int) -> None:
        if self.count(split) < n:
            copies = len(self._copies)
            merged = (
                f" ({copies} rows have the content of another, ids aside: see identity(question))" if copies else ""
            )
            raise ValueError(f"n={n!r}: the {split} split of {self.what} has {self.count(split)} questions{merged}")


class _Asked:
    """Finds rows that ask one question in two splits, because they differ in another key, such as a solution."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[Split, str]] = {}
        self._torn: dict[int, str] = {}

    def add(self, question: Any, split: Split, place: str) -> None:
        name = next((name for name in _ASKS if name in question), None) if isinstance(question, dict) else None
        if name is None:
            return
        asks = _hash(key_of([name, identity_of(question[name])]))
        first, there = self._first.setdefault(asks, (split, place))
        if first != split:
            self._torn.setdefault(asks, f"{name!r} of {there} ({first}) and of {place} ({split})")

    def warn(self, what: str) -> None:
        if self._torn:
            warnings.warn(
                f"{what}: {len(self._torn)} questions are in several splits, as their rows differ elsewhere: "
                f"{next(iter(self._torn.values()))}. Let identity(question) return what tells questions apart",
                stacklevel=3,
            )


def _hash(text: str, salt: bytes = b"") -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=_BITS // 8, key=salt).digest(), "big")


def _numbered(rows: list[_Row]) -> Iterable[tuple[int, _Row]]:
    """Number the rows with the same content from 0 on."""
    before, copy = -1, 0
    for row in rows:
        copy = copy + 1 if row.digest == before else 0
        before = row.digest
        yield copy, row


def _descend(rows: list[_Row], rng: Random) -> int:
    """Draw an index of ``rows``, which are sorted by their hashes, each with equal probability.

    Bit by bit of the hash, the draw goes to the rows with a 0 or those with a 1, in proportion to their numbers. So
    added rows change a draw only where they change these proportions.
    """
    low, high, above = 0, len(rows), 0
    for bit in reversed(range(_BITS)):
        if high - low == 1:
            return low
        middle = bisect_left(rows, above | 1 << bit, low, high, key=_digest)
        if rng.random() * (high - low) < middle - low:
            high = middle
        else:
            low, above = middle, above | 1 << bit
    return low + rng.randrange(high - low)


def _digest(row: _Row) -> int:
    return row.digest
