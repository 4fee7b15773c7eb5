"""Held out or trained on: by a hash of the content, so that no order of adding, removing or reloading decides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.arena.drawing import Drawable, Pool
from turnwise.arena.tape import logged_method
from turnwise.types import Artifact

if TYPE_CHECKING:
    from turnwise.arena.store import ArtifactStore
    from turnwise.arena.store_contents import Contents

SIDES = ("train", "eval")


@dataclass(frozen=True, slots=True)
class SplitRule:
    """``share`` of all contents, about, are for ``"eval"``; ``key(data)`` picks what of the data counts.

    ``any_key`` is a division known from a saved state, which holds no functions: every key agrees with it.
    """

    share: float = 0.1
    key: Callable[[Any], Any] | None = None
    any_key: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share={self.share!r}: expected a number between 0 and 1")
        if self.key is not None and not callable(self.key):
            raise TypeError(f"key={self.key!r}: expected a callable, data -> what counts, or None")

    def agrees(self, other: SplitRule) -> bool:
        return self.share == other.share and (self.key == other.key or other.any_key)

    def check_side(self, side: str) -> str:
        if side not in SIDES:
            raise ValueError(f"side={side!r}: expected one of {SIDES}")
        return side

    def side_of(self, data: Any) -> str:
        """``"train"`` or ``"eval"``."""
        digest = content_digest(data if self.key is None else self.key(data))
        return "eval" if int.from_bytes(digest[:8], "big") < self.share * 2**64 else "train"


class StoreSide(Drawable):
    """One side of a store's split, as :meth:`ArtifactStore.split` gives it; draws as its store does."""

    def __init__(self, store: ArtifactStore, side: str, rule: SplitRule) -> None:
        self._store, self.side, self._rule = store, side, rule
        self._sides: dict[str, tuple[Artifact, str]] = {}
        self._drawn: tuple[Contents, int, Pool] | None = None

    @property
    def store(self) -> ArtifactStore:
        return self._store

    @property
    def label(self) -> str:
        return f"{self._store.name}.{self.side}"

    @logged_method()
    def __contains__(self, id: str) -> bool:
        return id in self._store and self._holds(self._store.get(id))

    @logged_method()
    def __iter__(self) -> Iterator[Artifact]:
        return (artifact for artifact in self._store if self._holds(artifact))

    def _holds(self, artifact: Artifact) -> bool:
        known = self._sides.get(artifact.id)
        if known is None or known[0] is not artifact:  # an id may be given again, to other data
            known = self._sides[artifact.id] = artifact, self._rule.side_of(artifact.data)
        return known[1] == self.side

    def _pool(self) -> Pool:
        store = self._store
        store._catch_up()
        held = store._contents
        if self._drawn is None or self._drawn[0] is not held or self._drawn[1] != held.version:
            artifacts = list(self)
            outcomes = [held.outcome(artifact.id) for artifact in artifacts]
            self._sides = {id: known for id, known in self._sides.items() if id in held.artifacts}
            self._drawn = held, held.version, Pool(artifacts, outcomes, held.plays, store.sampling)
        return self._drawn[2]


def content_digest(value: Any) -> bytes:
    """16 bytes that are the same for the same content, in every process and after a round trip through JSON.

    So a tuple counts as a list, a set as a list in some order, and 1, 1.0, True and the keys 1 and "1" are one.
    Raises ``TypeError`` for an object whose content is unknown.
    """
    if value is None or isinstance(value, (str, bytes)):
        text = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        parts = [type(value).__name__.encode(), text]
    elif isinstance(value, (bool, int, float, np.number, np.bool_)):
        number = value.item() if isinstance(value, (np.number, np.bool_)) else value
        whole = isinstance(number, (bool, int)) or (isinstance(number, float) and number.is_integer())
        parts = [b"number", repr(int(number) if whole else number).encode()]
    elif isinstance(value, Mapping):
        items = (content_digest(str(key)) + content_digest(item) for key, item in value.items())
        parts = [b"dict", *sorted(items)]
    elif isinstance(value, (set, frozenset)):
        parts = [b"list", *sorted(map(content_digest, value))]
    elif isinstance(value, (list, tuple, np.ndarray)):
        parts = [b"list", *map(content_digest, value.tolist() if isinstance(value, np.ndarray) else value)]
    elif is_dataclass(value) and not isinstance(value, type):
        return content_digest({field.name: getattr(value, field.name) for field in fields(value)})
    else:
        raise TypeError(
            f"data of type {type(value).__name__!r} can't be put on a side: give split() a key=, data -> what counts"
        )
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
