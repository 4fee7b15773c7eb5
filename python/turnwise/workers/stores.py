"""Stores in a worker: episodes see a store as their batch found it, and the loop's process applies their changes.

An episode sees the store as it was when its batch began, and its own changes. Its changes arrive with its
result, and are applied in the order of the batch's requests, so they don't depend on which worker was faster. An
artifact gets its id only then. Until then it has a :class:`PendingId`, which travels with the results and becomes the
id when they are unpickled.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from turnwise.arena import ArtifactStore
from turnwise.arena.runtime.context import current_context
from turnwise.arena.stores.holdout import HashSplit
from turnwise.arena.stores.store import FrozenStore
from turnwise.types import Artifact, GenerateResult
from turnwise.utils.copies import CheckedPickler
from turnwise.workers.messages import JobResult, StoreWrite

_REMEDY = (
    "If the episode uses only what earlier batches left there, set reads_earlier_batches = True on its class; else "
    "play in the process of the loop (cluster.arena.count = 0)"
)


_Key = tuple[str, int, int]
"""Store, top episode, and number among its artifacts."""

_PENDING = re.compile(rb"-pending-\d{1,20}\.(\d{1,20})")
"""What follows the store's name in the text of a :class:`PendingId`."""


class PendingId(str):
    """The id of an artifact that the loop's process has not added yet. Its text is never an id."""

    __slots__ = ("key",)
    key: _Key

    def __new__(cls, store: str, root: int, number: int) -> PendingId:
        made = super().__new__(cls, f"{store}-pending-{root}.{number}")
        made.key = (store, root, number)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingId:
        return self

    def __copy__(self) -> PendingId:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self}: the store has not given this artifact an id yet")


class _PendingPickler(CheckedPickler):
    def persistent_id(self, value: Any) -> _Key | None:
        return value.key if type(value) is PendingId else None


class _Unpickler(pickle.Unpickler):
    """Reads what :func:`dumps_pending` wrote. ``id_of`` returns the id for the key of a pending one."""

    def __init__(self, content: bytes, id_of: Callable[[_Key], str]) -> None:
        super().__init__(io.BytesIO(content))
        self._id_of = id_of

    def persistent_load(self, key: _Key) -> str:
        return self._id_of(key)


def shared_split(split: HashSplit | None) -> HashSplit | None:
    """Return ``split`` without its function, which need not be picklable; an episode passes it again."""
    return None if split is None else HashSplit(split.share, None, any_key=True)


def dumps_pending(value: Any) -> bytes:
    """Return the pickle of ``value``, in which pending ids stay open."""
    stream = io.BytesIO()
    _PendingPickler(stream, protocol=5).dump(value)
    return stream.getvalue()


class BatchStore(FrozenStore):
    """A store as the training episodes of one batch see it. It keeps their changes and reads.

    Only a top episode and those below it see their own changes. Draws inside episodes use the episode's generator, as
    in any store.
    """

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__(store)
        self._split = shared_split(store._split)
        self._writes: defaultdict[int, list[StoreWrite]] = defaultdict(list)
        self._reads: defaultdict[int, set[tuple[int, str, str]]] = defaultdict(set)
        self._made: Counter[int] = Counter()

    def begin(self, roots: Iterable[int]) -> None:
        """Forget the changes and reads of these top episodes, which belong to a lost attempt."""
        for root in roots:
            for by_root in (self._layers, self._made, self._writes, self._reads):
                by_root.pop(root, None)

    def take(self, roots: Iterable[int]) -> tuple[list[StoreWrite], set[tuple[int, str, str]]]:
        """Return the changes and reads of these top episodes, and forget them."""
        taken = list(roots)
        writes = [write for root in taken for write in self._writes.get(root, ())]
        reads = {read for root in taken for read in self._reads.get(root, ())}
        self.begin(taken)
        return writes, reads

    # -- changes -------------------------------------------------------------------------------------------------------
    def add(self, data: Any, **options: Any) -> Artifact | None:
        artifact = super().add(data, **options)
        if artifact is not None:
            self._keep("add", artifact)
        return artifact

    def remove(self, id: str) -> None:
        super().remove(id)
        self._keep("remove", id)

    def set_weight(self, id: str, weight: float) -> None:
        super().set_weight(id, weight)
        self._keep("set_weight", id, weight)

    def record(self, id: str, reward: float | None = None, **options: Any) -> Any:
        self._catch_up()  # the statistics count the attempts of all episodes
        statistics = super().record(id, reward, **options)
        self._keep("record", id, reward, options)
        return statistics

    def split(self, side: str, **options: Any) -> Any:
        made = super().split(side, **options)
        if self._split is not None and current_context() is not None:
            self._keep("split", self._split.share)
        return made

    def _keep(self, method: str, *arguments: Any) -> None:
        context = current_context()
        if context is None:
            raise RuntimeError(f"store {self.name!r}: a worker changes stores inside episodes only, not in {method}()")
        content = dumps_pending((method, arguments))
        self._writes[context.root].append(StoreWrite(context.root, context.rollout.episode_type, self.name, content))

    def _free_id(self) -> str:
        context = current_context()
        if context is None:
            return super()._free_id()
        self._made[context.root] += 1
        return PendingId(self.name, context.root, self._made[context.root])

    def _catch_up(self) -> None:
        """Note a read: every method that reads a store's content calls this first."""
        if (context := current_context()) is not None:
            self._reads[context.root].add((context.root, self.name, context.rollout.episode_type))


# ---------------------------------------------------------------------------------------------------------------------
# In the process of the loop
# ---------------------------------------------------------------------------------------------------------------------
class GivenIds(dict[_Key, str]):
    """The ids that a batch's artifacts got in their stores, by the keys of their pending ids.

    It is complete before it reads results.
    """

    @cached_property
    def _stores(self) -> dict[bytes, set[str]]:
        """The stores of a pending id, by what follows the store's name in its text."""
        stores: dict[bytes, set[str]] = {}
        for store, root, number in self:
            stores.setdefault(f"-pending-{root}.{number}".encode(), set()).add(store)
        return stores

    def results_of(self, outcome: JobResult) -> list[Any]:
        """Return the results of a group, with the ids of its artifacts.

        Raises ``RuntimeError`` that names the store if an episode put a pending id into another text: that text is
        wrong.
        """
        for found in _PENDING.finditer(outcome.results):
            for end in range(found.start(1) + 1, found.end() + 1):  # another digit may follow the id
                for store in self._stores.get(outcome.results[found.start() : end], ()):
                    if outcome.results.endswith(store.encode(), 0, found.start()):
                        raise RuntimeError(
                            f"store {store!r}: an episode wrote the id of an artifact that it added into a text. On "
                            "workers an artifact gets its id when the batch is whole: pass store.add(..., id=...) an "
                            "id of your own, or play in the process of the loop (cluster.arena.count = 0)"
                        )
        results: list[Any] = _Unpickler(outcome.results, self.__getitem__).load()
        return results


def apply_outcomes(
    stores: Mapping[str, ArtifactStore], outcomes: Sequence[JobResult], reads_earlier_batches: Mapping[str, bool]
) -> GivenIds:
    """Apply the changes of a batch to ``stores`` in the order of its requests, and return its artifacts' ids.

    ``reads_earlier_batches`` has the episode types that read only what earlier batches left.
    Raises ``RuntimeError`` that names the store if a single arena might have given another result.
    """
    writes = sorted((write for outcome in outcomes for write in outcome.writes), key=lambda write: write.root)
    _reject_reads(outcomes, writes, reads_earlier_batches)
    ids = GivenIds()
    with ExitStack() as joined:
        for name in dict.fromkeys(write.store for write in writes):
            joined.enter_context(stores[name].transaction())
        for write in writes:
            _apply(stores[write.store], write, ids, strict=not reads_earlier_batches.get(write.episode_type, False))
    return ids


def share_artifacts(stores: Mapping[str, ArtifactStore], results: Iterable[GenerateResult]) -> None:
    """Let top rollouts hold the stores' own artifacts, as in one arena: their weights may change later.

    Nested ones have the copies that their parents got.
    """
    for rollout in (top.rollout for top in results):
        if isinstance(rollout.artifact, Artifact):
            rollout.artifact = _own(stores, rollout.artifact)


def _own(stores: Mapping[str, ArtifactStore], artifact: Artifact) -> Artifact:
    """Return the artifact of which ``artifact`` is a copy, if a store still has it."""
    for store in stores.values():
        stored = store._contents.get(artifact.id)
        if stored is not None and (stored.source, stored.run) == (artifact.source, artifact.run):
            return stored
    return artifact


def _reject_reads(outcomes: Sequence[JobResult], writes: Sequence[StoreWrite], declared: Mapping[str, bool]) -> None:
    writers: dict[str, set[int]] = {}
    for write in writes:
        writers.setdefault(write.store, set()).add(write.root)
    for root, store, kind in sorted(read for outcome in outcomes for read in outcome.reads):
        if not declared.get(kind, False) and writers.get(store, set()) - {root}:
            raise RuntimeError(
                f"store {store!r}: episode {kind!r} reads it while others of its batch change it, so its result would "
                f"depend on which is first. {_REMEDY}"
            )


def _apply(store: ArtifactStore, write: StoreWrite, ids: GivenIds, *, strict: bool) -> None:
    """Apply one change, and add the ids of new artifacts to ``ids``. One that isn't there stays pending."""
    method, arguments = _Unpickler(write.content, lambda key: ids.get(key) or PendingId(*key)).load()
    try:
        if method == "add":
            _add(store, arguments[0], ids, write.episode_type if strict else None)
        elif method == "record":
            store.record(arguments[0], arguments[1], **arguments[2])
        elif method == "split":
            if store._split is None:
                store._split = HashSplit(arguments[0], None, any_key=True)
        else:
            getattr(store, method)(*arguments)
    except (KeyError, ValueError) as error:
        raise RuntimeError(
            f"store {store.name!r}: {method}() of episode e{write.root} does not fit the changes by episodes before "
            f"it in the same batch, which it did not see in its worker: {error}"
        ) from error


def _add(store: ArtifactStore, artifact: Artifact, ids: GivenIds, strict: str | None) -> None:
    """Add ``artifact``. ``strict`` is the type of an episode to which it matters that the store accepts it."""
    pending = artifact.id if type(artifact.id) is PendingId else None
    if pending is None:
        made = store.add(artifact)
    else:
        made = store.add(
            artifact.data,
            weight=artifact.weight,
            source=artifact.source,
            parents=artifact.parents,
            meta=artifact.meta,
        )
    if made is None and strict is not None:
        raise RuntimeError(
            f"store {store.name!r}: episode {strict!r} added what another episode of its batch added too, which dedup "
            f"refuses, so its result would depend on which is first. {_REMEDY}"
        )
    if pending is not None:  # what was added before is the artifact of both
        known = store._contents.id_of(store._contents.key(artifact)) if made is None else made.id
        assert known is not None
        ids[pending.key] = known
