"""A store's contents in memory: artifacts with the statistics of their attempts, in order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from turnwise.arena.runtime.hashing import content_key
from turnwise.arena.stores.sampling import AttemptStats
from turnwise.arena.stores.slots import SlotTree, changes
from turnwise.arena.stores.sqlite import ExternalChanges
from turnwise.types import Artifact, GenerateResult, Rollout

UNKNOWN = AttemptStats()
"""Statistics of an artifact without attempts."""

_MIN_GONE = 1024
"""Removed artifacts from which on the directories are made again once most of their entries are of such."""


class Stored(NamedTuple):
    """An artifact as a store holds it. A change of its weight or statistics makes another one."""

    artifact: Artifact
    weight: float
    """The artifact's weight when this was made; the store may change the artifact's own later."""
    outcome: AttemptStats
    key: Hashable
    """Key of its content, see :meth:`StoreContents.key`."""


class ContentChanges(NamedTuple):
    """How contents differ from earlier ones. Keys of the content are left out."""

    slots: list[tuple[int, Stored | None]]
    """The new content of each slot that changed; ``None`` is an empty slot."""
    next: int
    added: int
    plays: int


class _Directory:
    """Slots by key. Forks share its entries, so a slot may hold what another fork put there: the reader compares."""

    __slots__ = ("_own", "_shared")

    def __init__(self, shared: tuple[dict[Hashable, tuple[int, ...]], ...] = ()) -> None:
        self._own: dict[Hashable, tuple[int, ...]] = {}
        self._shared = shared

    def fork(self) -> _Directory:
        """Return a directory with its own entries above these. New ones may appear below, of no slot of the fork."""
        return _Directory((self._own, *self._shared) if self._own else self._shared)

    def add(self, key: Hashable, slot: int) -> None:
        self._own[key] = (*self._own.get(key, ()), slot)

    def slots(self, key: Hashable) -> tuple[int, ...]:
        found = self._own.get(key, ())
        for shared in self._shared:
            found += shared.get(key, ())
        return found


class StoreContents:
    """Artifacts by id, in order of arrival. With ``keyed`` also by content.

    ``version`` counts changes, ``added`` all artifacts ever added, ``plays`` the attempts at any artifact. ``tree`` has
    the artifacts by slot, which is their number among all that came.
    """

    def __init__(self, *, keyed: bool = False) -> None:
        self.tree = SlotTree[Stored]()
        self.version = self.added = self.plays = 0
        self._keyed = keyed
        self._start_directories()

    def _start_directories(self) -> None:
        self._next = self._gone = 0
        self._by_id, self._by_key, self._by_parent = _Directory(), _Directory(), _Directory()

    # -- reading -------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.tree)

    def __contains__(self, id: str) -> bool:
        return self.slot(id) is not None

    def __iter__(self) -> Iterator[Artifact]:
        return (self.shown(stored) for _, stored in self.tree.fork())

    def get(self, id: str) -> Artifact | None:
        slot = self.slot(id)
        return None if slot is None else self.shown(self._at(slot))

    def oldest(self) -> str:
        return self.tree.find(0)[1].artifact.id

    def outcome(self, id: str) -> AttemptStats:
        slot = self.slot(id)
        return UNKNOWN if slot is None else self._at(slot).outcome

    def shown(self, stored: Stored) -> Artifact:
        """Return the artifact that a reader gets."""
        return stored.artifact

    def key(self, artifact: Artifact) -> Hashable:
        """Return the key of the artifact's content; ``None`` unless ``keyed``."""
        return content_key(artifact.data) if self._keyed else None

    def id_of(self, key: Hashable) -> str | None:
        """Return the id of an artifact with this content :meth:`key`; ``None`` if none is present."""
        for slot in self._by_key.slots(key):
            held = self.tree.get(slot)
            if held is not None and held.key == key:
                return held.artifact.id
        return None

    def slot(self, id: str) -> int | None:
        for slot in reversed(self._by_id.slots(id)):  # the latest of this id, most often
            held = self.tree.get(slot)
            if held is not None and held.artifact.id == id:
                return slot
        return None

    def _at(self, slot: int) -> Stored:
        held = self.tree.get(slot)
        assert held is not None
        return held

    # -- changing ------------------------------------------------------------------------------------------------------
    def keep(self, artifact: Artifact, outcome: AttemptStats, key: Hashable) -> None:
        """Add an artifact under its content :meth:`key`."""
        self._hold(self._next, Stored(artifact, artifact.weight, outcome, key))

    def _stored(self, artifact: Artifact, outcome: AttemptStats) -> Stored:
        return Stored(artifact, artifact.weight, outcome, self.key(artifact))

    def _hold_all(self, present: Iterable[Stored]) -> None:
        """Replace everything by ``present``, in this order."""
        self.clear()
        rows = list(enumerate(present))
        self.tree = SlotTree.built((slot, stored, 0) for slot, stored in rows)
        for slot, stored in rows:
            self._list(slot, stored)
        self._next = len(rows)

    def _hold(self, slot: int, stored: Stored) -> None:
        self._list(slot, stored)
        self.tree.put(slot, stored)
        self._next = max(self._next, slot + 1)
        self.version += 1

    def _list(self, slot: int, stored: Stored) -> None:
        self._by_id.add(stored.artifact.id, slot)
        if self._keyed and not (self._by_key.slots(stored.key) and self.id_of(stored.key)):
            self._by_key.add(stored.key, slot)
        for parent in dict.fromkeys(stored.artifact.parents):
            self._by_parent.add(parent, slot)

    def drop(self, id: str) -> None:
        slot = self.slot(id)
        if slot is None:
            raise KeyError(id)
        self._empty(slot)

    def _empty(self, slot: int) -> None:
        self.tree.drop(slot)
        self.version += 1
        self._gone += 1
        if self._gone > max(len(self.tree), _MIN_GONE):
            self._list_again()

    def _list_again(self) -> None:
        """Make the directories again, without removed artifacts."""
        following = self._next
        self._start_directories()
        self._next = following
        for slot, stored in self.tree:
            self._list(slot, stored)

    def put(self, id: str, outcome: AttemptStats) -> None:
        """Set the statistics of an artifact."""
        slot = self.slot(id)
        assert slot is not None
        self.tree.put(slot, self._at(slot)._replace(outcome=outcome))
        self.version += 1

    def weigh(self, id: str, weight: float) -> Artifact:
        """Set an artifact's weight and return the artifact."""
        slot = self.slot(id)
        assert slot is not None
        stored = self._weighed(self._at(slot), weight)
        self.tree.put(slot, stored)
        self.version += 1
        return self.shown(stored)

    def _weighed(self, stored: Stored, weight: float) -> Stored:
        stored.artifact.weight = weight
        return stored._replace(weight=weight)

    # -- lineage -------------------------------------------------------------------------------------------------------
    def ancestors(self, id: str) -> list[str]:
        """Return the ids that ``id`` was made from, directly or through others, nearest first."""
        found: dict[str, None] = {}
        generation = self._parents(id)
        while generation:
            new = [parent for parent in dict.fromkeys(generation) if parent not in found and parent != id]
            found.update(dict.fromkeys(new))
            generation = [parent for one in new for parent in self._parents(one)]
        return list(found)

    def _parents(self, id: str) -> Sequence[str]:
        slot = self.slot(id)
        return () if slot is None else self._at(slot).artifact.parents

    def descendants(self, id: str) -> list[str]:
        """Return the ids made from ``id``, directly or through others, in order of arrival."""
        found: dict[int, str] = {}
        waiting = [id]
        while waiting:
            parent = waiting.pop()
            for slot in self._by_parent.slots(parent):
                held = self.tree.get(slot)
                if held is not None and slot not in found and parent in held.artifact.parents:
                    found[slot] = held.artifact.id
                    waiting.append(held.artifact.id)
        return [found[slot] for slot in sorted(found) if found[slot] != id]

    # -- all at once ---------------------------------------------------------------------------------------------------
    def clear(self) -> None:
        self.tree = SlotTree()
        self._start_directories()
        self.version += 1

    def take(self, news: ExternalChanges) -> None:
        """Apply changes that were read from the file."""
        if news.whole:
            self._hold_all(self._stored(artifact, outcome) for artifact, outcome in news.present)
        else:
            for id in news.removed:
                self.drop(id)
            for artifact, outcome in news.present:
                if artifact.id in self:
                    self.weigh(artifact.id, artifact.weight)
                    self.put(artifact.id, outcome)
                else:
                    self.keep(artifact, outcome, self.key(artifact))
        self.added, self.plays = news.made, news.plays
        self.version += 1

    def changes_since(self, before: StoreContents | None) -> ContentChanges:
        """Return what makes these contents of ``before``, which may be later ones; of nothing if it is ``None``."""
        base = SlotTree[Stored]() if before is None else before.tree
        news = [(slot, after and after._replace(key=None)) for slot, _, after in changes(base, self.tree)]
        return ContentChanges(news, self._next, self.added, self.plays)

    def follow(self, news: ContentChanges) -> None:
        """Apply :meth:`changes_since`."""
        for slot, stored in news.slots:
            if self.tree.get(slot) is not None:
                self._empty(slot)
            if stored is not None:
                self._hold(slot, stored._replace(key=self.key(stored.artifact)))
        self._next, self.added, self.plays = news.next, news.added, news.plays
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """Return artifacts and statistics, for a store without a file."""
        names = ("id", "data", "weight", "source", "meta", "parents", "run")
        held = [stored for _, stored in self.tree]
        of = [{name: getattr(stored.artifact, name) for name in names} | {"weight": stored.weight} for stored in held]
        return {
            "artifacts": of,
            "outcomes": {s.artifact.id: asdict(s.outcome) for s in held if s.outcome is not UNKNOWN},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, and the counts ``added`` and ``plays`` beside it."""
        present, known = [], state.get("outcomes", {})
        for item in state["artifacts"]:
            artifact = Artifact(**{**item, "parents": tuple(item.get("parents", ()))})
            outcome = AttemptStats(**known[artifact.id]) if artifact.id in known else UNKNOWN
            present.append(self._stored(artifact, outcome))
        self._hold_all(present)
        self.added, self.plays = state["added"], state.get("plays", 0)

    def fork(self) -> FrozenContents:
        """Return an independent view of the present contents, in constant time."""
        return FrozenContents(self)


class FrozenContents(StoreContents):
    """A fork of a store's contents. It gives copies of the artifacts, made on use, which share only their data."""

    def __init__(self, contents: StoreContents) -> None:
        self.tree = contents.tree.fork()
        self.version, self.added, self.plays = 0, contents.added, contents.plays
        self._keyed, self._next, self._gone = contents._keyed, contents._next, 0
        directories = (contents._by_id, contents._by_key, contents._by_parent)
        self._by_id, self._by_key, self._by_parent = (directory.fork() for directory in directories)
        self._copies: dict[int, tuple[Stored, Artifact]] = {}
        if isinstance(contents, FrozenContents):
            self._copies = contents._copies

    def shown(self, stored: Stored) -> Artifact:
        original = stored.artifact
        known = self._copies.get(id(original))
        if known is None or known[0].weight != stored.weight:
            copied = replace(original, weight=stored.weight, meta=dict(original.meta))
            known = self._copies[id(original)] = stored, copied
        return known[1]

    def _weighed(self, stored: Stored, weight: float) -> Stored:
        return stored._replace(weight=weight)


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
