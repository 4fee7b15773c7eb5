"""Store and State: what forks do with each kind of object, what refuses to be used, bad input."""

from __future__ import annotations

import array
import collections
import copy
import datetime
import decimal
import pathlib
import random
import re
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.state import FrozenError, OpaqueError, Policy, PrunedError, State, StateError, Store, TokenArray

from .saving import Board


# ---- policies -------------------------------------------------------------------------------------------------------
def test_unknown_objects_are_refused_with_path_and_type() -> None:
    store = Store()
    root = store.state({"players": [{"name": "x"}], "log": []}).data
    for give, path in (
        (lambda: store.state({"players": [{}, {"board": Board()}]}), "data['players'][1]['board']"),
        (lambda: store.state([1, (2, [Board()])]), "data[1][1][0]"),
        (lambda: store.state(Board()), "data"),
        (lambda: store.state({("a", 1): Board()}), "data[('a', 1)]"),
        (lambda: root.__setitem__("b", Board()), "data['b']"),
        (lambda: root["players"][0].__setitem__("b", {"c": [1, Board()]}), "data['players'][0]['b']['c'][1]"),
        (lambda: root["log"].append([Board()]), "data['log'][...][0]"),
    ):
        with pytest.raises(OpaqueError, match=re.escape(f"{path}: an object of type Board")) as raised:
            give()
        assert "store.register(Board" in str(raised.value)
    assert root == {"players": [{"name": "x"}], "log": []} and store.states() == [root._state]


def test_what_a_plain_container_got_later_is_refused_at_the_fork() -> None:
    state = Store().state({"a": {"b": []}, "t": []})
    first: list[Any] = []
    second: dict[str, Any] = {}
    state.data["a"]["b"].append(first)
    state.data["a"]["k"] = second
    second["x"] = [Board()]
    for call in (state.fork, state.commit, lambda: state.fork(3), state._settle):
        with pytest.raises(OpaqueError, match=re.escape("data['a']['k']['x'][0]: an object of type Board")):
            call()
        assert state.data["a"]["b"][0] is first and state.data["a"]["k"] is second
    assert len(state.store.states()) == 1
    second["x"] = [1]
    first.append(second)
    child = state.fork()
    assert child.data["a"]["b"][0][0] is child.data["a"]["k"]
    assert child.to_python() == {"a": {"b": [[{"x": [1]}]], "k": {"x": [1]}}, "t": []}


def test_policies() -> None:
    class Hooked(Board):
        def snapshot(self) -> list[int]:
            return list(self.cells)

        def restore(self, snapshot: list[int]) -> None:
            self.cells = list(snapshot)

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("it has hooks")

    class Pickled(Board):
        def __reduce__(self) -> Any:
            return Board, (self.cells,)

    class Own(Board):
        pass

    class Shared(Board):
        pass

    calls = []

    def copy_own(own: Own) -> Own:
        calls.append(own)
        return Own(list(own.cells))

    store = Store()
    policies = {Hooked: "hooks", Board: "copy", Pickled: "pickle", Own: Policy(copy_own), Shared: "share"}
    for kind, policy in policies.items():
        store.register(kind, policy)
    shared = Shared()
    given = {"hooked": Hooked(), "board": Board(), "pickled": Pickled(), "own": Own(), "shared": shared}
    state = store.state(given)
    given["board"].cells[0] = 99  # what was given stays the caller's
    assert state.data["board"].cells == [0, 0] and state.data["shared"] is shared
    copied = ("hooked", "board", "own")
    for name in copied:
        state.data[name].cells[1] = 5
        assert state.data[name] is state.data[name]
    calls.clear()
    children = state.fork(2)
    assert len(calls) <= 1  # a snapshot; each child copies it when it asks
    for name in copied:
        children[0].data[name].cells[1] = 6
        assert [each.data[name].cells for each in (state, *children)] == [[0, 5], [0, 6], [0, 5]]
    assert type(children[0].data["pickled"]) is Board and children[1].data["shared"] is shared


def test_register_refuses_nonsense() -> None:
    store = Store()
    for arguments, error in (((Board, "clone"), ValueError), ((Board, 3), TypeError), ((Board(), "copy"), TypeError)):
        with pytest.raises(error):
            store.register(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="arrays='none'"):
        Store(arrays="none")


def test_a_copy_that_fails_leaves_the_state_as_it_was() -> None:
    class Fragile(Board):
        def __deepcopy__(self, memo: Any) -> Any:
            if self.cells[0]:
                raise OSError("no copy today")
            return Fragile(list(self.cells))

    store = Store()
    store.register(Fragile, "copy")
    state = store.state({"a": [Fragile()], "f": Fragile()})
    state.data["new"] = {"x": 1}
    held = state.data["f"]
    held.cells[0] = 1
    for call in (state.fork, state.commit, lambda: state.fork(4)):
        with pytest.raises(OSError, match="no copy today"):
            call()
        assert state.data["f"] is held and len(store.states()) == 1
        state.data["more"] = 1  # and it can still be written
    held.cells[0] = 0
    assert state.fork().data["f"].cells == [0, 0]
    with pytest.raises(OSError):
        store.state([Fragile([1])])
    with pytest.raises(OSError):
        state.rollback(_with_live(store, Fragile))


def _with_live(store: Store, kind: Callable[[], Any]) -> State:
    other = store.state([kind()])
    other.data[0].cells[0] = 1
    return other


def test_a_copy_function_may_not_use_the_state() -> None:
    class Nosy(Board):
        def __deepcopy__(self, memo: Any) -> Any:
            acts[-1]()
            return Nosy()

    acts: list[Callable[[], Any]] = [lambda: None]
    store = Store()
    store.register(Nosy, "copy")
    state = store.state({"n": Nosy(), "l": []})
    state.data["n"].cells.append(1)
    for use in (lambda: state.data["l"].append(1), lambda: state.data.pop("l")):
        acts.append(use)
        with pytest.raises(StateError, match="being forked"):
            state.fork()
    for use in (state.prune, state.rollback, state.fork, state.collect):
        acts.append(use)
        with pytest.raises(StateError, match="being forked"):
            state.fork()

    acts.append(lambda: None)
    child = state.fork()
    assert child.data["l"] == [] and child.data["n"].cells == [0, 0]


# ---- generators of random numbers -----------------------------------------------------------------------------------
def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return float(generator.random())


@pytest.mark.parametrize("when", ["before", "after", "never", "held"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.RandomState(3),
        lambda: torch.Generator().manual_seed(3),
    ],
    ids=["random", "numpy", "numpy-old", "torch"],
)
def test_generators_fork(make: Callable[[], Any], when: str) -> None:
    model = make()
    state = Store().state({"rng": make(), "n": 0})
    if when in ("before", "held"):
        held = state.data["rng"]
        assert draw(held) == draw(model)
    children = state.fork(3)
    if when == "held":  # the parent goes on with the object that it holds; the children don't see that
        after = copy.deepcopy(model) if not isinstance(model, torch.Generator) else model.clone_state()
        assert draw(held) == draw(after)
        assert state.data["rng"] is held
    if when == "after":
        parent = copy.deepcopy(model) if not isinstance(model, torch.Generator) else model.clone_state()
        assert draw(state.data["rng"]) == draw(parent)
    grandchild = children[2].fork()
    expected = [draw(model) for _ in range(3)]
    for child in (children[0], children[1], grandchild, children[2]):
        assert [draw(child.data["rng"]) for _ in range(3)] == expected
    if when == "never":
        assert [draw(state.data["rng"]) for _ in range(3)] == expected


# ---- other containers -----------------------------------------------------------------------------------------------
OPAQUE: list[tuple[Any, Callable[[Any], Any]]] = [
    ({1, 2}, lambda value: value.add(3)),
    (bytearray(b"ab"), lambda value: value.extend(b"c")),
    (array.array("i", [1]), lambda value: value.append(2)),
    (collections.deque([1, [2]], maxlen=3), lambda value: value.append(4)),
    (collections.OrderedDict(b=1, a=2), lambda value: value.move_to_end("b")),
    (collections.defaultdict(list, {"k": [1]}), lambda value: value["new"].append(1)),
    (collections.Counter("aab"), lambda value: value.update("z")),
]


@pytest.mark.parametrize("n", range(len(OPAQUE)))
def test_other_containers_are_copied(n: int) -> None:
    value, change = OPAQUE[n]
    model = copy.deepcopy(value)
    state = Store().state({"v": value, "l": [value]})
    assert type(state.data["v"]) is type(value) and state.data["v"] == model and state.data["v"] is not value
    children = state.fork(2)
    change(children[0].data["v"])
    change(model)
    assert children[0].data["v"] == model == children[0].data["l"][0]
    assert children[1].data["v"] == state.data["v"] == value
    commit = children[0].commit()
    change(commit.data["v"])  # a copy: a commit does not change
    assert commit.data["v"] == model
    if isinstance(value, collections.defaultdict):
        assert children[1].data["v"].default_factory is list


def test_leaves_that_never_change_are_shared() -> None:
    leaves = [
        *(1, 2.5, 3j, "text", b"bytes", None, True, ..., NotImplemented, range(3), frozenset({1}), int, len),
        *(re.compile("a"), datetime.date(2020, 1, 1), datetime.timedelta(1), decimal.Decimal("1.5"), slice(1, 2)),
        *(uuid.uuid4(), pathlib.Path("/x"), np.float32(1.5), np.dtype("i4"), torch.float32, torch.device("cpu")),
        *(1 << 100, (1, ("a", None)), lambda: 1, threading),
    ]
    child = Store().state(leaves).fork().data
    assert all(ours is theirs for ours, theirs in zip(child, leaves, strict=True))


# ---- arrays ---------------------------------------------------------------------------------------------------------
def test_arrays_are_frozen_and_shared() -> None:
    given = np.arange(6).reshape(2, 3)
    state = Store().state({"grid": given, "same": given, "in": [given]})
    grid = state.data["grid"]
    given[0, 0] = 99
    assert grid[0, 0] == 0 and state.data["same"] is grid is state.data["in"][0]
    with pytest.raises(ValueError, match="read-only"):
        grid[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        grid.flags.writeable = True
    child = state.fork()
    assert child.data["grid"] is grid
    state.data["moved"] = grid
    assert state.data["moved"] is grid  # frozen already: no second copy


@pytest.mark.parametrize("direct", [True, False])
def test_who_kept_a_writable_view_changes_nothing(direct: bool) -> None:
    state = Store().state({})
    base = np.zeros(4)
    view, kept = base[:2], base[1:]
    tricky = np.zeros(3)
    handle = tricky[:]
    tricky.flags.writeable = False
    for name, given in (("base", base), ("view", view), ("tricky", tricky)):
        if direct:
            state.data[name] = given
        else:
            state.data[name + " in"] = [given]
    state._settle()
    base[:] = kept[:] = handle[:] = 7
    for value in state.data.values():
        assert np.all((value if direct else value[0]) == 0)


ARRAYS = [
    *(np.zeros((0, 3)), np.array(5.5), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(10)[::-2]),
    *(np.array(["a", "bc"]), np.array(["2020-01-01"], "M8[D]"), np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")])),
    *(np.arange(4, dtype=">i4"), np.array([True, False]), np.float16([1, 2])),
]


@pytest.mark.parametrize("given", ARRAYS, ids=str)
def test_every_kind_of_array(given: np.ndarray) -> None:
    frozen = Store().state([given]).data[0]
    assert frozen.dtype == given.dtype and frozen.shape == given.shape and np.array_equal(frozen, given)
    assert frozen.flags.f_contiguous or not given.flags.f_contiguous
    assert not frozen.flags.writeable


def test_arrays_of_objects_and_subclasses() -> None:
    with pytest.raises(TypeError, match="dtype object"):
        Store().state([np.array([{}], object)])
    masked = np.ma.array([1, 2], mask=[True, False])
    state = Store().state([masked])
    child = state.fork()
    child.data[0][1] = 5
    assert type(child.data[0]) is type(masked) and child.data[0].mask[0] and state.data[0][1] == 2
    objects = Store(arrays="copy").state([np.array([{"a": 1}], object)])
    branch = objects.fork()
    branch.data[0][0]["a"] = 2
    assert objects.data[0][0] == {"a": 1}


def test_writable_arrays_are_private() -> None:
    state = Store().state({"maps": [np.zeros(3)], "n": 0})
    array_ = state.writable("maps", 0)
    array_[0] = 1
    child, commit = state.fork(), state.commit()
    array_[0] = 2
    assert state.data["maps"][0] is array_ and child.data["maps"][0][0] == commit.data["maps"][0][0] == 1
    child.writable("maps", 0)[1] = 5
    assert child.data["maps"][0].tolist() == [1, 5, 0] and array_.tolist() == [2, 0, 0]
    with pytest.raises(FrozenError):
        commit.writable("maps", 0)
    with pytest.raises(TypeError, match="expected a numpy array"):
        state.writable("n")


def test_a_writable_array_takes_the_place_of_one_alone() -> None:
    ones = np.ones(2)
    many = {f"k{n}": 0.0 for n in range(40)}  # zeros, as a marker might be
    state = Store().state({"rows": [0.0, ones, ones, *[0.0] * 600], "by": {**many, (1, 2): ones, 5: ones}})
    state.data["rows"][0] = 0.0
    for path in (("rows", -602), ("rows", True), ("by", (1.0, 2)), ("by", 5.0)):
        state.writable(*path)[0] += 3
    child = state.fork()
    for version in (state, child):
        rows, by = version.data["rows"], version.data["by"]
        assert [rows[1][0], rows[2][0], by[1, 2][0], by[5][0]] == [7, 1, 4, 4] and ones[0] == 1
        assert len(rows) == 603 and set(rows[3:]) == {0.0} and list(by) == [*many, (1, 2), 5]
    child.writable("rows", 1)[1] = 9
    assert state.data["rows"][1].tolist() == [7, 1]


def test_putting_a_live_object_refuses_what_is_no_place() -> None:
    state, other = Store().state({"l": [1], "t": TokenArray([1])}), Store().state([1])
    policy = (1, copy.copy, True)
    for container, key, kind in (
        (state.data, "no", KeyError),
        (state.data["l"], 1, IndexError),
        (state.data["l"], "a", TypeError),
        (state.data["t"], 0, TypeError),
        (other.data, 0, TypeError),
        ([1], 0, TypeError),
    ):
        with pytest.raises(kind):
            state._put_live(container, key, object(), policy)
    assert state.fork().to_python() == {"l": [1], "t": [1]} and state.collect() == 0


# ---- versions -------------------------------------------------------------------------------------------------------
WRITES: dict[str, list[tuple[Any, ...]]] = {
    "d": [
        *(("__setitem__", "x", 1), ("__delitem__", "k"), ("pop", "k"), ("popitem",), ("clear",)),
        *(("update", {"a": 1}), ("setdefault", "new", 1)),
    ],
    "l": [
        *(("append", 1), ("extend", [1]), ("insert", 0, 1), ("pop",), ("pop", 0), ("clear",), ("sort",), ("reverse",)),
        *(("__setitem__", 0, 1), ("__setitem__", slice(0, 1), []), ("__delitem__", 0)),
        *(("__delitem__", slice(None, None, 2)), ("__imul__", 2)),
    ],
    "t": [("append", 1), ("pop",), ("clear",), ("__setitem__", 0, 2)],
}
READS: dict[str, list[tuple[Any, ...]]] = {
    "d": [("__getitem__", "k"), ("get", "k"), ("__contains__", "k"), ("__len__",), ("__iter__",)],
    "l": [("__getitem__", 0), ("__iter__",)],
    "t": [("__getitem__", 0), ("numpy",)],
}
VERSIONS = [("commit",), ("rollback",), ("fork",), ("fork", 2), ("to_python",), ("collect",), ("_settle",)]


def test_frozen_versions_refuse_every_write() -> None:
    data = {"l": [1, 2], "d": {"k": 1}, "t": TokenArray([1])}
    state = Store().state(data)
    commit = state.commit()
    targets = [(commit.data[name], call) for name in WRITES for call in WRITES[name]]
    targets += [(commit.data, ("pop", "l")), *((commit, call) for call in VERSIONS[:2])]
    for target, (name, *arguments) in targets:
        with pytest.raises(FrozenError):
            getattr(target, name)(*arguments)
    assert commit.to_python() == {"l": [1, 2], "d": {"k": 1}, "t": [1]}
    assert commit.frozen and not state.frozen and not commit.fork().frozen


def test_pruned_states_refuse_everything() -> None:
    state = Store().state({"l": [1, 2], "d": {"k": 1}, "t": TokenArray([1])})
    held = {name: state.data[name] for name in "ldt"}
    iterators = [iter(held["d"]), iter(held["l"]), iter(held["d"].items()), reversed(held["l"])]
    state.prune()
    state.prune()
    calls = [(held[name], call) for name in held for call in READS[name] + WRITES[name]]
    for target, (name, *arguments) in [*calls, *((state, call) for call in VERSIONS)]:
        with pytest.raises(PrunedError):
            found = getattr(target, name)(*arguments)
            if name == "__iter__":
                next(found)
    for iterator in iterators:
        with pytest.raises(PrunedError):
            next(iterator)
    with pytest.raises(PrunedError):
        state.data  # noqa: B018
    assert state.pruned and "pruned" in repr(state) and state.store.states() == []


def test_rollback_refuses_what_is_no_version_of_it() -> None:
    state, other = Store().state({}), Store().state({})
    with pytest.raises(StateError, match="nothing to roll back to"):
        state.rollback()
    with pytest.raises(TypeError, match="to=5"):
        state.rollback(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another Store"):
        state.rollback(other)
    for n, error in ((-1, ValueError), (1.5, TypeError), ("a", TypeError)):
        with pytest.raises(error, match="n="):
            state.fork(n)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        state.fork(1, 2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword"):
        state.fork(m=1)  # type: ignore[call-overload]
    assert state.fork(n=2)[1].data == {} and state.fork(0) == []
