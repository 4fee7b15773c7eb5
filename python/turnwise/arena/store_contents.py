"""What a store holds in memory, of a file too: artifacts by id, how attempts at them went, and which data are there."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from dataclasses import replace
from typing import TypeVar

from turnwise.arena.context import content_key
from turnwise.arena.drawing import Outcome
from turnwise.arena.store_file import News
from turnwise.types import Artifact

K = TypeVar("K")
V = TypeVar("V")
UNKNOWN = Outcome()
"""Of what was never attempted."""


class Contents:
    """Artifacts by id, in order of arrival; with ``keyed`` by the content of their data as well.

    ``version`` counts the changes, for who keeps what it made of them; ``added`` the artifacts that ever came, and
    ``plays`` the attempts at any.
    """

    def __init__(self, *, keyed: bool = False) -> None:
        self.artifacts: MutableMapping[str, Artifact] = {}
        self.outcomes: MutableMapping[str, Outcome] = {}
        self.version = self.added = self.plays = 0
        self._keyed = keyed
        self._id_of: MutableMapping[Hashable, str] = {}
        self._key_of: MutableMapping[str, Hashable] = {}

    def key(self, artifact: Artifact) -> Hashable:
        """What data of the same content share; ``None`` where that is not ``keyed``."""
        return content_key(artifact.data) if self._keyed else None

    def has(self, key: Hashable) -> bool:
        """Whether data of this :meth:`key` are there."""
        return key in self._id_of

    def outcome(self, id: str) -> Outcome:
        return self.outcomes.get(id, UNKNOWN)

    def keep(self, artifact: Artifact, outcome: Outcome, key: Hashable) -> None:
        """Take in a new one, with its :meth:`key`."""
        self.artifacts[artifact.id] = artifact
        if outcome is not UNKNOWN:
            self.outcomes[artifact.id] = outcome
        if self._keyed:
            self._id_of.setdefault(key, artifact.id)
            self._key_of[artifact.id] = key
        self.version += 1

    def drop(self, id: str) -> None:
        del self.artifacts[id]
        self.outcomes.pop(id, None)
        if self._keyed and self._id_of.get(key := self._key_of.pop(id)) == id:
            del self._id_of[key]
        self.version += 1

    def put(self, id: str, outcome: Outcome) -> None:
        """What is known of one that is there has changed."""
        self.outcomes[id] = outcome
        self.version += 1

    def weigh(self, id: str, weight: float) -> Artifact:
        """The artifact of this id, with another weight."""
        self.artifacts[id].weight = weight
        return self.artifacts[id]

    def clear(self) -> None:
        for held in (self.artifacts, self.outcomes, self._id_of, self._key_of):
            held.clear()
        self.version += 1

    def take(self, news: News) -> None:
        """Be what the file holds now."""
        if news.whole:
            self.clear()
        for id in news.removed:
            self.drop(id)
        for artifact, outcome in news.present:
            if artifact.id in self.artifacts:
                self.artifacts[artifact.id].weight = artifact.weight
                self.outcomes[artifact.id] = outcome
            else:
                self.keep(artifact, outcome, self.key(artifact))
        self.added, self.plays = news.made, news.plays
        self.version += 1

    def copied(self) -> Contents:
        """The same now, which does not follow."""
        copied = self._like(Contents)
        copied.artifacts = {a.id: replace(a, meta=dict(a.meta)) for a in self.artifacts.values()}
        copied.outcomes = dict(self.outcomes)
        copied._id_of, copied._key_of = dict(self._id_of), dict(self._key_of)
        return copied

    def layer(self) -> Contents:
        """The same, to be changed as long as this one is not: the changes stand in the layer alone."""
        layer = self._like(_Layer)
        layer.artifacts, layer.outcomes = _Over(self.artifacts), _Over(self.outcomes)
        layer._id_of, layer._key_of = _Over(self._id_of), _Over(self._key_of)
        return layer

    def _like(self, kind: type[Contents]) -> Contents:
        fresh = kind(keyed=self._keyed)
        fresh.added, fresh.plays = self.added, self.plays
        return fresh


class _Layer(Contents):
    def weigh(self, id: str, weight: float) -> Artifact:
        self.artifacts[id] = replace(self.artifacts[id], weight=weight)
        return self.artifacts[id]


class _Over(MutableMapping[K, V]):
    """A dict that begins as another one is, which it does not change; in the order that a copy would have."""

    def __init__(self, below: MutableMapping[K, V]) -> None:
        self._below = below
        self._own: dict[K, V] = {}
        self._gone: set[K] = set()

    def __getitem__(self, key: K) -> V:
        if key in self._own:
            return self._own[key]
        if key in self._gone:
            raise KeyError(key)
        return self._below[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._own[key] = value

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self._own.pop(key, None)
        if key in self._below:
            self._gone.add(key)

    def __iter__(self) -> Iterator[K]:
        yield from (key for key in self._below if key not in self._gone)
        yield from self._new()

    def __len__(self) -> int:
        return len(self._below) - len(self._gone) + sum(1 for _ in self._new())

    def _new(self) -> Iterator[K]:
        return (key for key in self._own if key in self._gone or key not in self._below)
