"""Store and State: what forks do with each kind of object, memory and collection, depth, threads, bad input."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import datetime
import decimal
import gc
import pathlib
import pickle
import random
import re
import sys
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.state import (
    FrozenError,
    OpaqueError,
    Policy,
    PrunedError,
    State,
    StateError,
    Store,
    TokenArray,
    to_python,
)


class Board:
    """An object that no policy is known for."""

    def __init__(self, cells: list[int] | None = None) -> None:
        self.cells = cells if cells is not None else [0, 0]


# ---- policies -------------------------------------------------------------------------------------------------------
def test_unknown_objects_are_refused_with_path_and_type() -> None:
    store = Store()
    for data, path in (
        ({"players": [{}, {"board": Board()}]}, "data['players'][1]['board']"),
        ([1, (2, [Board()])], "data[1][1][0]"),
        (Board(), "data"),
        ({("a", 1): Board()}, "data[('a', 1)]"),
    ):
        with pytest.raises(OpaqueError, match=re.escape(f"{path}: an object of type Board")) as raised:
            store.state(data)
        assert "store.register(Board" in str(raised.value)
    assert store.states() == []


def test_a_refused_write_names_the_place_too() -> None:
    root = Store().state({"players": [{"name": "x"}], "log": []}).data
    for write, path in (
        (lambda: root.__setitem__("b", Board()), "data['b']"),
        (lambda: root["players"][0].__setitem__("b", {"c": [1, Board()]}), "data['players'][0]['b']['c'][1]"),
        (lambda: root["log"].append([Board()]), "data['log'][...][0]"),
    ):
        with pytest.raises(OpaqueError, match=re.escape(f"{path}: an object of type Board")):
            write()
    assert root == {"players": [{"name": "x"}], "log": []}


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
    class Hooked:
        def __init__(self) -> None:
            self.steps = [0]

        def snapshot(self) -> list[int]:
            return list(self.steps)

        def restore(self, snapshot: list[int]) -> None:
            self.steps = list(snapshot)

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
    store.register(Hooked, "hooks")
    store.register(Board, "copy")
    store.register(Pickled, "pickle")
    store.register(Own, Policy(copy_own))
    store.register(Shared, "share")
    shared = Shared()
    given = {"hooked": Hooked(), "board": Board(), "pickled": Pickled(), "own": Own(), "shared": shared}
    state = store.state(given)
    given["board"].cells[0] = 99  # what was given stays the caller's
    assert state.data["board"].cells == [0, 0] and state.data["shared"] is shared
    state.data["hooked"].steps.append(1)
    state.data["board"].cells[1] = 5
    assert state.data["board"] is state.data["board"]
    calls.clear()
    children = state.fork(2)
    assert len(calls) <= 1  # a snapshot; each child copies it when it asks
    children[0].data["hooked"].steps.append(2)
    children[0].data["own"].cells[0] = 7
    children[0].data["board"].cells[1] = 6
    assert [each.data["hooked"].steps for each in (state, *children)] == [[0, 1], [0, 1, 2], [0, 1]]
    assert [each.data["board"].cells for each in (state, *children)] == [[0, 5], [0, 6], [0, 5]]
    assert [each.data["own"].cells[0] for each in (state, *children)] == [0, 7, 0]
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
    for use in (
        lambda: state.data["l"].append(1),
        lambda: state.data.pop("l"),
        lambda: state.prune(),
        lambda: state.rollback(),
        lambda: state.fork(),
        lambda: state.collect(),
    ):
        acts.append(use)
        with pytest.raises(StateError, match="being forked"):
            state.fork()

    acts.append(lambda: None)
    child = state.fork()
    assert child.data["l"] == [] and child.data["n"].cells == [0, 0]


def test_one_object_at_two_places_stays_one() -> None:
    state = Store().state({"rng": random.Random(1)})
    state.fork()
    state.data["again"] = state.data["rng"]
    state.data["in"] = [state.data["rng"]]
    child = state.fork()
    assert state.data["again"] is state.data["rng"] is state.data["in"][0]
    assert child.data["again"] is child.data["rng"] is child.data["in"][0]
    child.data["rng"].random()
    assert child.data["again"].getstate() != state.data["rng"].getstate()
    assert child.fork().data["in"][0].getstate() == child.data["rng"].getstate()


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


@pytest.mark.parametrize(
    "given",
    [
        np.zeros((0, 3)),
        np.array(5.5),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-2],
        np.array(["a", "bc"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
        np.arange(4, dtype=">i4"),
        np.array([True, False]),
        np.float16([1, 2]),
    ],
    ids=str,
)
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


def test_arrays_copied_for_each_version() -> None:
    state = Store(arrays="copy").state({"grid": np.zeros(3)})
    children = state.fork(2)
    children[0].data["grid"][0] = 1
    state.data["grid"][1] = 2
    assert [each.data["grid"].tolist() for each in (state, *children)] == [[0, 2, 0], [1, 0, 0], [0, 0, 0]]


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


# ---- TokenArray -----------------------------------------------------------------------------------------------------
def test_token_array() -> None:
    tokens = TokenArray([1, 2, 3])
    tokens.append(4)
    tokens.extend(range(5, 8))
    tokens.extend(np.array([8, 9]))
    tokens.extend(np.array([10], np.int32)[::-1])
    tokens.extend(TokenArray([11]))
    tokens.extend(torch.tensor([12]))
    assert tokens.tolist() == list(tokens) == list(range(1, 13)) and len(tokens) == 12
    assert tokens[0] == 1 and tokens[-1] == 12 and type(tokens[2:5]) is TokenArray and tokens[2:5] == [3, 4, 5]
    assert tokens[::-3].tolist() == [12, 9, 6, 3] and tokens[5:2].tolist() == []
    tokens[0] = -1
    assert tokens.pop() == 12 and 5 in tokens and tokens == TokenArray(tokens) and tokens != [1]
    assert repr(TokenArray([1, 2])) == "TokenArray([1, 2])"
    assert repr(TokenArray(range(100))) == "TokenArray([0, 1, 2, ..., 97, 98, 99]: 100 tokens)"
    twin, deep = copy.copy(tokens), copy.deepcopy(tokens)
    tokens.clear()
    assert len(tokens) == 0 and len(twin) == len(deep) == 11 and TokenArray() == [] and TokenArray() != ()
    with pytest.raises(TypeError, match="unhashable"):
        hash(tokens)


def test_token_arrays_refuse_what_is_no_token() -> None:
    tokens = TokenArray([1])
    for call, error in (
        (lambda: tokens.append(2**31), OverflowError),
        (lambda: tokens.append(1.5), TypeError),
        (lambda: tokens.append("a"), TypeError),
        (lambda: tokens.extend([2, None]), TypeError),
        (lambda: tokens.extend(np.array([2, 2**40])), OverflowError),
        (lambda: tokens.extend(np.array([0.5])), TypeError),
        (lambda: tokens.extend(5), TypeError),
        (lambda: tokens[1], IndexError),
        (lambda: tokens["a"], TypeError),
        (lambda: tokens.__setitem__(5, 1), IndexError),
        (lambda: tokens.__setitem__(slice(0, 1), [1]), TypeError),
        (lambda: TokenArray().pop(), IndexError),
    ):
        with pytest.raises(error):
            call()
        assert tokens.tolist() == [1]


def test_token_arrays_reach_numpy_and_torch_without_a_copy() -> None:
    tokens = TokenArray(range(1000))
    array_ = tokens.numpy()
    assert array_.dtype == np.int32 and not array_.flags.writeable
    assert tokens.numpy().__array_interface__["data"] == array_.__array_interface__["data"]
    with warnings.catch_warnings():  # torch warns, once in a process, that one may not write to it
        warnings.simplefilter("ignore")
        tensor = torch.from_numpy(array_)
    assert tensor.data_ptr() == array_.__array_interface__["data"][0] and tensor[5] == 5
    assert np.asarray(tokens).base is not None and np.array(tokens, np.int64).sum() == 499500
    tokens.append(7)
    assert len(tokens.numpy()) == 1001 and len(array_) == 1000
    with pytest.raises(ValueError, match="int32"):
        np.asarray(tokens, np.int64, copy=False)


def test_token_arrays_in_states() -> None:
    rng = random.Random(0)
    given = TokenArray(range(3000))
    state = Store().state({"tokens": given, "same": given})
    models = {state: list(range(3000))}
    given.append(1)
    assert state.data["tokens"] is state.data["same"] and len(state.data["tokens"]) == 3000
    for _ in range(200):
        version = rng.choice(list(models))
        tokens, model = version.data["tokens"], models[version]
        what = rng.randrange(6)
        if what == 0 and len(models) < 8:
            models[version.fork()] = list(model)
        elif what == 1:
            tokens.append(len(model))
            model.append(len(model))
        elif what == 2:
            tokens.extend(range(700))
            model.extend(range(700))
        elif what == 3 and model:
            tokens[len(model) // 2] = -5
            model[len(model) // 2] = -5
        elif what == 4:
            for _ in range(min(600, len(model))):
                assert tokens.pop() == model.pop()
        elif what == 5 and rng.random() < 0.2:
            tokens.clear()
            model.clear()
        for each, expected in models.items():
            assert each.data["tokens"].numpy().tolist() == expected
            assert each.data["same"] is each.data["tokens"]
    commit = state.commit()
    with pytest.raises(FrozenError):
        commit.data["tokens"].append(1)
    assert to_python(state)["tokens"] == models[state]
    assert type(pickle.loads(pickle.dumps(state.data["tokens"]))) is TokenArray


@pytest.mark.parametrize("protocol", range(2, 6))
def test_token_arrays_pickle(protocol: int) -> None:
    tokens = TokenArray(range(5000))
    assert pickle.loads(pickle.dumps(tokens, protocol)) == tokens
    if protocol == 5:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(tokens, 5, buffer_callback=buffers.append)
        assert len(data) < 200 and pickle.loads(data, buffers=buffers) == tokens


def test_a_plain_token_array_joins_at_the_fork() -> None:
    state = Store().state({})
    tokens = TokenArray([1])
    state.data["t"] = tokens
    tokens.append(2)
    assert state.data["t"] is tokens
    child = state.fork()
    tokens.append(3)
    assert state.data["t"] == [1, 2] == child.data["t"]


# ---- versions -------------------------------------------------------------------------------------------------------
def test_frozen_versions_refuse_every_write() -> None:
    state = Store().state({"l": [1, 2], "d": {}, "t": TokenArray([1])})
    commit = state.commit()
    root = commit.data
    for write in (
        lambda: root.__setitem__("x", 1),
        lambda: root.__delitem__("l"),
        lambda: root.pop("l"),
        lambda: root.popitem(),
        lambda: root.clear(),
        lambda: root.update(a=1),
        lambda: root.setdefault("new", 1),
        lambda: root["l"].append(1),
        lambda: root["l"].extend([1]),
        lambda: root["l"].insert(0, 1),
        lambda: root["l"].pop(),
        lambda: root["l"].pop(0),
        lambda: root["l"].clear(),
        lambda: root["l"].sort(),
        lambda: root["l"].reverse(),
        lambda: root["l"].__setitem__(0, 1),
        lambda: root["l"].__setitem__(slice(0, 1), []),
        lambda: root["l"].__delitem__(0),
        lambda: root["l"].__delitem__(slice(None, None, 2)),
        lambda: root["l"].__imul__(2),
        lambda: root["t"].append(1),
        lambda: root["t"].pop(),
        lambda: root["t"].clear(),
        lambda: root["t"].__setitem__(0, 2),
        lambda: commit.commit(),
        lambda: commit.rollback(),
    ):
        with pytest.raises(FrozenError):
            write()
    assert commit.to_python() == {"l": [1, 2], "d": {}, "t": [1]}
    assert commit.frozen and not state.frozen and not commit.fork().frozen


def test_pruned_states_refuse_everything() -> None:
    state = Store().state({"l": [1], "t": TokenArray([1])})
    root, items, tokens = state.data, state.data["l"], state.data["t"]
    iterators = [iter(root), iter(items), iter(root.items()), reversed(items)]
    state.prune()
    state.prune()
    for use in (
        lambda: state.data,
        lambda: state.fork(),
        lambda: state.fork(2),
        lambda: state.commit(),
        lambda: state.rollback(),
        lambda: state.to_python(),
        lambda: state.collect(),
        lambda: state._settle(),
        lambda: root["l"],
        lambda: root.get("l"),
        lambda: "l" in root,
        lambda: len(root),
        lambda: list(root),
        lambda: root.__setitem__("a", 1),
        lambda: items[0],
        lambda: items.append(1),
        lambda: list(items),
        lambda: tokens[0],
        lambda: tokens.append(1),
        lambda: tokens.numpy(),
        *(lambda iterator=iterator: next(iterator) for iterator in iterators),
    ):
        with pytest.raises(PrunedError):
            use()
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


def test_objects_die_when_their_last_version_goes() -> None:
    store = Store()
    store.register(Marker, "share")
    state = store.state({})
    child = state.fork()
    child.data["m"] = Marker()
    gone = weakref.ref(child.data["m"])
    grandchild = child.fork()
    child.prune()
    assert gone() is not None
    del grandchild.data["m"]
    assert gone() is None


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
@pytest.mark.parametrize("kind", ["list", "dict", "mixed"])
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
