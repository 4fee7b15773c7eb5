"""Indexes of stores: pools to draw from that follow a store's changes, without weighing all artifacts again.

An index has the slots that a rule draws from, in trees of sums. It follows a store by the differences of two trees of
contents. A draw from the index costs the logarithm of the store's size, and so does each change since the last draw.
"""

from __future__ import annotations

import bisect
import math
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from turnwise.arena.stores.contents import StoreContents, Stored
from turnwise.arena.stores.parts import Part, RankPart, Scores, TreePart
from turnwise.arena.stores.sampling import (
    SMALL,
    Learnability,
    PrioritizedLevelReplay,
    SamplingRule,
    UniformSampling,
    Weighted,
    WeightedPool,
    learnability,
)
from turnwise.arena.stores.slots import SlotTree, changes
from turnwise.types import Artifact


class IndexedPool:
    """Artifacts to draw from, by slot. ``parts`` are their weights; without parts all weigh the same.

    ``at_least`` is a number of them that surely weigh something, and 0 only if none does.
    """

    def __init__(
        self, members: SlotTree[Any], parts: Sequence[Part], at_least: int, show: Callable[[Any], Artifact]
    ) -> None:
        self._members, self._show, self.at_least = members, show, at_least
        self._uniform = not parts
        self._parts = [part for part in parts if part.mass > 0]

    def __len__(self) -> int:
        """Return the number of artifacts that can be drawn, in time linear in all artifacts if some weigh nothing."""
        if self._uniform:
            return len(self._members)
        return sum(any(part.weight(slot) > 0 for part in self._parts) for slot, _ in self._members)

    def draw(self, k: int, replacement: bool, rng: random.Random) -> list[Artifact]:
        """Draw ``k`` artifacts. The pool must have enough."""
        if self._uniform:
            places = range(len(self._members))
            chosen = rng.choices(places, k=k) if replacement else rng.sample(places, k)
            return [self._show(self._members.find(place)[1]) for place in chosen]
        slots = []
        parts = self._parts if replacement or k == 1 else [part.fork() for part in self._parts]
        for _ in range(k):
            slots.append(_draw_slot(parts, rng))
            if parts is not self._parts:
                for part in parts:
                    part.remove(slots[-1])
        return [self._show(self._members.get(slot)) for slot in slots]


def _draw_slot(parts: Sequence[Part], rng: random.Random) -> int:
    share = rng.random()
    if len(parts) == 1:
        return parts[0].find(share)
    masses = [part.mass for part in parts]
    ends = list(accumulate(masses))
    chosen = bisect.bisect_right(ends, share * ends[-1])
    if chosen == len(parts) or not masses[chosen]:  # rounding
        chosen = max(index for index, mass in enumerate(masses) if mass > 0)
    return parts[chosen].find((share * ends[-1] - (ends[chosen] - masses[chosen])) / masses[chosen])


# ---------------------------------------------------------------------------------------------------------------------
# One index for each rule
# ---------------------------------------------------------------------------------------------------------------------
R = TypeVar("R", bound=SamplingRule)


class RuleIndex(Generic[R]):
    """The members of a pool by slot, each with the value that its rule gives it."""

    def __init__(self, rule: R, rows: Sequence[tuple[int, Stored]]) -> None:
        self.rule = rule
        self.members = SlotTree.built((slot, stored, self._value(stored)) for slot, stored in rows)
        self._positive = sum(self._value(stored) > 0 for _, stored in rows)
        """Number of members with a value above 0."""

    def _value(self, stored: Stored) -> float:
        return 0

    def change(self, slot: int, before: Stored | None, after: Stored | None) -> None:
        """Set the member of a slot; ``None`` is no member."""
        if after is None:
            self.members.drop(slot)
        else:
            self.members.put(slot, after, self._value(after))
        for stored, sign in ((before, -1), (after, 1)):
            if stored is not None and self._value(stored) > 0:
                self._positive += sign

    def parts(self, plays: int) -> tuple[list[Part], int]:
        """Return the parts of the weights, and a number of members that surely weigh something; no parts: all alike."""
        return [], len(self.members)


class _WeightedIndex(RuleIndex[Weighted]):
    def _value(self, stored: Stored) -> float:
        return stored.weight

    def parts(self, plays: int) -> tuple[list[Part], int]:
        return [TreePart(self.members.fork(), 0, 1)], self._positive


class _LearnabilityIndex(RuleIndex[Learnability]):
    def _value(self, stored: Stored) -> float:
        return learnability(stored.outcome)

    def parts(self, plays: int) -> tuple[list[Part], int]:
        tree, uniform = self.members.fork(), self.rule.uniform
        if not self._positive:
            return [TreePart(tree)], len(tree)
        part = TreePart(tree, uniform / len(tree), (1 - uniform) / tree.total)
        return [part], len(tree) if uniform else self._positive


class _RankIndex(RuleIndex[PrioritizedLevelReplay]):
    """``P_C`` by the sums of ``last``, and ``P_S`` by the order of the scores."""

    def __init__(self, rule: PrioritizedLevelReplay, rows: Sequence[tuple[int, Stored]]) -> None:
        super().__init__(rule, rows)
        self._scores = Scores((slot, _score(stored)) for slot, stored in rows)

    def _value(self, stored: Stored) -> float:
        return stored.outcome.last

    def change(self, slot: int, before: Stored | None, after: Stored | None) -> None:
        super().change(slot, before, after)
        old, new = (None if stored is None else _score(stored) for stored in (before, after))
        if old != new:
            if old is not None:
                self._scores.remove(slot, old)
            if new is not None:
                self._scores.add(slot, new)

    def parts(self, plays: int) -> tuple[list[Part], int]:
        tree, rule = self.members.fork(), self.rule
        by_score, surely = self._by_score(tree)
        by_age = TreePart(tree, plays, -1)
        if not by_age.mass:
            by_age = TreePart(tree)
        by_age.factor = rule.staleness / by_age.mass
        mass = sum(part.mass for part in by_score)
        for part in by_score:
            part.factor = (1 - rule.staleness) / mass
        return [*by_score, by_age], surely if rule.staleness < 1 else 1

    def _by_score(self, tree: SlotTree[Stored]) -> tuple[Sequence[RankPart | TreePart], int]:
        """Return the parts of ``P_S``, and a number of members that surely weigh something in it."""
        exponent = 1 / self.rule.temperature
        surely = len(tree) if float(len(tree)) ** -exponent > 0 else 1  # a low rank may be rounded to 0
        return [RankPart(self._scores.fork(), exponent, lambda slot: _score(tree.get(slot)))], surely


class _ScoreIndex(_RankIndex):
    """``P_S`` by the sums of ``(score / reference) ** (1 / temperature)``. Artifacts without a score have a tree."""

    def __init__(self, rule: PrioritizedLevelReplay, rows: Sequence[tuple[int, Stored]]) -> None:
        super().__init__(rule, rows)
        self._unscored = SlotTree.built((slot, True, 0) for slot, stored in rows if stored.outcome.score is None)
        self._set_reference()

    def _set_reference(self) -> None:
        """Measure scores in units of the best, so that their powers are neither too large nor too small."""
        self._reference = self._scores.best() or 1.0
        self._range = 2.0 ** min(100 * self.rule.temperature, 1000)
        """A best score this many times above or below the reference becomes the next one."""
        scored = ((slot, stored.outcome.score) for slot, stored in self.members)
        self._powers = SlotTree.built((slot, True, self._power(score)) for slot, score in scored if score is not None)

    def _power(self, score: float) -> float:
        ratio = score / self._reference
        return ratio ** (1 / self.rule.temperature) if ratio <= self._range else 0.0

    def change(self, slot: int, before: Stored | None, after: Stored | None) -> None:
        super().change(slot, before, after)
        self._unscored.drop(slot)
        self._powers.drop(slot)
        if after is not None and after.outcome.score is None:
            self._unscored.put(slot, True)
        elif after is not None:
            self._powers.put(slot, True, self._power(after.outcome.score or 0.0))

    def _by_score(self, tree: SlotTree[Stored]) -> tuple[Sequence[RankPart | TreePart], int]:
        best = self._scores.best()
        if not best:  # without scores all artifacts are alike, and so they are if all scores are 0
            return [TreePart(tree)], len(tree)
        if not 1 / self._range <= best / self._reference <= self._range:
            self._set_reference()
        scored, unscored = TreePart(self._powers.fork(), 0, 1), TreePart(self._unscored.fork(), self._power(best))
        return [scored, unscored], max(1, len(self._unscored))


def _score(stored: Stored | None) -> float:
    """Return the score of an artifact; an infinite one without attempts, which ranks with the best."""
    assert stored is not None
    return math.inf if stored.outcome.score is None else stored.outcome.score


_INDEXES: dict[type, Callable[..., RuleIndex[Any]]] = {
    UniformSampling: RuleIndex,
    Weighted: _WeightedIndex,
    Learnability: _LearnabilityIndex,
    PrioritizedLevelReplay: lambda rule, rows: (_RankIndex if rule.rank else _ScoreIndex)(rule, rows),
}
"""By the exact type of a rule: what inherits from it may weigh otherwise. Other rules weigh all artifacts again."""


# ---------------------------------------------------------------------------------------------------------------------
# Following a store
# ---------------------------------------------------------------------------------------------------------------------
class StoreIndex:
    """The artifacts of a store that ``holds`` accepts, for a rule. A store and its frozen views share one."""

    def __init__(self, holds: Callable[[Artifact], bool] | None = None) -> None:
        self._holds = holds
        self._seen = SlotTree[Stored]()
        self._index: RuleIndex[Any] | None = None
        self._lock = threading.Lock()

    def pool(self, contents: StoreContents, rule: SamplingRule) -> WeightedPool | IndexedPool:
        """Return the artifacts of ``contents`` that can be drawn: an index, or few of them with their weights."""
        indexed = type(rule) in _INDEXES
        if self._holds is None and type(rule) is UniformSampling:  # the contents' own tree has what it takes
            return IndexedPool(contents.tree.fork(), [], len(contents), contents.shown)
        if self._holds is None and (not indexed or len(contents) <= SMALL):
            return _weighed(contents.tree.fork(), contents, rule)
        with self._lock:
            index = self._follow(contents, rule)
            members = index.members.fork()
            if not indexed or len(members) <= SMALL:
                return _weighed(members, contents, rule)
            return IndexedPool(members, *index.parts(contents.plays), contents.shown)

    def members(self, contents: StoreContents, rule: SamplingRule) -> SlotTree[Stored]:
        """Return the accepted artifacts by slot."""
        with self._lock:
            return self._follow(contents, rule).members.fork()

    def _follow(self, contents: StoreContents, rule: SamplingRule) -> RuleIndex[Any]:
        """Apply the changes since the last call, or start again if many artifacts changed."""
        index, tree = self._index, contents.tree.fork()
        news = [] if index is None else [(slot, after) for slot, _, after in changes(self._seen, tree)]
        if index is None or index.rule != rule or 4 * len(news) > len(tree):
            rows = [(slot, stored) for slot, stored in tree if self._accepts(slot, stored)]
            index = self._index = _INDEXES.get(type(rule), RuleIndex)(rule, rows)
        else:
            for slot, after in news:
                accepted = after if after is not None and self._accepts(slot, after) else None
                if accepted is not None or index.members.get(slot) is not None:
                    index.change(slot, index.members.get(slot), accepted)
        self._seen = tree
        return index

    def _accepts(self, slot: int, stored: Stored) -> bool:
        if self._holds is None:
            return True
        before = self._seen.get(slot)
        if self._index is not None and before is not None and before.artifact is stored.artifact:
            return self._index.members.get(slot) is not None
        return self._holds(stored.artifact)


def _weighed(members: Iterable[tuple[int, Stored]], contents: StoreContents, rule: SamplingRule) -> WeightedPool:
    held = [stored for _, stored in members]
    artifacts = [contents.shown(stored) for stored in held]
    return WeightedPool(artifacts, [stored.outcome for stored in held], contents.plays, rule)
