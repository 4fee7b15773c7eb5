"""Stores of artifacts that episodes create: questions, positions, opponents. In memory, or in a file."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.arena.runtime.context import current_context
from turnwise.arena.runtime.hashing import derive_seed, detach_from_state, rng_state, set_rng_state
from turnwise.arena.runtime.recording_hooks import records_input
from turnwise.arena.stores.contents import UNKNOWN, StoreContents, check_weight, parent_ids
from turnwise.arena.stores.holdout import HashSplit, StoreIndexes, StoreSplit
from turnwise.arena.stores.sampling import AttemptStats, Pool, Samplable, SamplingRule, find_rule
from turnwise.arena.stores.sqlite import SqliteStore
from turnwise.types import Artifact
from turnwise.utils.copies import own_copy

_AT_ONCE = contextlib.nullcontext()


class ArtifactStore(Samplable):
    """Artifacts by id, in order of arrival. Draws use the store's own seeded generator.

    Example::

        store = ArtifactStore("questions", path="pool/questions.db", max_size=1000, dedup=True)
        question = store.add({"question": "2 + 2 = ?"}, source="r-17")
        store.add({"question": "2 + 2 * 2 = ?"}, parents=[question.id])
        store.sample_one().data["question"]

    Inside an episode, draws use the episode's generator, so they do not depend on the order of episodes. See
    ``docs/stores.md``.
    """

    def __init__(
        self,
        name: str,
        *,
        path: str | os.PathLike[str] | None = None,
        shared: bool = False,
        allow_pickle: bool = False,
        max_size: int | None = None,
        dedup: bool = False,
        sampling: str | SamplingRule = "uniform",
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        for option, count in (("max_size", max_size), ("window", window)):
            if count is not None and count < 1:
                raise ValueError(f"{option}={count!r}: expected at least 1, or None")
        if shared and path is None:
            raise ValueError("shared=True: a store in memory is no other process's; give it a path")
        self.name = name
        self.max_size = max_size
        """Maximum number of artifacts; the oldest are dropped."""
        self.dedup = dedup
        """Refuse data that is already present."""
        self.sampling = find_rule(sampling)
        self.window = window
        """Approximate number of attempts over which an artifact's statistics are averaged; ``None`` for all."""
        self._held = StoreContents(keyed=dedup)
        self._rng = random.Random(derive_seed("store", name, seed))
        self._drawn: tuple[StoreContents, int, Pool] | None = None
        self._indexes = StoreIndexes()
        self._split: HashSplit | None = None

        # Checkpoints of a file hold only a revision. One process writes to it, unless all open it with shared=True.
        self._file = None if path is None else SqliteStore(path, name, shared=shared, allow_pickle=allow_pickle)
        self._catch_up()
        self._preexisting_ids: frozenset[str] = frozenset() if self._file is None else self._file.preexisting_ids()

    @property
    def label(self) -> str:
        return self.name

    @property
    def _contents(self) -> StoreContents:
        return self._held

    @property
    def path(self) -> str | None:
        """Path of the file; ``None`` in memory."""
        return None if self._file is None else str(self._file.path)

    @property
    def run(self) -> str | None:
        """Name of the run in the file, such as ``"solve-3@9f86d081884c7d65"``, or only the part after the ``@``.

        That part is unique, and a resumed run keeps it. ``None`` in memory.
        """
        return None if self._file is None else self._file.run

    def set_run_name(self, label: str) -> None:
        """Set the part of :attr:`run` before the ``@``. A training run uses its folder's name."""
        if self._file is not None:
            self._file.label = label

    @property
    def preexisting_ids(self) -> frozenset[str]:
        """Ids in the file from before this run began, or first began if it was resumed; empty in memory."""
        return self._preexisting_ids

    def close(self) -> None:
        """Close the file. A closed store can't be used."""
        if self._file is not None:
            self._file.close()

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Join the changes of a block into one: ``with store.transaction():``. It is all or nothing, and faster."""
        return _AT_ONCE if self._file is None else self._file.writing(self._catch_up)

    # -- artifacts -----------------------------------------------------------------------------------------------------
    @records_input()
    def add(
        self,
        data: Any,
        *,
        id: str | None = None,
        weight: float = 1.0,
        source: str | None = None,
        parents: Sequence[str] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> Artifact | None:
        """Add ``data`` (or an :class:`Artifact`). Return the artifact, or ``None`` if ``dedup`` refused it.

        Without ``id`` the store makes one. ``source`` names the rollout that made the artifact, by default the running
        one. ``parents`` are the ids of the artifacts that it was made from. Raises ``ValueError`` for an id that is
        taken, and for a weight that is negative or not finite.
        """
        with self.transaction():
            # Make the artifact, unless ``data`` is one.
            if isinstance(data, Artifact):
                artifact = data
            else:
                context = current_context() if source is None else None
                made_by = source if context is None else context.rollout.id
                new_id = self._free_id() if id is None else id
                ids = parent_ids(parents)
                data = detach_from_state(data)
                if current_context() is not None:  # the episode may change its object afterwards
                    data, meta = own_copy(data), own_copy(meta)
                artifact = Artifact(new_id, data, weight, made_by, dict(meta or {}), ids, self.run)
            contents = self._contents
            # Refuse a taken id, a wrong weight, and with ``dedup`` known content.
            if artifact.id in contents:
                raise ValueError(f"id={artifact.id!r}: the store {self.name!r} already has an artifact of this id")
            check_weight(artifact.weight)
            key = contents.key(artifact)
            if self.dedup and contents.id_of(key) is not None:
                return None
            # Keep it in the file and in memory, and drop the oldest artifacts above ``max_size``.
            outcome = AttemptStats(last=contents.plays) if contents.plays else UNKNOWN
            if self._file is not None:
                self._file.insert(artifact, outcome, contents.added + 1)
            contents.added += 1
            contents.keep(artifact, outcome, key)
            while self.max_size is not None and len(contents) > self.max_size:
                self._remove(contents.oldest())
            return artifact

    @records_input()
    def remove(self, id: str) -> None:
        """Remove one artifact. Raises ``KeyError`` for an unknown id."""
        with self.transaction():
            self._of(id)
            self._remove(id)

    @records_input()
    def set_weight(self, id: str, weight: float) -> None:
        """Set an artifact's weight, by which ``sampling="weighted"`` draws. Raises ``KeyError`` for an unknown id."""
        check_weight(weight)
        with self.transaction():
            self._of(id)
            self._put(self._contents.weigh(id, weight), self._contents.outcome(id))

    @records_input()
    def get(self, id: str) -> Artifact:
        self._catch_up()
        return self._of(id)

    @records_input()
    def __contains__(self, id: str) -> bool:
        self._catch_up()
        return id in self._contents

    @records_input()
    def count(self) -> int:
        self._catch_up()
        return len(self._contents)

    @records_input()
    def __iter__(self) -> Iterator[Artifact]:
        self._catch_up()
        return iter(self._contents)

    @records_input()
    def ancestors(self, id: str) -> list[str]:
        """Return the ids that ``id`` was made from, directly or through others, nearest first.

        Removed artifacts are included, but their own parents are unknown.
        """
        self.get(id)
        return self._contents.ancestors(id)

    @records_input()
    def descendants(self, id: str) -> list[str]:
        """Return the ids made from ``id``, directly or through others, in order of arrival. ``id`` may be removed."""
        self._catch_up()
        return self._contents.descendants(id)

    # -- outcomes and drawing ------------------------------------------------------------------------------------------
    @records_input()
    def record(
        self, id: str, reward: float | None = None, *, success: float | None = None, score: float | None = None
    ) -> AttemptStats:
        """Record one more attempt at artifact ``id``. Return the artifact's statistics.

        Without ``success``, a ``reward`` above 0 counts as success. Without ``reward``, the success is the reward.
        ``score`` is the learning potential, at least 0; by default the distance of the reward from the mean before. An
        arena records the attempts of its training batches, see ``Arena.record_attempts``.
        """
        if reward is None and success is None:
            raise ValueError(f"reward=None, success=None: expected one of them for artifact {id!r}")
        if success is None:
            success = float(reward > 0)  # type: ignore[operator]
        reward = float(success) if reward is None else float(reward)
        if not (math.isfinite(reward) and 0 <= success <= 1 and (score is None or 0 <= score < math.inf)):
            raise ValueError(
                f"reward={reward!r}, success={success!r}, score={score!r}: expected a finite reward, a success from 0 "
                "to 1, and a score >= 0"
            )
        # Update the statistics in memory and in the file.
        with self.transaction():
            artifact = self._of(id)
            contents = self._contents
            contents.plays += 1
            before, plays = contents.outcome(id), contents.plays
            outcome = before.after(reward, float(success), score, plays=plays, window=self.window)
            self._put(artifact, outcome)
            if self._file is not None:
                self._file.set_plays(contents.plays)
            return outcome

    @records_input()
    def outcome(self, id: str) -> AttemptStats:
        """Return the statistics of the attempts at artifact ``id``."""
        self.get(id)
        return self._contents.outcome(id)

    def split(self, side: str, *, share: float = 0.1, key: Callable[[Any], Any] | None = None) -> StoreSplit:
        """Return the ``"eval"`` or ``"train"`` side of the store, a live view.

        The content decides, or ``key(data)``, so equal data is on the same side, also after a reload. About ``share``
        of the artifacts are on the ``"eval"`` side. Use the same share and key for both sides: a different split would
        overlap with the first, and raises ``ValueError``.
        """
        rule = HashSplit(share, key)
        if self._split is not None and not rule.agrees(self._split):
            raise ValueError(
                f"share={share!r}, key={key!r}: the store {self.name!r} was split by share={self._split.share!r}, "
                f"key={self._split.key!r} before, and what was held out then would train now"
            )
        self._split = rule
        return StoreSplit(self, rule.check_side(side), rule)

    def frozen(self) -> ArtifactStore:
        """Return a view for evaluation: present artifacts, another generator, writes visible only to their episode."""
        return FrozenStore(self)

    # -- saving --------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs; for a file, a revision. JSON-ready if the artifacts' data are."""
        return self.kept_state()()

    def kept_state(self) -> Callable[[], dict[str, Any]]:
        """Keep the present state, in constant time, and return what gives its :meth:`state_dict`."""
        self._catch_up()
        state = {
            "added": self._contents.added,
            "plays": self._contents.plays,
            "rng": rng_state(self._rng),
            "split": None if self._split is None else self._split.share,
        }
        if self._file is not None:
            state |= self._file.save_revision()
            return lambda: state
        contents = self._contents.fork()
        return lambda: {**state, **contents.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Raises ``ValueError`` if the store can't go back to it."""
        where, there = ("file", "in a file") if self._file is not None else ("artifacts", "in memory")
        if where not in state:
            raise ValueError(f"state of the store {self.name!r}: it was not saved of a store {there}, as this one is")
        if self._file is not None:
            if others := self._file.restore_revision(state, state["added"], state["plays"]):
                warnings.warn(
                    f"store {self.name!r}: {others} changes by other runs since the checkpoint stay in {self.path}",
                    stacklevel=2,
                )
            self._catch_up()
            self._preexisting_ids = self._file.preexisting_ids()
        else:
            self._contents.load_state_dict(state)
        self._split = None if state.get("split") is None else HashSplit(state["split"], None, any_key=True)
        set_rng_state(self._rng, state["rng"])

    def prune_revisions_before(self, state: Mapping[str, Any]) -> None:
        """Delete rows of the file that only states older than ``state`` need. Those states can't be loaded any more."""
        if self._file is not None and state.get("file") == self._file.file:
            self._file.prune_revisions_before(state["revision"])

    # -- inside --------------------------------------------------------------------------------------------------------
    def _catch_up(self) -> None:
        """Apply changes of other processes to the file: all of its content at first, and after going back."""
        news = None if self._file is None else self._file.news()
        if news is not None:
            self._contents.take(news)

    def _of(self, id: str) -> Artifact:
        artifact = self._contents.get(id)
        if artifact is None:
            raise KeyError(f"the store {self.name!r} has no artifact {id!r}")
        return artifact

    def _remove(self, id: str) -> None:
        self._contents.drop(id)
        if self._file is not None:
            self._file.remove(id)

    def _put(self, artifact: Artifact, outcome: AttemptStats) -> None:
        self._contents.put(artifact.id, outcome)
        if self._file is not None:
            self._file.put(artifact, outcome)

    def _pool(self) -> Pool:
        self._catch_up()
        contents = self._contents
        if self._drawn is None or self._drawn[0] is not contents or self._drawn[1] != contents.version:
            self._drawn = contents, contents.version, self._indexes.whole.pool(contents, self.sampling)
        return self._drawn[2]

    def _free_id(self) -> str:
        names = (f"{self.name}-{number}" for number in itertools.count(self._contents.added))
        return next(name for name in names if name not in self._contents)


class FrozenStore(ArtifactStore):
    """A store as an evaluation sees it.

    Only a top episode and its children see their own writes, so no result depends on which episode ran first. Outside
    of episodes, writes end with their ``with store.transaction()`` block.
    """

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__(
            store.name, max_size=store.max_size, dedup=store.dedup, sampling=store.sampling, window=store.window
        )
        store._catch_up()
        self._held, self._indexes = store._contents.fork(), store._indexes
        self._preexisting_ids, self._split = store.preexisting_ids, store._split
        self._run, self._layers = store.run, dict[int | None, StoreContents]()

    @property
    def run(self) -> str | None:
        return self._run

    @property
    def _contents(self) -> StoreContents:
        return self._layers.get(_root(), self._held)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        root = _root()
        outermost = root not in self._layers
        if outermost:
            self._layers[root] = self._held.fork()
        try:
            yield
        finally:
            if outermost and root is None:
                del self._layers[root]


def _root() -> int | None:
    """Return the number of the running top episode; ``None`` outside of episodes."""
    context = current_context()
    return None if context is None else context.root
