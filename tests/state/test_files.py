"""``store.save`` and ``load``: contents, sharing, sizes, and what is refused."""

from __future__ import annotations

import collections
import enum
import os
import pickle
import random
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.state import (
    CheckpointError,
    OpaqueError,
    Policy,
    PrunedError,
    State,
    StateError,
    Store,
    TokenArray,
    files,
    leaves,
    load,
)

from . import saving


def through_file(state: State, path: Path, **options: Any) -> State:
    state.save(path)
    return load(path, **options)["state"]


# ---- round trips ----------------------------------------------------------------------------------------------------
def from_file(store: Store, states: dict[str, State], path: Path) -> dict[str, State]:
    store.save(path, states)
    return load(path)


def from_pickles(store: Store, states: dict[str, State], path: Path) -> dict[str, State]:
    return {
        name: pickle.loads(pickle.dumps(state, 2 + place % 4)) for place, (name, state) in enumerate(states.items())
    }


@pytest.mark.parametrize("back", [from_file, from_pickles])
@settings(max_examples=25, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_random_versions_come_back(tmp_path_factory: pytest.TempPathFactory, back: Any, seed: int) -> None:
    store = Store()
    before = saving.tree(random.Random(seed), store)
    expected = {name: saving.shape(state) for name, state in before.items()}
    after = back(store, before, tmp_path_factory.mktemp("files") / "some.states")
    assert {name: saving.shape(state) for name, state in before.items()} == expected
    assert list(after) == list(before)
    for name, state in after.items():
        assert saving.shape(state) == expected[name], name
        assert state.frozen == before[name].frozen and state.store is not store
        # What is written from now on goes the same way in both.
        ours, theirs = state.fork(), before[name].fork()
        for fork in (ours, theirs):
            saving.write(fork, random.Random(seed + 1), 30)
        assert saving.shape(ours) == saving.shape(theirs), name
        ours.collect()
        assert saving.shape(ours) == saving.shape(theirs), name
    for name, state in after.items():
        assert saving.shape(state) == expected[name], "a fork's writes were seen by the version that it came from"


class Point(NamedTuple):
    x: int
    where: list[int]


KINDS = [int, type(None), type(...), type(NotImplemented), type, object, dict, np.float32]


def test_kinds_of_leaves(tmp_path: Path) -> None:
    generator = np.random.Generator(np.random.Philox(3))
    torch_generator = torch.Generator().manual_seed(5)
    columns = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    state = Store().state(
        {
            "columns": columns,
            "strided": np.arange(20)[::3],
            "fields": np.zeros(2, [("a", "i4"), ("b", "f8")]),
            "scalar": np.float32(1.5),
            "dtype": torch.bfloat16,
            "generator": generator,
            "torch": torch_generator,
            "kinds": KINDS,
            "nan": float("nan"),
        }
    )
    data = through_file(state, tmp_path / "x").data
    assert np.array_equal(data["columns"], columns) and data["columns"].flags.f_contiguous
    assert np.array_equal(data["strided"], np.arange(20)[::3])
    assert data["fields"].dtype.names == ("a", "b")
    assert type(data["scalar"]) is np.float32 and data["dtype"] is torch.bfloat16 and data["kinds"] == KINDS
    assert data["nan"] != data["nan"]
    assert data["generator"].random() == generator.random()
    assert torch.equal(torch.rand(3, generator=data["torch"]), torch.rand(3, generator=torch_generator))


def test_arrays_are_read_only_views_of_one_block(tmp_path: Path) -> None:
    state = Store().state({"a": np.arange(1000.0), "b": np.arange(7), "deque_like": [np.zeros((3, 3))]})
    data = through_file(state, tmp_path / "x").data

    def memory(array: Any) -> Any:
        while isinstance(array, np.ndarray):
            array = array.base
        return array

    assert memory(data["a"]) is memory(data["b"])
    for array in (data["a"], data["b"], data["deque_like"][0]):
        with pytest.raises(ValueError):
            array.flags.writeable = True
    loaded = data["a"]
    data["again"] = loaded
    assert data["again"] is loaded, "written again without a copy"
    offset = (tmp_path / "x").read_bytes().find(np.arange(1000.0).tobytes())
    assert offset > 0 and offset % files.ALIGNMENT == 0


def test_writable_arrays_are_saved_as_they_are_now(tmp_path: Path) -> None:
    state = Store().state({"a": np.zeros(3)})
    array = state.writable("a")
    array[1] = 5
    loaded = through_file(state, tmp_path / "x")
    array[1] = 6
    assert loaded.data["a"].tolist() == [0, 5, 0] and not loaded.data["a"].flags.writeable
    loaded.writable("a")[2] = 7
    assert loaded.fork().data["a"].tolist() == [0, 5, 7]


def test_arrays_inside_objects_stay_writable(tmp_path: Path) -> None:
    store = Store(arrays="copy")
    loaded = through_file(store.state({"a": np.zeros(3)}), tmp_path / "x")
    assert loaded.store.arrays == "copy"
    other = loaded.fork()
    loaded.data["a"][0] = 1
    assert other.data["a"].tolist() == [0, 0, 0] and loaded.data["a"].tolist() == [1, 0, 0]


def test_commits_and_rollback(tmp_path: Path) -> None:
    store = Store()
    state = store.state([1])
    commit = state.commit()
    state.data.append(2)
    loaded = through_file(state, tmp_path / "x")
    loaded.rollback()
    assert loaded.data == [1]
    store.save(tmp_path / "y", {"state": state, "commit": commit, "again": state})
    three = load(tmp_path / "y")
    assert three["again"] is three["state"] and three["commit"].frozen
    three["state"].rollback(three["commit"])
    assert three["state"].data == [1] and len(three["state"].store.states()) == 2
    commit.prune()
    with pytest.raises(StateError, match="nothing to roll back to"):
        through_file(state, tmp_path / "x").rollback()


def test_roots_that_are_no_dicts_and_no_states(tmp_path: Path) -> None:
    for data in ([], 5, None, "text", (1, [2]), TokenArray([1, 2]), np.arange(3), 10**50):
        assert saving.shape(through_file(Store().state(data), tmp_path / "x")) == saving.shape(data)
    Store().save(tmp_path / "none", {})
    assert load(tmp_path / "none") == {}


def test_large_containers(tmp_path: Path) -> None:
    data = {"list": list(range(70000)), "dict": {f"k{i}": i for i in range(5000)}, "tokens": TokenArray(range(60000))}
    state = Store().state(data)
    fork = state.fork()
    for i in range(0, 5000, 3):
        del fork.data["dict"][f"k{i}"]
    fork.data["list"][100:60000] = []
    state.store.save(tmp_path / "x", {"a": state, "b": fork})
    loaded = load(tmp_path / "x")
    assert saving.shape(loaded["a"]) == saving.shape(state) and saving.shape(loaded["b"]) == saving.shape(fork)
    for i in range(5000):
        assert (f"k{i}" in loaded["b"].data["dict"]) == bool(i % 3)
        assert loaded["a"].data["dict"][f"k{i}"] == i


def test_deep_nesting(tmp_path: Path) -> None:
    data: list[Any] = []
    for _ in range(100_000):
        data = [data]
    loaded = through_file(Store().state(data), tmp_path / "x")
    depth, item = 0, loaded.data
    while item:
        depth, item = depth + 1, item[0]
    assert depth == 100_000


# ---- sharing --------------------------------------------------------------------------------------------------------
def history(store: Store, branches: int, turns: int) -> dict[str, State]:
    board = {"board": [[0] * 8 for _ in range(8)], "log": ["x" * 200] * 3, "big": {f"k{i}": i for i in range(300)}}
    root = store.state(board)
    versions = {"root": root}
    for branch in range(branches):
        state = root
        for turn in range(turns):
            state = state.fork()
            state.data["board"][turn % 8][branch % 8] = turn
            state.data["log"].append(f"{branch}/{turn}")
            state.data["big"][f"new{turn}"] = turn
            versions[f"{branch}/{turn}"] = state
    return versions


def test_versions_share_in_the_file_and_after_it(tmp_path: Path) -> None:
    store = Store()
    versions = history(store, 8, 16)
    store.save(tmp_path / "x", versions)
    pickled = sum(len(pickle.dumps(state.to_python(), 5)) for state in versions.values())
    size = (tmp_path / "x").stat().st_size
    assert size * 25 < pickled, f"{pickled / size:.1f} times"
    loaded = load(tmp_path / "x")
    before, after = store.stats(), loaded["root"].store.stats()
    assert after.containers == before.containers and after.versions == before.versions
    assert after.bytes < 1.05 * before.bytes
    assert saving.shape(loaded["3/7"]) == saving.shape(versions["3/7"])
    again = tmp_path / "again"
    loaded["root"].store.save(again, loaded)
    assert again.stat().st_size <= 1.01 * size
    # Equal strings are written once, whoever made them.
    one, two = ("".join(["long", "string"] * 400) for _ in range(2))
    state = Store().state([one, two])
    state.save(tmp_path / "twice")
    assert one is not two and (tmp_path / "twice").stat().st_size < 2 * len(one)


# ---- bad input ------------------------------------------------------------------------------------------------------
def test_saving_says_what_is_wrong(tmp_path: Path) -> None:
    store = Store()
    state = store.state({})
    with pytest.raises(TypeError, match="states=5: expected a mapping"):
        store.save(tmp_path / "x", 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the name 5: expected a str"):
        store.save(tmp_path / "x", {5: state})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"states\['a'\]=3: expected a State"):
        store.save(tmp_path / "x", {"a": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"states\['b'\]: it belongs to another Store"):
        store.save(tmp_path / "x", {"a": state, "b": Store().state({})})
    with pytest.raises(FileNotFoundError):
        state.save(tmp_path / "missing" / "x")
    pruned = state.fork()
    pruned.prune()
    with pytest.raises(PrunedError):
        pruned.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_an_object_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    store = Store()
    store.register(type(threading.Lock()), "share")
    state = store.state({"deep": [1, {"lock": threading.Lock()}]})
    (tmp_path / "x").write_text("before")
    with pytest.raises(
        TypeError, match=r"states\['state'\]\.data\['deep'\]\[1\]\['lock'\]: a lock, which can't be saved"
    ):
        state.save(tmp_path / "x")
    store.register(Board, Policy(lambda board: board))
    live = store.state([Board(lambda: 1)])
    with pytest.raises(TypeError, match=r"states\['state'\]\.data\[0\]: a Board, which can't be saved"):
        live.save(tmp_path / "y")
    assert (tmp_path / "x").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


class Board:
    def __init__(self, cells: Any) -> None:
        self.cells = cells


def test_unknown_types_need_a_policy_and_trust(tmp_path: Path) -> None:
    store = Store()
    store.register(Board, "copy")
    state = store.state({"board": Board([1]), "point": Point(1, [2])})
    state.save(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"x: it names .*\.(Board|Point), .* load\(path, allow_pickle=True\)"):
        load(tmp_path / "x", store=store)
    with pytest.raises(OpaqueError, match=r"x: it holds an object of type Board, .*store\.register\(Board"):
        load(tmp_path / "x", allow_pickle=True)
    loaded = load(tmp_path / "x", store=store, allow_pickle=True)["state"]
    assert loaded.store is store and loaded.data["point"] == Point(1, [2]) and type(loaded.data["point"]) is Point
    loaded.data["board"].cells.append(2)
    assert state.data["board"].cells == [1]


class Suit(enum.Enum):
    HEARTS = 1


def tell(board: Any) -> str:
    return f"{board}"


def test_a_file_names_classes_that_the_caller_allows(tmp_path: Path) -> None:
    store = Store()
    store.register(Board, "copy")
    named = {"suit": Suit.HEARTS, "kind": Board, "tell": tell}
    data = {**named, "board": Board([Suit.HEARTS]), "known": [int, Fraction(1)]}
    store.state(data).save(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"x: it names .*, so it was not imported\. .*allow=\["):
        load(tmp_path / "x", store=store)
    with pytest.raises(CheckpointError, match=r"x: it names .*\.Suit, .*load\(path, allow=\[Suit\]\)"):
        load(tmp_path / "x", store=store, allow=[Board, tell])
    loaded = load(tmp_path / "x", store=store, allow=[Board, tell, Suit])["state"].data
    assert loaded["suit"] is Suit.HEARTS and loaded["kind"] is Board and loaded["tell"] is tell
    assert loaded["known"] == [int, Fraction(1)] and loaded["board"].cells == [Suit.HEARTS]
    with pytest.raises(TypeError, match=r"allow=\['Board'\]: expected classes and functions, got 'Board'"):
        load(tmp_path / "x", allow=["Board"])


def test_what_is_not_allowed_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for value in ('{"$name":"loud_module:Board"}', '{"$object":{"of":"loud_module:Board","args":[]}}'):
        for allow in ((), (Board,)):
            with pytest.raises(CheckpointError, match=r"it names loud_module\.Board"):
                leaves.load_leaves(f'{{"kinds":"v","v":[{value}]}}'.encode(), [], allow=allow)


@pytest.mark.parametrize(
    "leaf",
    [
        *(["a\0b", "", "a\x1eb"], ["a\0\x1e\x1f", "b"], ["\ud800"], [""], [1.5, float("-inf")], [b"", b"a"] * 3),
        *([(1, (2, "x")), (1,)], [(10**5000, 1), (1,)], [((1, (2,)),)], ["a", 1.5, b"b", (1,), None]),
    ],
)
def test_columns_of_leaves(leaf: list[Any]) -> None:
    text, buffers = leaves.dump_leaves(leaf)
    back = leaves.load_leaves(text, buffers)
    assert back == leaf and list(map(type, back)) == list(map(type, leaf))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[]",
            "{}",
            '{"kinds":"s"}',
            '{"kinds":"","s":["a"]}',
            '{"kinds":"ss","s":["a"]}',
            '{"kinds":"s","s":[1]}',
        ),
        *('{"kinds":"b","b":[[5],0]}', '{"kinds":"bb","b":[[9,-1],0]}', '{"kinds":"f","f":0}', '{"kinds":"x","x":[]}'),
        *('{"kinds":"t","t":[[{}]]}', '{"kinds":"t","t":[5]}', '{"kinds":"t","t":[[[[1]]]]}', "[" * 100_000, "\xff"),
    ],
)
def test_columns_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        leaves.load_leaves(text.encode("latin-1"), [memoryview(b"abc")])


def test_deeper_objects_are_not_written(tmp_path: Path) -> None:
    deep: Any = {1}
    for _ in range(300):
        deep = collections.deque([deep])
    with pytest.raises(TypeError, match="deeper than 200 levels of nesting"):
        Store().state([deep]).save(tmp_path / "x")


def test_a_file_replaces_another_at_once(tmp_path: Path) -> None:
    store = Store()
    state = store.state([1])
    state.save(tmp_path / "x")
    old = load(tmp_path / "x")["state"]
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~mask
    state.data.append(2)
    state.save(tmp_path / "x")
    assert (old.data, load(tmp_path / "x")["state"].data) == ([1], [1, 2])
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
