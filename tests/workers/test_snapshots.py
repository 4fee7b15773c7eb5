"""Snapshots of stores for workers: the same stores as if each were sent whole, from what has changed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.stores import indexes
from turnwise.workers.snapshots import SnapshotReader, StoreSnapshot

from ..arena.test_store import random_uses
from ..operations import count_operations


def snapshot(number: int, store: ArtifactStore, evaluation: bool = False) -> StoreSnapshot:
    return StoreSnapshot(number, {"q": store}, evaluation=evaluation)


def told(store: ArtifactStore) -> list[Any]:
    """All that an episode could read."""
    ids = [artifact.id for artifact in store]
    sides = [[item.id for item in store.split(side, share=0.4)] for side in ("train", "eval")]
    lineage = [(store.ancestors(id), store.descendants(id)) for id in ids]
    draws = [store._pool().draw(k, k > min(2, len(ids)), random.Random(k)) for k in (1, 2, 5)] if ids else []
    return [list(store), [store.outcome(id) for id in ids], sides, lineage, draws, store.preexisting_ids, store.run]


@pytest.mark.parametrize("sampling", ["uniform", "weighted", "prioritized", "learnability"])
@pytest.mark.parametrize("path", [None, "q.db"])
def test_a_worker_has_what_it_would_have_if_all_was_sent(sampling, path, tmp_path, monkeypatch):
    """Two workers get some snapshots each, also an earlier one after a later one, among evaluations."""
    monkeypatch.setattr(indexes, "SMALL", 5)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    path = path and tmp_path / path
    store = ArtifactStore("q", path=path, max_size=15, dedup=True, sampling=sampling, window=3)
    state, snapshots = store.state_dict(), []
    readers = [SnapshotReader(), SnapshotReader()]
    latest: list[StoreSnapshot | None] = [None, None]
    for number in range(12):
        random_uses(store, rng.randrange(2**32), actions=rng.choice([0, 1, 30]))
        if number == 8:
            store.load_state_dict(state)
        elif rng.random() < 0.3:
            state = store.state_dict()
        snapshots.append(snapshot(number, store, evaluation=rng.random() < 0.3))
        for worker in range(2):
            if rng.random() < 0.7:
                taken = rng.choice(snapshots[-2:])
                [sent] = readers[worker].read(taken.since(latest[worker])).values()
                latest[worker] = taken
                [whole] = SnapshotReader().read(taken.since(None)).values()
                assert told(sent) == told(whole) and type(sent) is type(whole)
                assert told(sent)[:4] == told(taken._views["q"])[:4]


def test_a_snapshot_holds_and_costs_what_has_changed():
    sizes, counts = [], []
    for size in (500, 4000):
        store = ArtifactStore("q", dedup=True)
        for number in range(size):
            store.add(f"question {number}")
        reader, first = SnapshotReader(), snapshot(0, store)
        reader.read(first.since(None))
        store.record("q-3", 1.0)
        store.add("new")
        counts.append(count_operations(lambda store=store, first=first: snapshot(1, store).since(first)))
        content = snapshot(1, store).since(first)
        sizes.append(len(content))
        counts.append(count_operations(lambda reader=reader, content=content: reader.read(content)))
        [sent] = reader.read(snapshot(1, store).since(snapshot(0, store))).values()
        assert len(sent) == size + 1 and sent.outcome("q-3").attempts == 1
    assert sizes[1] < 1.1 * sizes[0], f"{sizes} bytes"
    assert counts[2] < 1.6 * counts[0] and counts[3] < 1.6 * counts[1], f"{counts} operations"
