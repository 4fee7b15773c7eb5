"""Long lists: items that come and go at the front or inside un-share little, and change nothing else of a list."""

from __future__ import annotations

import collections
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.state import State, Store, load

LONG = 64_000

AT_FRONT: dict[str, Callable[[Any], Any]] = {
    "insert": lambda items: items.insert(0, "new"),
    "pop": lambda items: items.pop(0),
    "del": lambda items: items.__delitem__(0),
    "del slice": lambda items: items.__delitem__(slice(0, 2)),
    "del stepped slice": lambda items: items.__delitem__(slice(0, 9, 3)),
    "set slice": lambda items: items.__setitem__(slice(0, 1), [1, 2, 3]),
    "insert inside": lambda items: items.insert(LONG // 3, "new"),
    "pop inside": lambda items: items.pop(LONG // 2),
    "remove": lambda items: items.remove(700),
}


def long_state(size: int = LONG) -> State:
    return Store().state({"l": list(range(size))})


def check_equal(facade: Any, model: list[Any]) -> None:
    """Compare by iteration, by index and backwards."""
    assert len(facade) == len(model)
    assert list(facade) == model
    assert [facade[i] for i in range(0, len(model), 37)] == model[::37]
    assert list(reversed(facade)) == model[::-1]


# ---- memory ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", AT_FRONT)
def test_a_write_at_the_front_copies_a_few_blocks(name: str) -> None:
    state = long_state()
    model = list(range(LONG))
    before = state.store.stats().bytes
    child = state.fork()
    assert AT_FRONT[name](child.data["l"]) == AT_FRONT[name](model)
    copied = state.store.stats().bytes - before
    assert 0 < copied < 4_000, f"{copied} bytes were copied"
    check_equal(child.data["l"], model)
    check_equal(state.data["l"], list(range(LONG)))


def test_the_blocks_of_a_list_that_grows_at_the_front_are_full() -> None:
    def grown(add: Callable[[Any, int], Any]) -> int:
        state = Store().state({"l": [0] * 300})
        for i in range(20_000):
            add(state.data["l"], i)
        state.collect()
        return state.store.stats().bytes

    at_back = grown(lambda items, i: items.append(i))
    assert grown(lambda items, i: items.insert(0, i)) < 1.2 * at_back
    assert grown(lambda items, i: items.insert(len(items) // 2, i)) < 2.5 * at_back


def test_a_queue_keeps_its_size() -> None:
    state = long_state(500)
    items, model = state.data["l"], collections.deque(range(500))
    for turn in range(20_000):
        items.append(turn)
        model.append(turn)
        assert items.pop(0) == model.popleft()
        if turn % 1000 == 0:
            state.fork()
    assert list(items) == list(model)
    state.fork()
    assert state.store.stats().bytes < 15_000  # 500 values of 8 bytes, the blocks and the table


def test_a_list_that_shrinks_from_both_ends_gets_small_again() -> None:
    state = long_state()
    items, model = state.data["l"], collections.deque(range(LONG))
    items.insert(0, -1)
    model.appendleft(-1)
    while len(model) > 40:
        assert items.pop(0) == model.popleft() and items.pop() == model.pop()
    assert list(items) == list(model)
    state.fork()
    assert state.store.stats().bytes < 2_500
    while model:
        assert items.pop(len(items) // 2) == model[len(model) // 2]
        del model[len(model) // 2]
    assert list(items) == [] and not items
    items.append(1)
    assert list(items) == [1]


# ---- behaviour ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_random_writes(seed: int) -> None:
    """Forks of forks of a long list, each with bursts of writes, against copies of a plain list."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    size = rng.choice([600, 3_000, 20_000])
    versions: list[tuple[State, list[Any]]] = [(long_state(size), list(range(size)))]
    for turn in range(60):
        state, model = rng.choice(versions)
        if rng.random() < 0.5 and len(versions) < 6:
            state, model = state.fork(), model.copy()
            versions.append((state, model))
        items = state.data["l"]
        what, place = rng.randrange(8), rng.choice(["front", "inside", "anywhere", "back"])
        inside = rng.random()
        for _ in range(rng.choice([1, 5, 90])):
            count = len(model)
            chosen = {"front": 0, "inside": int(inside * count), "anywhere": rng.randrange(count + 1), "back": count}
            at, few = chosen[place], rng.randrange(40)
            popped = []
            for side in (items, model):
                match what if count > 200 else 7:
                    case 0 | 1 | 2:
                        side.insert(at, turn)
                    case 3:
                        popped.append(side.pop(min(at, count - 1)))
                    case 4:
                        del side[min(at, count - 1)]
                    case 5:
                        side[at : at + few] = range(few // 2)
                    case 6:
                        del side[at : at + 3 * few : 1 + few % 4]
                    case 7:
                        side[at:at] = range(few * 8)
            assert not popped or popped[0] == popped[1]
        if rng.random() < 0.2:
            for side in (items, model):
                side.reverse()
                side[1::7] = [0] * len(side[1::7])
        if rng.random() < 0.1:
            items.sort()
            model.sort()
        check_equal(items, model)
    for state, model in versions:
        check_equal(state.data["l"], model)
        assert state.data["l"].count(0) == model.count(0)
        assert sorted(state.data["l"]) == sorted(model)
        assert state.data["l"][100:3:-3] == model[100:3:-3]
        assert state.data["l"].index(model[-1]) == model.index(model[-1])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["insert", "pop", "del", "del stepped slice", "insert inside"])
def test_iteration_sees_writes_as_in_a_list(name: str, reverse: bool) -> None:
    def visited(items: Any) -> list[Any]:
        seen = []
        for step, item in enumerate(reversed(items) if reverse else items):
            seen.append(item)
            if step % 100 == 50 and step < 3_000:
                AT_FRONT[name](items)
        return seen

    size = LONG // 3 + 3_000  # AT_FRONT writes inside, too
    assert visited(long_state(size).data["l"]) == visited(list(range(size)))


def test_commit_rollback_and_diff() -> None:
    state = long_state(2_000)
    commit = state.commit()
    state.data["l"].insert(0, {"a": [1]})
    del state.data["l"][1_000]
    changes = state.diff(commit)
    assert changes and commit.data["l"] == list(range(2_000))
    later = state.commit()
    state.data["l"].pop(0)
    assert state.data["l"] == [*range(999), *range(1_000, 2_000)]
    state.rollback()
    assert state.data["l"] == later.data["l"] and state.data["l"][0] == {"a": [1]}
    state.rollback(commit)
    assert state.data["l"] == list(range(2_000)) and not state.diff(commit)
    later.prune()
    assert state.data["l"] == commit.data["l"]


# ---- files ----------------------------------------------------------------------------------------------------------
def test_files_and_pickles_keep_the_lists_and_what_they_share(tmp_path: Path) -> None:
    store = Store()
    states = {"v0": store.state({"l": [f"item {i}" for i in range(5_000)]})}
    for turn in range(1, 40):
        states[f"v{turn}"] = child = states[f"v{turn - 1}"].fork()
        child.data["l"].insert(0, turn)
        child.data["l"].pop(turn * 100)
    states = dict(reversed(states.items())) | {"front": child.fork()}  # children come before their parents
    store.save(tmp_path / "all", states)
    states["v0"].save(tmp_path / "one")
    each = ((tmp_path / "all").stat().st_size - (tmp_path / "one").stat().st_size) / 40
    assert each < 1_000, f"{each} bytes per version"
    restored = load(tmp_path / "all")
    for name, state in states.items():
        check_equal(restored[name].data["l"], list(state.data["l"]))
    ours, theirs = store.stats(), restored["v0"].store.stats()
    assert theirs.bytes < 1.05 * ours.bytes and theirs.versions == ours.versions
    for again in (restored["v9"].fork(), pickle.loads(pickle.dumps(states["v9"]))):
        model = list(states["v9"].data["l"])
        for items in (again.data["l"], model):
            items.insert(0, "more")
            items.insert(3_000, "more")
            del items[5:20]
        check_equal(again.data["l"], model)
    check_equal(restored["v9"].data["l"], list(states["v9"].data["l"]))
