"""Several threads that first read one State, or one forkable object, at the same time; and frozensets of objects."""

from __future__ import annotations

import copy
import random
import threading
from collections import deque

import pytest

from turnwise.state import ForkableMixin, StateError, Store, forkable

MEANWHILE = 0.1
"""Seconds that a copy waits for another thread, which would have failed or ended by then."""


class Slow:
    """An object whose copy lets ``other`` run in another thread before it goes on."""

    def __init__(self, other=None):
        self.other, self.text = other, "as it was"

    def __deepcopy__(self, memo):
        if self.other is None:
            return Slow()
        other, self.other = self.other, None
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(MEANWHILE)
        fresh = Slow()
        fresh.thread = thread
        return fresh


def slow_branch(others):
    """A branch whose object ``slow`` was not read yet. While it is copied, ``others`` get the branch in a thread."""
    store = Store()
    store.register(Slow, "copy")
    slow = Slow()
    (branch,) = store.state({"slow": slow, "log": [1, 2, 3, 4], "words": {"a", "b"}}).fork(1)
    (snapshot,) = [leaf for leaf in [branch_snapshot(branch)] if leaf is not None]
    results: list = []

    def run():
        for other in others:
            try:
                results.append(other(branch))
            except BaseException as error:
                results.append(error)

    snapshot.other = run
    return branch, results


def branch_snapshot(branch):
    """The snapshot that the branch copies on its first read: the object that the next copy is made of."""
    found = []
    former = Slow.__deepcopy__
    Slow.__deepcopy__ = lambda self, memo: found.append(self) or former(self, memo)
    try:
        branch.fork(1)[0].data["slow"]
    finally:
        Slow.__deepcopy__ = former
    return found[0]


READS = {
    "the same object": lambda branch: branch.data["slow"].text == "as it was",
    "the values": lambda branch: [type(value) for value in branch.data.values()][1:] != [],
    "another object": lambda branch: branch.data["words"] == {"a", "b"},
    "a list": lambda branch: branch.data["log"][3] == 4,
    "a fork": lambda branch: branch.fork(1)[0].data["log"] == [1, 2, 3, 4],
    "plain containers": lambda branch: branch.to_python()["log"] == [1, 2, 3, 4],
    "a write": lambda branch: branch.data["log"].append(5) is None,
    "a new key": lambda branch: branch.data.update(more=[1]) is None,
}


@pytest.mark.parametrize("name", READS)
def test_a_thread_waits_while_another_one_copies(name):
    branch, results = slow_branch([READS[name], lambda branch: branch.data["slow"]])
    mine = branch.data["slow"]
    mine.thread.join()
    assert results[0] is True and mine is results[1] is branch.data["slow"]
    assert branch.data["log"][:4] == [1, 2, 3, 4] and (name != "a write" or branch.data["log"][4] == 5)


def test_of_two_writers_that_wait_for_a_copy_the_second_is_refused():
    """It was asked to change a list that is no longer the same."""
    branch, results = slow_branch([lambda branch: writers[1].start() or branch.data["log"].pop()])
    log, second = branch.data["log"], []

    def pop():
        try:
            second.append(log.pop())
        except StateError as error:
            second.append(str(error))

    writers = [None, threading.Thread(target=pop)]
    branch.data["slow"].thread.join()
    writers[1].join()
    popped = [*map(str, results), *map(str, second)]
    assert sorted(popped)[0] in ("3", "4") and len(branch.data["log"]) + sum(len(each) == 1 for each in popped) == 4


def test_a_copy_that_uses_its_own_state_is_still_refused():
    class Uses:
        def __init__(self, state=None):
            self.state = state

        def __deepcopy__(self, memo):
            if self.state:
                self.state[0].data["log"].append(1)
            return Uses(self.state)

    store, box = Store(), []
    store.register(Uses, "copy")
    (branch,) = store.state({"uses": Uses(box), "log": []}).fork(1)
    box.append(branch)
    with pytest.raises(StateError, match="a copy function of one of its objects tried to use it"):
        branch.data["uses"]


class Env(ForkableMixin):
    def __init__(self):
        self.queue, self.rng, self.counts = deque(range(2000)), random.Random(1), [[0] * 50 for _ in range(50)]


def in_threads(work, count=8):
    """Call ``work(number)`` in threads that begin together; return the results, or raise the first error."""
    barrier, results = threading.Barrier(count), {}

    def run(number):
        barrier.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors := [result for result in results.values() if isinstance(result, BaseException)]:
        raise errors[0]
    return [results[number] for number in range(count)]


@pytest.fixture
def busy_threads(monkeypatch):
    """Let threads take turns as often as Python allows."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


WORK = {
    "read": lambda env, number: (env.queue, env.rng, env.counts),
    "all attributes": lambda env, number: tuple(vars(env).values()),
    "fork": lambda env, number: (len(copy.deepcopy(env).queue), copy.deepcopy(env).rng.random()),
    "fork and read": lambda env, number: len(env.queue) if number % 2 else len(copy.deepcopy(env).queue),
}


@pytest.mark.usefixtures("busy_threads")
@pytest.mark.parametrize("name", WORK)
def test_a_forkable_object_is_read_and_forked_from_threads(name):
    for _ in range(20):
        env = Env()
        branch = copy.deepcopy(env)
        results = in_threads(lambda number, env=branch: WORK[name](env, number))
        if name in ("read", "all attributes"):
            assert all(one is other for result in results for one, other in zip(result, results[0], strict=True))
        else:
            assert len(set(results)) == 1
        assert branch.rng is not env.rng and branch.queue is not env.queue
        assert branch.rng.random() == env.rng.random() == random.Random(1).random()


@pytest.mark.usefixtures("busy_threads")
def test_branches_that_share_a_snapshot_are_read_from_threads():
    """The snapshot is a forkable object too, and copies change it: they put its attributes off."""
    for _ in range(20):
        state = forkable({"env": Env(), "words": {f"word {number}" for number in range(1000)}})._state
        branches = state.fork(8)

        def read(number, branches=branches):
            return len(branches[number].data["env"].queue), len(branches[0].data["words"])

        results = in_threads(read)
        assert set(results) == {(2000, 1000)}


# ---- frozensets ------------------------------------------------------------------------------------------------------
class Piece:
    def __init__(self):
        self.places = []


def piece_in(value):
    if isinstance(value, Piece):
        return value
    return next((found for part in value if (found := piece_in(part))), None) if hasattr(value, "__iter__") else None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda piece: frozenset({piece}),
        lambda piece: frozenset({frozenset({piece})}),
        lambda piece: frozenset({(1, piece)}),
        lambda piece: (1, frozenset({piece})),
        lambda piece: [frozenset({piece})],
        lambda piece: [frozenset({piece, 3}), 4],
        lambda piece: {piece},
    ],
)
@pytest.mark.parametrize("made", ["forkable", "store", "attribute"])
def test_a_frozenset_of_objects_is_copied_like_a_set(wrap, made):
    value = wrap(Piece())
    if made == "attribute":

        class Game(ForkableMixin):
            def __init__(self):
                self.team, self.nested = value, [value]

        game = Game()
        branches = [copy.deepcopy(game) for _ in range(2)]
        found = [piece_in(branch.team) for branch in branches]
    else:
        store = Store()
        store.register(Piece, "copy")
        state = forkable({"team": value})._state if made == "forkable" else store.state({"team": value})
        found = [piece_in(branch.data["team"]) for branch in state.fork(2)]
    found[0].places.append("e4")
    assert found[1].places == [] and piece_in(value).places == []


def test_a_frozenset_of_constants_is_shared_and_may_be_a_key():
    words = frozenset({"a", ("b", 1), frozenset({2.0})})
    state = forkable({"words": words, words: "key", "nested": [(words, 1)]})._state
    (branch,) = state.fork(1)
    assert branch.data["words"] is words and branch.data["nested"][0][0] is words and branch.data[words] == "key"
