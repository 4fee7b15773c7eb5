"""Solve rates of a pool's questions, of which versions share what is equal, and draws that follow their changes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.arena.stores.indexes import IndexedPool
from turnwise.arena.stores.parts import TreePart
from turnwise.arena.stores.sampling import AttemptStats, Learnability, learnability
from turnwise.arena.stores.slots import SlotTree, changes
from turnwise.types import Artifact

SOLVED, UNSOLVED = 0.95, 0.05
"""Solve rates from which a question counts as always solved, and up to which as never solved."""


class QuestionRates(Mapping[str, AttemptStats]):
    """Statistics of the attempted questions by id. ``numbers`` are the places of the pool's questions.

    Example: ``QuestionRates({"5f0c": 0}, {"5f0c": AttemptStats(attempts=4, success=0.5)})``
    """

    def __init__(self, numbers: Mapping[str, int], rates: Mapping[str, AttemptStats]) -> None:
        self._numbers = numbers
        rows = sorted((numbers[id], id, rates[id]) for id in rates.keys() & numbers.keys())
        self.tree = SlotTree.built((number, (id, stats), 0) for number, id, stats in rows)
        self._others = {id: stats for id, stats in rates.items() if id not in numbers}
        """Of a saved state's questions that the pool lacks now."""
        self.always = sum(stats.success >= SOLVED for _, _, stats in rows)
        self.never = sum(stats.success <= UNSOLVED for _, _, stats in rows)

    def updated(self, changed: Mapping[str, AttemptStats]) -> QuestionRates:
        """Return the rates with those of some questions of the pool replaced, at the cost of these."""
        fresh = QuestionRates(self._numbers, {})
        fresh.tree, fresh._others = self.tree.fork(), self._others
        fresh.always, fresh.never = self.always, self.never
        for id, stats in changed.items():
            for each, sign in ((self.get(id), -1), (stats, 1)):
                if each is not None:
                    fresh.always += sign * (each.success >= SOLVED)
                    fresh.never += sign * (each.success <= UNSOLVED)
            fresh.tree.put(self._numbers[id], (id, stats))
        return fresh

    @property
    def seen(self) -> int:
        """Number of attempted questions of the pool."""
        return len(self.tree)

    def __getitem__(self, id: str) -> AttemptStats:
        held = self.tree.get(self._numbers[id]) if id in self._numbers else None
        return self._others[id] if held is None else held[1]

    def __iter__(self) -> Iterator[str]:
        return (id for id, _ in self.rows())

    def rows(self) -> Iterator[tuple[str, AttemptStats]]:
        """Yield the items, faster than ``items()`` does."""
        yield from (row for _, row in self.tree)
        yield from self._others.items()

    def __len__(self) -> int:
        return len(self.tree) + len(self._others)


class QuestionIndex:
    """Draws questions by learnability. A question without attempts counts as its level does.

    ``levels`` has the level of each question. A draw costs the changes of the rates since the last one.
    """

    def __init__(self, questions: Sequence[Artifact], levels: Sequence[int], rule: Learnability) -> None:
        self._levels, self._rule, self._lock = levels, rule, threading.Lock()
        self._questions = SlotTree.built((number, artifact, 0) for number, artifact in enumerate(questions))
        self._followed: SlotTree[tuple[str, AttemptStats]] = SlotTree()
        numbers: dict[int, list[int]] = {}
        for number, level in enumerate(levels):
            numbers.setdefault(level, []).append(number)
        self._unseen = {level: SlotTree.built((n, True, 0) for n in these) for level, these in numbers.items()}
        self._seen = {level: SlotTree[bool]() for level in numbers}

    def pool(
        self, rates: QuestionRates, admitted: Iterable[int], level_rates: Mapping[int, AttemptStats]
    ) -> IndexedPool:
        """Return the questions of the ``admitted`` levels, by these rates."""
        with self._lock:
            self._follow(rates.tree)
            trees = [(self._seen[level].fork(), self._unseen[level].fork(), level_rates[level]) for level in admitted]
        count = sum(len(seen) + len(unseen) for seen, unseen, _ in trees)
        mass = sum(seen.total + len(unseen) * learnability(stats) for seen, unseen, stats in trees)
        # As the rule weighs: a share that all have alike, and one in proportion to p (1 - p).
        each, scale = (self._rule.uniform / count, (1 - self._rule.uniform) / mass) if mass > 0 else (1.0, 0.0)
        parts: list[Any] = []
        for seen, unseen, stats in trees:
            parts += [TreePart(seen, each, scale), TreePart(unseen, each + scale * learnability(stats))]
        return IndexedPool(self._questions, parts, count if each else 1, lambda artifact: artifact)

    def _follow(self, tree: SlotTree[tuple[str, AttemptStats]]) -> None:
        for number, before, after in changes(self._followed, tree):
            seen, unseen = (trees[self._levels[number]] for trees in (self._seen, self._unseen))
            if after is None:
                seen.drop(number)
                unseen.put(number, True)
            else:
                if before is None:
                    unseen.drop(number)
                seen.put(number, True, learnability(after[1]))
        self._followed = tree.fork()
