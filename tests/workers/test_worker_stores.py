"""Changes to stores that episodes make in workers, applied in the order of the requests."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.runtime.context import EpisodeContext, use_context
from turnwise.arena.runtime.hashing import LazyRandom
from turnwise.types import EpisodeState, Rollout
from turnwise.workers.messages import JobResult
from turnwise.workers.snapshots import SnapshotReader, StoreSnapshot
from turnwise.workers.stores import BatchStore, PendingId, apply_outcomes, dumps_pending

DECLARED = {"ask": True}


def store_of(*texts: str, **options: Any) -> ArtifactStore:
    store = ArtifactStore("s", **options)
    for text in texts:
        store.add(text)
    return store


def worker_of(store: ArtifactStore) -> BatchStore:
    [sent] = SnapshotReader().read(StoreSnapshot(0, {"s": store}, evaluation=False).since(None)).values()
    assert isinstance(sent, BatchStore)
    return sent


def episode(root: int) -> Any:
    rollout = Rollout(f"e{root}", "ask", None)
    return use_context(EpisodeContext(rollout, EpisodeState(), LazyRandom(root), root=root))


def outcome_of(worker: BatchStore, root: int, told: Any = None) -> JobResult:
    """The outcome of the group that is the episode ``root``, with the result ``told``."""
    writes, reads = worker.take([root])
    return JobResult(dumps_pending([told]), 0, "", 0, frozenset(), writes, frozenset(reads))


def applied(store: ArtifactStore, told: list[JobResult], declared: Any = DECLARED) -> list[list[Any]]:
    ids = apply_outcomes({"s": store}, told, declared)
    return [ids.results_of(each) for each in told]


def contents(store: ArtifactStore) -> list[tuple[str, Any, float, str | None, tuple[str, ...]]]:
    return [(item.id, item.data, item.weight, item.source, item.parents) for item in store]


def test_a_worked_example() -> None:
    """Episode 1 ends before episode 0, in another worker. One arena would number the artifacts by their requests."""
    store = store_of("old")
    one, other = worker_of(store), worker_of(store)
    with episode(1):
        later = other.add("later", weight=2.0)
        assert later is not None and type(later.id) is PendingId and [item.data for item in other] == ["old", "later"]
    with episode(0):
        first = one.add("first")
        assert first is not None
        second = one.add("second", parents=[first.id, "s-0"])
        one.set_weight(first.id, 7.0)
        one.record("s-0", 1.0)
    told = [
        outcome_of(one, 0, {"ids": [first.id, second.id], "group": ("artifact", first.id)}),
        outcome_of(other, 1, later),
    ]
    [[ids], [artifact]] = applied(store, told)
    assert ids == {"ids": ["s-1", "s-2"], "group": ("artifact", "s-1")} and type(ids["ids"][0]) is str
    assert artifact.id == "s-3"
    assert contents(store) == [
        ("s-0", "old", 1.0, None, ()),
        ("s-1", "first", 7.0, "e0", ()),
        ("s-2", "second", 1.0, "e0", ("s-1", "s-0")),
        ("s-3", "later", 2.0, "e1", ()),
    ]
    assert store.outcome("s-0").attempts == 1


def test_episodes_see_the_start_of_the_batch_and_their_own_changes() -> None:
    worker = worker_of(store_of("old"))
    with episode(0):
        worker.add("mine")
    with episode(1):
        assert [item.data for item in worker] == ["old"]
        worker.remove("s-0")
        assert worker.count() == 0
    with episode(0):
        assert [item.data for item in worker] == ["old", "mine"]
    # An attempt that was lost leaves nothing.
    worker = worker_of(store_of())
    with episode(0):
        worker.add("lost")
    worker.begin([0])
    with episode(0):
        assert worker.count() == 0
        again = worker.add("kept")
    assert again is not None and again.id == "s-pending-0.1"
    assert len(worker.take([0])[0]) == 1 and worker.take([0]) == ([], set())


def test_two_episodes_that_add_the_same_share_one_artifact() -> None:
    store = store_of(dedup=True)
    worker = worker_of(store)
    made = []
    for root in range(2):
        with episode(root):
            made.append(worker.add("same", weight=root + 1.0))
    told = [outcome_of(worker, root, made[root].id) for root in range(2)]
    assert applied(store, told) == [["s-0"], ["s-0"]]
    assert contents(store) == [("s-0", "same", 1.0, "e0", ())]


# -- what depends on who is first --------------------------------------------------------------------------------------
def read(worker: BatchStore) -> None:
    worker.sample_one()


def get_and_add(worker: BatchStore) -> None:
    worker.get("s-0")
    worker.add("new")


def add(worker: BatchStore) -> None:
    worker.add("same")


def remove(worker: BatchStore) -> None:
    worker.remove("s-0")


@pytest.mark.parametrize(
    ("acts", "declared", "message"),
    [
        ([read, add], {"ask": False}, r"store 's': episode 'ask' reads it while others.*reads_earlier_batches"),
        ([get_and_add], {}, None),
        ([get_and_add, read], {}, "store 's'"),
        ([add, add], {"ask": False}, r"store 's': episode 'ask' added what another episode.*dedup"),
        ([remove, remove], DECLARED, r"store 's': remove\(\) of episode e1 does not fit"),
    ],
)
def test_what_depends_on_who_is_first_is_refused(acts: list[Any], declared: Any, message: str | None) -> None:
    store = store_of("old", dedup=True)
    worker = worker_of(store)
    for root, act in enumerate(acts):
        with episode(root):
            act(worker)
    told = [outcome_of(worker, root) for root in range(len(acts))]
    if message is None:
        applied(store, told, declared)
        assert store.count() == 2
    else:
        with pytest.raises(RuntimeError, match=message):
            applied(store, told, declared)
        assert acts[0] is not read or store.count() == 1, "nothing of the batch was applied"


def test_an_id_goes_nowhere_before_it_is_given() -> None:
    for before, after in (("<", ">"), ("s", "7"), ("s-pending-1.1", "1.2")):
        store = store_of()
        worker = worker_of(store)
        with episode(0):
            text = f"{before}{worker.add('new').id}{after}"
        with pytest.raises(RuntimeError, match=r"store 's': an episode wrote the id.*id=\.\.\."):
            applied(store, [outcome_of(worker, 0, text)])
    for text in ("s-pending-0.2", "-pending-0.1", "t-pending-0.1", "s-pending-00.1", "s-pending-1.1", "s-pending-0."):
        store = store_of()
        worker = worker_of(store)
        with episode(0):
            worker.add("new")
        assert applied(store, [outcome_of(worker, 0, text)]) == [[text]], "no id of this batch"
    with pytest.raises(TypeError, match="has not given this artifact an id"):
        pickle.dumps(PendingId("s", 0, 1))
    with pytest.raises(RuntimeError, match="inside episodes only"):
        worker_of(store_of()).add("new")


def test_a_split_is_the_same_in_a_worker() -> None:
    store = store_of(*map(str, range(40)))
    sides = [item.data for item in store.split("eval", share=0.3, key=lambda text: text)]
    worker = worker_of(store)
    with episode(0):
        assert [item.data for item in worker.split("eval", share=0.3, key=lambda text: text)] == sides
        with pytest.raises(ValueError, match=r"share=0\.5"):
            worker.split("eval", share=0.5)
    fresh = store_of(*map(str, range(40)))
    worker = worker_of(fresh)
    with episode(0):
        worker.split("eval", share=0.3)
    applied(fresh, [outcome_of(worker, 0)])
    assert fresh.state_dict()["split"] == 0.3
