"""What a store holds in memory, of a file too: artifacts by id, how attempts at them went, and which data are there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from turnwise.arena.context import content_key
from turnwise.arena.drawing import Outcome
from turnwise.arena.store_file import News
from turnwise.types import Artifact

UNKNOWN = Outcome()
"""Of what was never attempted."""


class Contents:
    """Artifacts by id, in order of arrival; with ``keyed`` by the content of their data as well.

    ``version`` counts the changes, for who keeps what it made of them.
    """

    def __init__(self, *, keyed: bool = False) -> None:
        self.artifacts: dict[str, Artifact] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.version = 0
        self._keyed = keyed
        self._id_of: dict[Hashable, str] = {}
        self._key_of: dict[str, Hashable] = {}

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
        self.version += 1

    def copied(self) -> Contents:
        """The same now, which does not follow; without keys."""
        copied = Contents()
        copied.artifacts = {a.id: replace(a, meta=dict(a.meta)) for a in self.artifacts.values()}
        copied.outcomes = dict(self.outcomes)
        return copied
