"""Parts of a draw: what artifacts weigh, as sums of which some are drawn from without looking at all artifacts."""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

from turnwise.arena.stores.slots import SlotTree

Key = tuple[float, int]
"""Negative score and slot: the best score comes first, and equal scores by arrival."""

_LAST = 2**63
"""A number above every slot."""

_CHUNK = 512
"""Keys in a chunk of :class:`SortedKeys`, on average."""


class Part(Protocol):
    """A weight for each slot, to which other parts add theirs."""

    @property
    def mass(self) -> float:
        """Sum of the weights."""

    def find(self, share: float) -> int:
        """Return the slot in which the cumulative sum passes ``share`` (0 to 1) of the mass."""
        ...

    def weight(self, slot: int) -> float: ...

    def fork(self) -> Part:
        """Return a copy of which slots can be removed."""
        ...

    def remove(self, slot: int) -> None:
        """Make a slot weigh nothing. It may weigh nothing before."""
        ...


@dataclass(slots=True)
class TreePart:
    """Items of ``tree`` weigh ``factor * (each + scale * value)``."""

    tree: SlotTree[Any]
    each: float = 1
    scale: float = 0
    factor: float = 1

    @property
    def mass(self) -> float:
        return self.factor * self._inner()

    def _inner(self) -> float:
        return self.each * len(self.tree) + self.scale * self.tree.total

    def find(self, share: float) -> int:
        return self.tree.find(share * self._inner(), self.each, self.scale)[0]

    def weight(self, slot: int) -> float:
        there = self.tree.get(slot) is not None
        return self.factor * (self.each + self.scale * self.tree.value(slot)) if there else 0.0

    def fork(self) -> TreePart:
        return replace(self, tree=self.tree.fork())

    def remove(self, slot: int) -> None:
        self.tree.drop(slot)


class SortedKeys:
    """Keys in order, in chunks that forks share. A change copies one chunk and the list of chunks."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        ordered = sorted(keys)
        self._chunks: list[Sequence[Key]] = [
            ordered[start : start + _CHUNK] for start in range(0, len(ordered), _CHUNK)
        ]
        self._count()

    def _count(self) -> None:
        self._ends = list(accumulate(map(len, self._chunks)))
        self._lasts = [chunk[-1] for chunk in self._chunks]

    def fork(self) -> SortedKeys:
        fork = SortedKeys()
        fork._chunks, fork._ends, fork._lasts = self._chunks[:], self._ends, self._lasts
        return fork

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> Key:
        chunk = bisect.bisect_right(self._ends, place)
        return self._chunks[chunk][place - self._ends[chunk]]

    def place(self, key: Key) -> int:
        """Return the number of smaller keys."""
        chunk = bisect.bisect_left(self._lasts, key)
        if chunk == len(self._chunks):
            return len(self)
        start = self._ends[chunk - 1] if chunk else 0
        return start + bisect.bisect_left(self._chunks[chunk], key)

    def add(self, key: Key) -> None:
        chunk = min(bisect.bisect_left(self._lasts, key), max(0, len(self._chunks) - 1))
        changed = [*self._chunks[chunk]] if self._chunks else []
        bisect.insort(changed, key)
        cut = len(changed) // 2 if len(changed) > 2 * _CHUNK else len(changed)
        self._chunks[chunk : chunk + 1] = [part for part in (changed[:cut], changed[cut:]) if part]
        self._count()

    def discard(self, key: Key) -> None:
        """Remove a key that is there."""
        chunk = bisect.bisect_left(self._lasts, key)
        changed = [*self._chunks[chunk]]
        del changed[bisect.bisect_left(changed, key)]
        self._chunks[chunk : chunk + 1] = [changed] if changed else []
        self._count()


class Scores:
    """Scores by slot, best first, and which of them several slots share."""

    def __init__(self, rows: Iterable[tuple[int, float]] = ()) -> None:
        self.keys = SortedKeys((-score, slot) for slot, score in rows)
        self._shared: list[float] = []
        """Negative scores that several slots share, in order."""
        before: Key | None = None
        for chunk in self.keys._chunks:
            for key in chunk:
                if before is not None and before[0] == key[0] and self._shared[-1:] != [key[0]]:
                    self._shared.append(key[0])
                before = key

    def fork(self) -> Scores:
        fork = Scores()
        fork.keys, fork._shared = self.keys.fork(), self._shared[:]
        return fork

    def add(self, slot: int, score: float) -> None:
        self.keys.add((-score, slot))
        self._note(-score)

    def remove(self, slot: int, score: float) -> None:
        self.keys.discard((-score, slot))
        self._note(-score)

    def _note(self, key: float) -> None:
        """Update whether several slots have this score."""
        start = self.keys.place((key, -1))
        several = start + 1 < len(self.keys) and self.keys[start + 1][0] == key
        at = bisect.bisect_left(self._shared, key)
        known = self._shared[at : at + 1] == [key]
        if several != known:
            self._shared[at : at + known] = [key] if several else []

    def best(self) -> float | None:
        """Return the best finite score; ``None`` if there is none."""
        unscored = self.keys.place((-math.inf, _LAST))
        return -self.keys[unscored][0] if unscored < len(self.keys) else None

    def ties(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last place, plus 1, of each group of equal scores, best first."""
        for key in self._shared:
            start = self.keys.place((key, -1))
            yield start, self.keys.place((key, _LAST))


class RankPart:
    """Slots of ``scores`` weigh ``factor * rank ** -exponent``. The best rank is 1; equal scores share their best rank.

    Slots with an infinite score have rank 1 together with those of the best finite score. ``score_of`` returns the
    score of a slot.
    """

    def __init__(
        self, scores: Scores, exponent: float, score_of: Callable[[int], float], *, factor: float = 1.0
    ) -> None:
        self._keys, self._exponent, self._score_of, self.factor = scores.keys, exponent, score_of, factor
        count = len(self._keys)
        self._tails = _tails(exponent, 1 << max(10, count.bit_length()))
        best = scores.best()
        self._best = count if best is None else self._keys.place((-best, _LAST))
        # Runs of places: (start, stop, rank). All places of a run have its rank, or each its own where that is 0.
        self._runs = [(0, self._best, 1)] if count else []
        done = self._best
        for start, stop in scores.ties():
            if start >= done:
                self._runs += [(done, start, 0), (start, stop, start + 1)]
                done = stop
        self._runs = [run for run in (*self._runs, (done, count, 0)) if run[0] < run[1]]
        self._masses = [self._mass(run) for run in self._runs]

    def _mass(self, run: tuple[int, int, int]) -> float:
        start, stop, rank = run
        return (stop - start) * self._weight(rank) if rank else self._tails[stop] - self._tails[start]

    def _weight(self, rank: int) -> float:
        return float(rank) ** -self._exponent

    @property
    def mass(self) -> float:
        return self.factor * sum(self._masses)

    def find(self, share: float) -> int:
        ends = list(accumulate(self._masses))
        rest = share * ends[-1]
        chosen = bisect.bisect_right(ends, rest, 0, len(ends) - 1)
        rest -= ends[chosen - 1] if chosen else 0.0
        start, stop, rank = self._runs[chosen]
        if rank:
            place = min(stop - 1, start + int(rest / self._weight(rank)))
        else:
            place = bisect.bisect_right(self._tails, self._tails[start] + rest, start + 1, stop) - 1
        return self._keys[place][1]

    def weight(self, slot: int) -> float:
        first = self._keys.place((-self._score_of(slot), -1))
        return self.factor * self._weight(1 if first < self._best else first + 1)

    def fork(self) -> RankPart:
        fork = copy(self)
        fork._runs, fork._masses = self._runs[:], self._masses[:]
        return fork

    def remove(self, slot: int) -> None:
        place = self._keys.place((-self._score_of(slot), slot))
        chosen = bisect.bisect_right([start for start, _, _ in self._runs], place) - 1
        start, stop, rank = self._runs[chosen]
        left = [run for run in ((start, place, rank), (place + 1, stop, rank)) if run[0] < run[1]]
        self._runs[chosen : chosen + 1] = left
        self._masses[chosen : chosen + 1] = [self._mass(run) for run in left]


@lru_cache(maxsize=8)
def _tails(exponent: float, size: int) -> array[float]:
    """Return ``T`` with ``T[i] = - sum of rank ** -exponent`` over the ranks from ``i + 1`` to ``size``, in order.

    Sums of the small weights first keep differences exact to rounding, also far down.
    """
    sums = array("d", accumulate((float(rank) ** -exponent for rank in range(size, 0, -1)), initial=0.0))
    return array("d", (-total for total in reversed(sums)))
