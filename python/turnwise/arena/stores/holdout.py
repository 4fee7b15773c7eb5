"""Train and eval sides of a store. A hash of the content decides, so order and reloading do not matter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.arena.runtime.hashing import content_digest
from turnwise.arena.runtime.recording_hooks import records_input
from turnwise.arena.stores.contents import StoreContents, Stored
from turnwise.arena.stores.indexes import StoreIndex
from turnwise.arena.stores.sampling import Pool, Samplable, SamplingRule
from turnwise.arena.stores.slots import SlotTree
from turnwise.types import Artifact

SIDES = ("train", "eval")


@dataclass(frozen=True, slots=True)
class HashSplit:
    """Sends about ``share`` of all contents to ``"eval"``. ``key(data)`` selects the part of the data that decides.

    ``any_key`` marks a split restored from a saved state. A state holds no functions, so every key agrees with it.
    """

    share: float = 0.1
    key: Callable[[Any], Any] | None = None
    any_key: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share={self.share!r}: expected a number between 0 and 1")
        if self.key is not None and not callable(self.key):
            raise TypeError(f"key={self.key!r}: expected a callable, data -> what counts, or None")

    def agrees(self, other: HashSplit) -> bool:
        return self.share == other.share and (self.key == other.key or other.any_key)

    def check_side(self, side: str) -> str:
        if side not in SIDES:
            raise ValueError(f"side={side!r}: expected one of {SIDES}")
        return side

    def side_of(self, data: Any) -> str:
        """Return ``"train"`` or ``"eval"``."""
        digest = content_digest(data if self.key is None else self.key(data))
        return "eval" if int.from_bytes(digest[:8], "big") < self.share * 2**64 else "train"


class StoreIndexes:
    """The index of a store's artifacts, and one for each side of its split. Its frozen views have the same."""

    def __init__(self) -> None:
        self.whole = StoreIndex()
        self._sides: dict[str, tuple[HashSplit, StoreIndex]] = {}

    def side(self, side: str, split: HashSplit) -> StoreIndex:
        known = self._sides.get(side)
        if known is None or known[0] != split:
            index = StoreIndex(lambda artifact: split.side_of(artifact.data) == side)
            known = self._sides[side] = split, index
        return known[1]


class SplitStore(Protocol):
    """The part of a store that one side of its split reads."""

    name: str
    sampling: SamplingRule
    _rng: random.Random
    _indexes: StoreIndexes

    @property
    def _contents(self) -> StoreContents: ...

    def _catch_up(self) -> None: ...


class StoreSplit(Samplable):
    """One side of a store's split, from :meth:`ArtifactStore.split`. It samples by the store's rule."""

    def __init__(self, store: SplitStore, side: str, rule: HashSplit) -> None:
        self._store, self.side = store, side
        self.name, self._rng = store.name, store._rng
        self._index = store._indexes.side(side, rule)
        self._drawn: tuple[StoreContents, int, Pool] | None = None

    @property
    def label(self) -> str:
        return f"{self.name}.{self.side}"

    @records_input()
    def __contains__(self, id: str) -> bool:
        contents, members = self._members()
        slot = contents.slot(id)
        return slot is not None and members.get(slot) is not None

    @records_input()
    def count(self) -> int:
        return len(self._members()[1])

    @records_input()
    def __iter__(self) -> Iterator[Artifact]:
        contents, members = self._members()
        return (contents.shown(stored) for _, stored in members)

    def _members(self) -> tuple[StoreContents, SlotTree[Stored]]:
        """Return the store's contents, and this side of them by slot."""
        self._store._catch_up()
        contents = self._store._contents
        return contents, self._index.members(contents, self._store.sampling)

    def _pool(self) -> Pool:
        store = self._store
        store._catch_up()
        contents = store._contents
        if self._drawn is None or self._drawn[0] is not contents or self._drawn[1] != contents.version:
            self._drawn = contents, contents.version, self._index.pool(contents, store.sampling)
        return self._drawn[2]
