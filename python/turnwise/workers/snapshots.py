"""Snapshots of stores for workers: each worker gets what changed since the snapshot that it got last."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

from turnwise.arena import ArtifactStore
from turnwise.arena.stores.contents import ContentChanges, StoreContents
from turnwise.arena.stores.holdout import StoreIndexes
from turnwise.arena.stores.store import FrozenStore
from turnwise.workers.stores import BatchStore, shared_split

_OWN = ("_held", "_indexes", "_drawn", "_layers", "_preexisting_ids")
"""Attributes of a view that a worker makes itself, or keeps from the snapshot before."""


class _SentStore(NamedTuple):
    """A store of a snapshot. ``begins`` if the worker has nothing of it yet."""

    kind: type[FrozenStore]
    attributes: dict[str, Any]
    begins: bool
    changes: ContentChanges
    preexisting_ids: frozenset[str] | None
    """``None`` for those of the snapshot before."""


class StoreSnapshot:
    """The stores of an arena as they are now. It is a fork, so it costs the same at every size.

    Example: ``first = StoreSnapshot(0, arena.stores, evaluation=False)``, later ``second.since(first)``
    """

    def __init__(self, number: int, stores: Mapping[str, ArtifactStore], *, evaluation: bool) -> None:
        self.number = number
        self._views: dict[str, FrozenStore] = {}
        for name, store in stores.items():
            self._views[name] = FrozenStore(store) if evaluation else BatchStore(store)
            self._views[name]._split = shared_split(store._split)
        self._contents: dict[int | None, bytes] = {}

    def since(self, before: StoreSnapshot | None) -> bytes:
        """Return the pickle for a worker that got ``before`` last; ``None``: a worker that got none.

        Raises ``TypeError`` that names a store whose content or sampling rule can't be pickled.
        """
        number = None if before is None else before.number
        if number not in self._contents:
            known = {} if before is None else before._views
            sent = {name: _pickled(name, view, known.get(name)) for name, view in self._views.items()}
            self._contents[number] = pickle.dumps(sent, protocol=5)
        return self._contents[number]


def _pickled(name: str, view: FrozenStore, before: FrozenStore | None) -> bytes:
    same = before is not None and before._preexisting_ids is view._preexisting_ids
    attributes = {key: value for key, value in vars(view).items() if key not in _OWN}
    changes = view._held.changes_since(None if before is None else before._held)
    ids = None if same else view._preexisting_ids
    try:
        return pickle.dumps(_SentStore(type(view), attributes, before is None, changes, ids), protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"store {name!r} can't be sent to the workers: {error}") from error


class SnapshotReader:
    """A worker's side of one connection: makes the stores of each snapshot of those of the one before."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[StoreContents, StoreIndexes, frozenset[str]]] = {}

    def read(self, content: bytes) -> dict[str, FrozenStore]:
        """Return the stores of :meth:`StoreSnapshot.since`, since the snapshot that was read last."""
        stores: dict[str, FrozenStore] = {}
        for name, pickled in pickle.loads(content).items():
            sent: _SentStore = pickle.loads(pickled)
            if sent.begins:
                keyed = sent.attributes["dedup"]
                self._latest[name] = StoreContents(keyed=keyed), StoreIndexes(), frozenset()
            contents, indexes, ids = self._latest[name]
            contents.follow(sent.changes)
            ids = ids if sent.preexisting_ids is None else sent.preexisting_ids
            self._latest[name] = contents, indexes, ids
            store = stores[name] = sent.kind.__new__(sent.kind)
            vars(store).update(sent.attributes)
            store._held, store._indexes, store._drawn = contents.fork(), indexes, None
            store._layers, store._preexisting_ids = {}, ids
        return stores
