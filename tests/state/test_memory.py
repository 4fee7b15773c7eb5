"""What dies when: collection of cycles and of versions, deep states, and readers in threads."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from turnwise.state import OpaqueError, State, StateError, Store, TokenArray, to_python

from .saving import Board


# ---- memory ---------------------------------------------------------------------------------------------------------
class Marker:
    """Counts as living until nobody holds it."""


def test_cycles_through_written_containers_are_collected() -> None:
    store = Store()
    for make in (
        lambda root: root.__setitem__("self", {"root": root}),
        lambda root: root["l"].append([root["l"], root]),
        lambda root: root.__setitem__("t", (1, [root])),
        lambda root: root["l"].insert(0, {"deep": [{"root": root}]}),
    ):
        state = store.state({"l": []})
        make(state.data)
        gone = weakref.ref(state)
        del state
        gc.collect()
        assert gone() is None, make
    # Through objects that the store can't look into, as long as they are this version's own.
    store.register(Board, "copy")
    state = store.state({})
    state.data["board"] = Board([state.data])  # type: ignore[list-item]
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None
    assert store.states() == []


def test_a_collected_state_says_so_to_who_still_reaches_it() -> None:
    said = []

    class Last:
        def __init__(self, root: Any) -> None:
            self.root = root

        def __del__(self) -> None:
            try:
                said.append(len(self.root))
            except StateError as error:
                said.append(error)

    store = Store()
    store.register(Last, "copy")
    state = store.state({"a": 1})
    state.data["last"] = Last(state.data)
    del state
    gc.collect()
    assert said and store.states() == []


def test_a_weak_reference_may_ask_for_the_living_states() -> None:
    store = Store()
    seen = []
    state, other = store.state({}), store.state({})
    reference = weakref.ref(state, lambda _: seen.append(store.states()))
    del state
    assert seen == [[other]] and reference() is None


def test_leaves_are_released() -> None:
    store = Store()
    store.register(Marker, "share")
    marker = Marker()
    held = sys.getrefcount(marker)
    state = store.state({"a": marker, "l": [marker] * 300, "d": {i: marker for i in range(100)}, "t": ([marker],)})
    assert sys.getrefcount(marker) > held
    branches = [state.fork() for _ in range(20)]
    for i, branch in enumerate(branches):
        branch.data["l"][i] = 0
        branch.data["l"].insert(5, marker)
        del branch.data["l"][10:50]
        branch.data["d"][i] = [marker]
        branch.data["d"].pop(50)
        branch.data["d"].update({f"k{j}": marker for j in range(200)})
        branch.data["t"][0].append(marker)
        for _ in range(150):
            branch.data["d"].popitem()
        branch.commit()
        if i % 3 == 0:
            branch.data["a"] = 5
            branch.rollback()
        if i % 5 == 0:
            branch.collect()
        if i % 4 == 0:
            branch.prune()
    del branch, branches
    state.prune()
    assert sys.getrefcount(marker) == held and store.states() == []


def test_nothing_leaks_in_a_loop() -> None:
    store = Store()
    store.register(Board, "copy")

    def turn() -> None:
        state = store.state({"l": [[1], {"k": (1, [2])}], "r": random.Random(1), "t": TokenArray([1]), "b": Board()})
        child = state.fork()
        child.data["l"].append({"x": child.data["l"]})
        child.data["r"].random()
        child.data["b"].cells.append(1)
        child.data["new"] = [np.zeros(2), {1, 2}]
        child.fork(3)
        child.commit()
        child.data["t"].append(2)
        child.data["t"].numpy()
        with pytest.raises(OpaqueError):
            child.data["x"] = [1, object()]
        with pytest.raises(OpaqueError):
            store.state([1, {"a": object()}])
        with pytest.raises(KeyError):
            child.data["no"]
        child.rollback(state)
        list(child.data.items())
        child.to_python()

    for _ in range(20):
        turn()
    gc.collect()
    before = len(gc.get_objects()), sys.getallocatedblocks()
    for _ in range(100):
        turn()
    gc.collect()
    assert len(gc.get_objects()) - before[0] < 50
    assert sys.getallocatedblocks() - before[1] < 300


def test_garbage_goes_as_containers_are_added() -> None:
    state = Store().state({"current": [], "n": 0})
    for i in range(3000):
        state.data["current"] = [[i], {"i": [i]}]
        state.data["rng"] = random.Random(i)
        if i % 3 == 0:
            state.fork()
    assert state.store.stats().containers < 1000
    state.fork()
    state.collect()
    assert state.store.stats().containers <= 8
    assert state.to_python()["current"] == [[2999], {"i": [2999]}]


def test_pending_slots_that_were_collected_are_forgotten() -> None:
    """A slot that a collection freed is given again; the collector of Python must not count its new objects twice."""
    state = Store().state({"a": {}, "grid": np.zeros(2)})
    kept: list[Any] = [[]]
    state.data["a"]["x"] = kept
    del state.data["a"]
    state.collect()
    state.writable("grid")
    state.data["more"] = kept
    gc.collect()
    state.fork()
    gc.collect()
    assert kept == [[]] and state.to_python()["more"] == [[]]


@pytest.mark.parametrize("seed", range(5))
def test_finalizers_may_use_the_state_at_any_time(seed: int) -> None:
    """Python's collector runs in the middle of anything that makes an object, and finalizers may do what they like."""
    rng = random.Random(seed)
    state = Store().state({"l": [[i] for i in range(20)], "d": {str(i): {"x": [i]} for i in range(30)}, "t": ([1],)})
    root = state.data
    errors = (StateError, KeyError, IndexError, RuntimeError)
    finalized = []

    class Last:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            finalized.append(1)
            act(last_acts)

    def act(acts: list[Callable[[], Any]]) -> None:
        with contextlib.suppress(*errors):
            rng.choice(acts)()

    last_acts: list[Callable[[], Any]] = [
        lambda: root["l"].pop(0),
        lambda: root["l"].clear(),
        lambda: root["l"].insert(0, [1]),
        lambda: root["d"].popitem(),
        lambda: root["d"].clear(),
        lambda: root["d"].update({str(rng.random()): {"n": 1}}),
        lambda: (state.collect(), state.fork()),
        lambda: state.rollback(),
    ]
    acts: list[Callable[[], Any]] = [
        lambda: list(root["l"]),
        lambda: list(root["d"].items()),
        lambda: root["d"].pop(next(iter(root["d"]), ""), None),
        lambda: root["d"].popitem(),
        lambda: root["l"].pop(0),
        lambda: root["l"].__setitem__(slice(2, 5), [[7], {"a": []}]),
        lambda: root["l"].extend([[i] for i in range(5)]),
        lambda: root["l"].sort(key=len),
        lambda: root["d"].update({str(i): {"y": [i]} for i in range(10)}),
        lambda: (state.commit(), state.fork(2)),
        lambda: (root["t"], root["l"][:]),
    ]
    threshold = gc.get_threshold()
    gc.set_threshold(2)
    try:
        for _ in range(150):
            for _ in range(3):
                Last()
            act(acts)
    finally:
        gc.set_threshold(*threshold)
    assert len(finalized) > 100
    plain = state.to_python()
    assert state.data == plain and state.fork().data == plain


# ---- depth ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["mixed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("list", "dict"))])
def test_depth(kind: str) -> None:
    depth = 100_000
    deep: Any = 0
    for i in range(depth):
        deep = [deep] if kind == "list" or (kind == "mixed" and i % 2) else {"in": deep}
    state = Store().state(deep)
    child = state.fork()
    step = child.data
    for _ in range(1000):
        step = step[0 if isinstance(step, list) else "in"]
    step.clear()
    plain = state.to_python()
    for _ in range(depth):
        plain = plain[0 if isinstance(plain, list) else "in"]
    assert plain == 0
    with pytest.raises(RecursionError):
        assert state.data == state.fork().data
    with pytest.raises(RecursionError):
        repr(state.data)
    child.collect()
    state.data.clear()
    if kind == "dict":
        state.data["in"] = deep
    else:
        state.data[:] = deep
    state.fork().prune()
    state.prune()
    del deep


def test_deep_tuples_raise_at_most() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = (deep,)
    with pytest.raises(RecursionError):
        Store().state(deep)
    state = Store().state([])
    with pytest.raises(RecursionError):
        state.data.append(deep)
    assert state.data == []


# ---- threads --------------------------------------------------------------------------------------------------------
def test_readers_of_commits_and_one_writer() -> None:
    state = Store().state({"turn": 0, "log": [], "rng": random.Random(0), "d": {str(i): [i] for i in range(50)}})
    commits: list[State] = [state.commit()]
    failures: list[BaseException] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not stop.is_set():
                commit = commits[rng.randrange(len(commits))]
                turn = commit.data["turn"]
                assert len(commit.data["log"]) == turn and commit.data["log"] == list(range(turn))
                assert commit.data["d"][str(turn % 50)][0] == turn % 50
                assert commit.data["rng"].random() == commit.data["rng"].random()
                branch = commit.fork()
                branch.data["log"].append("mine")
                branch.data["d"].clear()
                assert to_python(commit)["turn"] == turn
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    try:
        for reader in readers:
            reader.start()
        for turn in range(150):
            state.data["log"].append(turn)
            state.data["turn"] = turn + 1
            state.data["rng"].random()
            state.data["d"][str(turn)] = [turn % 50, {"new": turn}]
            commits.append(state.commit())
            if turn % 10 == 9:
                state.data["log"].append("undone")
                state.rollback()
    finally:
        stop.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(interval)
    assert not failures, failures[0]
    assert len(commits[-1].data["log"]) == 150
