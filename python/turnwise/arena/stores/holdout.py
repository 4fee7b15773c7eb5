"""Train and eval sides of a store. A hash of the content decides, so order and reloading do not matter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.arena.runtime.hashing import content_digest
from turnwise.arena.runtime.recording_hooks import records_input
from turnwise.arena.stores.contents import StoreContents
from turnwise.arena.stores.sampling import Samplable, SamplingRule, WeightedPool
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


class StoreView(Protocol):
    """The part of a store that one side of its split reads."""

    name: str
    sampling: SamplingRule
    _rng: random.Random

    @property
    def _contents(self) -> StoreContents: ...

    def _catch_up(self) -> None: ...

    def get(self, id: str) -> Artifact: ...

    def __contains__(self, id: str) -> bool: ...

    def __iter__(self) -> Iterator[Artifact]: ...


class StoreSplit(Samplable):
    """One side of a store's split, from :meth:`ArtifactStore.split`. It samples by the store's rule."""

    def __init__(self, store: StoreView, side: str, rule: HashSplit) -> None:
        self._store, self.side, self._rule = store, side, rule
        self.name, self._rng = store.name, store._rng
        self._sides: dict[str, tuple[Artifact, str]] = {}
        self._drawn: tuple[StoreContents, int, WeightedPool] | None = None

    @property
    def label(self) -> str:
        return f"{self.name}.{self.side}"

    @records_input()
    def __contains__(self, id: str) -> bool:
        return id in self._store and self._holds(self._store.get(id))

    @records_input()
    def __iter__(self) -> Iterator[Artifact]:
        return (artifact for artifact in self._store if self._holds(artifact))

    def _holds(self, artifact: Artifact) -> bool:
        side = self._sides.get(artifact.id)
        if side is None or side[0] is not artifact:  # an id may be used again for other data
            side = self._sides[artifact.id] = artifact, self._rule.side_of(artifact.data)
        return side[1] == self.side

    def _pool(self) -> WeightedPool:
        store = self._store
        store._catch_up()
        contents = store._contents
        if self._drawn is None or self._drawn[0] is not contents or self._drawn[1] != contents.version:
            artifacts = list(self)
            outcomes = [contents.outcome(artifact.id) for artifact in artifacts]
            self._sides = {id: side for id, side in self._sides.items() if id in contents.artifacts}
            self._drawn = contents, contents.version, WeightedPool(artifacts, outcomes, contents.plays, store.sampling)
        return self._drawn[2]
