"""A store's contents in memory: artifacts by id, statistics of their attempts, and an index by content."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from turnwise.arena.runtime.hashing import content_key
from turnwise.arena.stores.sampling import AttemptStats
from turnwise.arena.stores.sqlite import ExternalChanges
from turnwise.types import Artifact, GenerateResult, Rollout

K = TypeVar("K")
V = TypeVar("V")
UNKNOWN = AttemptStats()
"""Statistics of an artifact without attempts."""


class StoreContents:
    """Artifacts by id, in order of arrival. With ``keyed`` also by content.

    ``version`` counts changes, ``added`` all artifacts ever added, ``plays`` the attempts at any artifact.
    """

    def __init__(self, *, keyed: bool = False) -> None:
        self.artifacts: MutableMapping[str, Artifact] = {}
        self.outcomes: MutableMapping[str, AttemptStats] = {}
        self.version = self.added = self.plays = 0
        self._keyed = keyed
        self._id_of: MutableMapping[Hashable, str] = {}
        self._key_of: MutableMapping[str, Hashable] = {}

    def key(self, artifact: Artifact) -> Hashable:
        """Return the key of the artifact's content; ``None`` unless ``keyed``."""
        return content_key(artifact.data) if self._keyed else None

    def has(self, key: Hashable) -> bool:
        """True if an artifact with this content :meth:`key` is present."""
        return key in self._id_of

    def outcome(self, id: str) -> AttemptStats:
        return self.outcomes.get(id, UNKNOWN)

    def keep(self, artifact: Artifact, outcome: AttemptStats, key: Hashable) -> None:
        """Add an artifact under its content :meth:`key`."""
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

    def put(self, id: str, outcome: AttemptStats) -> None:
        """Set the statistics of an artifact."""
        self.outcomes[id] = outcome
        self.version += 1

    def weigh(self, id: str, weight: float) -> Artifact:
        """Set an artifact's weight and return the artifact."""
        self.artifacts[id].weight = weight
        return self.artifacts[id]

    def ancestors(self, id: str) -> list[str]:
        """Return the ids that ``id`` was made from, directly or through others, nearest first."""
        found: dict[str, None] = {}
        generation = list(self.artifacts[id].parents)
        while generation:
            new = [parent for parent in dict.fromkeys(generation) if parent not in found and parent != id]
            found.update(dict.fromkeys(new))
            generation = [parent for one in new if one in self.artifacts for parent in self.artifacts[one].parents]
        return list(found)

    def descendants(self, id: str) -> list[str]:
        """Return the ids made from ``id``, directly or through others, in order of arrival."""
        children: dict[str, list[str]] = {}
        for artifact in self.artifacts.values():
            for parent in artifact.parents:
                children.setdefault(parent, []).append(artifact.id)
        found: set[str] = set()
        waiting = [id]
        while waiting:
            new = [child for child in children.get(waiting.pop(), ()) if child not in found and child != id]
            found.update(new)
            waiting += new
        return [known for known in self.artifacts if known in found]

    def clear(self) -> None:
        for mapping in (self.artifacts, self.outcomes, self._id_of, self._key_of):
            mapping.clear()
        self.version += 1

    def take(self, news: ExternalChanges) -> None:
        """Apply changes that were read from the file."""
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

    def state_dict(self) -> dict[str, Any]:
        """Return artifacts and statistics, for a store without a file."""
        names = ("id", "data", "weight", "source", "meta", "parents", "run")
        artifacts = [{name: getattr(artifact, name) for name in names} for artifact in self.artifacts.values()]
        return {"artifacts": artifacts, "outcomes": {id: asdict(outcome) for id, outcome in self.outcomes.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, and the counts ``added`` and ``plays`` beside it."""
        self.clear()
        for item in state["artifacts"]:
            artifact = Artifact(**{**item, "parents": tuple(item.get("parents", ()))})
            known = state.get("outcomes", {}).get(artifact.id)
            self.keep(artifact, UNKNOWN if known is None else AttemptStats(**known), self.key(artifact))
        self.added, self.plays = state["added"], state.get("plays", 0)

    def copied(self) -> StoreContents:
        """Return an independent copy."""
        copied = self._like(StoreContents)
        copied.artifacts = {a.id: replace(a, meta=dict(a.meta)) for a in self.artifacts.values()}
        copied.outcomes = dict(self.outcomes)
        copied._id_of, copied._key_of = dict(self._id_of), dict(self._key_of)
        return copied

    def layer(self) -> StoreContents:
        """Return an overlay; its changes do not reach this object. This object must not change while it is in use."""
        layer = self._like(_OverlayContents)
        layer.artifacts, layer.outcomes = _OverlayDict(self.artifacts), _OverlayDict(self.outcomes)
        layer._id_of, layer._key_of = _OverlayDict(self._id_of), _OverlayDict(self._key_of)
        return layer

    def _like(self, kind: type[StoreContents]) -> StoreContents:
        fresh = kind(keyed=self._keyed)
        fresh.added, fresh.plays = self.added, self.plays
        return fresh


class _OverlayContents(StoreContents):
    def weigh(self, id: str, weight: float) -> Artifact:
        self.artifacts[id] = replace(self.artifacts[id], weight=weight)
        return self.artifacts[id]


class _OverlayDict(MutableMapping[K, V]):
    """A dict that starts equal to another one and leaves that one unchanged. It has the order of a copy."""

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


def check_weight(weight: float) -> None:
    """Raise ``ValueError`` for a weight that is negative or not finite."""
    if not weight >= 0 or weight == float("inf"):
        raise ValueError(f"weight={weight!r}: expected a finite number >= 0")


def parent_ids(parents: Sequence[str]) -> tuple[str, ...]:
    """Return ``parents`` as a tuple. Raises ``TypeError`` for a single string, and for items that are not strings."""
    if isinstance(parents, str) or not all(isinstance(parent, str) for parent in parents):
        raise TypeError(f"parents={parents!r}: expected ids of artifacts, such as ['questions-3']")
    return tuple(parents)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rollout on artifact ``id``."""

    id: str
    reward: float
    success: float
    score: float | None
    """Mean ``|advantage|`` of the batch on this artifact; ``None`` without advantages."""


def attempts_of(results: Sequence[GenerateResult], judge: Callable[[Rollout], tuple[float, float]]) -> list[Attempt]:
    """Return the finished attempts at stored artifacts, nested ones too. ``judge`` returns reward and success."""
    everything = (result.rollout for top in results for result in top.walk())
    rollouts = [
        (id, rollout)
        for rollout in everything
        if (id := artifact_id(rollout)) is not None and rollout.error is None and rollout.facts.dropped is None
    ]
    surprises: dict[str, list[float]] = {}
    for id, rollout in rollouts:
        surprises.setdefault(id, []).extend(abs(s.advantage) for s in rollout.steps if s.advantage is not None)
    scores = {id: sum(found) / len(found) if found else None for id, found in surprises.items()}
    return [Attempt(id, *judge(rollout), scores[id]) for id, rollout in rollouts]


def artifact_id(rollout: Rollout) -> str | None:
    """Return the id of the rollout's artifact, or ``request.meta["artifact_id"]``; ``None`` without either."""
    if isinstance(rollout.artifact, Artifact):
        return rollout.artifact.id
    return rollout.meta.get("artifact_id")


def mean_reward(rollout: Rollout) -> tuple[float, float]:
    """Return the mean reward of the rewarded actors, and 1 if it is above 0, else 0."""
    reward = sum(rollout.rewards.values()) / len(rollout.rewards) if rollout.rewards else 0.0
    return reward, float(reward > 0)


def record_attempts(stores: Mapping[str, Any], attempts: Iterable[Attempt]) -> None:
    """Record ``attempts`` in each store that has their artifact. Ignore attempts at removed artifacts."""
    attempts = list(attempts)
    for store in stores.values():
        mine = [attempt for attempt in attempts if attempt.id in store]
        if mine:
            with store.transaction():
                for attempt in mine:
                    store.record(attempt.id, attempt.reward, success=attempt.success, score=attempt.score)
