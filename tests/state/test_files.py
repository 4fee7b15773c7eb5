"""``store.save`` and ``load``: contents, sharing, sizes, and files that are damaged or are none."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib
import os
import pickle
import random
import re
import struct
import subprocess
import sys
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
    ABSENT,
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

# The helper beside this file; --import-mode=importlib puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
saving = importlib.import_module("saving")
sys.path.pop(0)


def through_file(state: State, path: Path, **options: Any) -> State:
    state.save(path)
    return load(path, **options)["state"]


# ---- round trips ----------------------------------------------------------------------------------------------------
@settings(max_examples=60, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_random_versions_come_back(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.mktemp("files") / "some.states"
    store = Store()
    before = saving.tree(random.Random(seed), store)
    expected = {name: saving.shape(state) for name, state in before.items()}
    store.save(path, before)
    assert {name: saving.shape(state) for name, state in before.items()} == expected
    after = load(path)
    assert list(after) == list(before)
    for name, state in after.items():
        assert saving.shape(state) == expected[name], name
        assert state.frozen == before[name].frozen
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
            "kind": int,
            "nan": float("nan"),
        }
    )
    data = through_file(state, tmp_path / "x").data
    assert np.array_equal(data["columns"], columns) and data["columns"].flags.f_contiguous
    assert np.array_equal(data["strided"], np.arange(20)[::3])
    assert data["fields"].dtype.names == ("a", "b")
    assert type(data["scalar"]) is np.float32 and data["dtype"] is torch.bfloat16 and data["kind"] is int
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

    assert memory(data["a"]).obj is memory(data["b"]).obj
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


def test_live_objects_are_saved_as_they_are_now_and_fork_apart(tmp_path: Path) -> None:
    state = Store().state({"rng": random.Random(1), "set": {1}})
    state.data["rng"].random()
    state.data["set"].add(2)
    loaded = through_file(state, tmp_path / "x")
    other = loaded.fork()
    assert loaded.data["rng"].random() == other.data["rng"].random() == state.data["rng"].random()
    loaded.data["set"].add(3)
    assert (loaded.data["set"], other.data["set"], state.data["set"]) == ({1, 2, 3}, {1, 2}, {1, 2})


def test_arrays_inside_objects_stay_writable(tmp_path: Path) -> None:
    store = Store(arrays="copy")
    loaded = through_file(store.state({"a": np.zeros(3)}), tmp_path / "x")
    assert loaded.store.arrays == "copy"
    other = loaded.fork()
    loaded.data["a"][0] = 1
    assert other.data["a"].tolist() == [0, 0, 0] and loaded.data["a"].tolist() == [1, 0, 0]


def test_plain_containers_are_taken_over_first(tmp_path: Path) -> None:
    state = Store().state({})
    state.data["new"] = new = [1]
    new.append({"deep": 2})
    assert saving.shape(through_file(state, tmp_path / "x")) == saving.shape({"new": [1, {"deep": 2}]})


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


def test_a_version_costs_little(tmp_path: Path) -> None:
    store = Store()
    root = store.state({"big": list(range(20000)), "dict": {i: [i] for i in range(3000)}})
    root.save(tmp_path / "one")
    versions = {"root": root}
    for i in range(100):
        versions[str(i)] = root.fork()
        versions[str(i)].data["big"][i * 150] = -1
        versions[str(i)].data["dict"][i * 20][0] = i
    store.save(tmp_path / "all", versions)
    each = ((tmp_path / "all").stat().st_size - (tmp_path / "one").stat().st_size) / 100
    assert each < 120, f"{each} bytes"


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


def test_an_object_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    store = Store()
    store.register(type(threading.Lock()), "share")
    state = store.state({"deep": [1, {"lock": threading.Lock()}]})
    (tmp_path / "x").write_text("before")
    with pytest.raises(TypeError, match=r"states\['state'\]\.data\['deep'\]\[1\]\['lock'\]: a lock, which can't"):
        state.save(tmp_path / "x")
    store.register(Board, Policy(lambda board: board))
    live = store.state([Board(lambda: 1)])
    with pytest.raises(TypeError, match=r"states\['state'\]\.data\[0\]: a Board, which can't be pickled"):
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
    data = {
        "suit": Suit.HEARTS,
        "kind": Board,
        "tell": tell,
        "board": Board([Suit.HEARTS]),
        "known": [int, Fraction(1)],
    }
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
    for allow in ((), (Board,)):
        with pytest.raises(CheckpointError, match=r"it names loud_module\.Board"):
            leaves.load_leaves(b"](cloud_module\nBoard\ne.", [], allow=allow)


def test_kinds_of_none_and_of_ellipsis(tmp_path: Path) -> None:
    kinds = [type(None), type(...), type(NotImplemented), type, object, dict, np.float32]
    Store().state({"kinds": kinds}).save(tmp_path / "x")
    assert load(tmp_path / "x")["state"].data["kinds"] == kinds


CHANGED = b"N}X\x08\0\0\0tamperedK\x01s\x86b"  # (None, {"tampered": 1}) set on what stands below it
OWN_CLASS = b"X\x01\0\0\0K)}\x87"  # the arguments of type("K", (), {})


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"](cfractions\nFraction\n" + CHANGED + b"e.", "changes <class 'fractions.Fraction'>"),
        (b"](cpathlib\nPath\n" + CHANGED + b"e.", "changes <class 'pathlib.Path'>"),
        (b"](cre\n_compile\n" + CHANGED + b"e.", "changes <function _compile"),
        (b"](cturnwise.state.versions\nABSENT\n" + CHANGED + b"e.", "changes ABSENT"),
        (b"](cbuiltins\nint\n" + CHANGED + b"e.", "can't be read"),
        (b"](cbuiltins\ntype\n" + OWN_CLASS + b"Re.", "makes a class of its own"),
        (b"](cbuiltins\ntype\n" + OWN_CLASS + b"\x81e.", "makes a class of its own"),
        (b"](cbuiltins\ntype\n" + OWN_CLASS + b"}\x92e.", "makes a class of its own"),
        (b"](((cbuiltins\ntype\nX\x01\0\0\0K)}oe.", "makes a class of its own"),
        (b"]((X\x01\0\0\0K)}ibuiltins\ntype\ne.", "makes a class of its own"),
        (b"](cbuiltins\ntype\ncfractions\nFraction\n\x85Re.", "makes a class of its own"),
        (b"](cbuiltins\ntype\nN\x85R)Re.", "calls <class 'NoneType'>, which it doesn't name"),
    ],
)
def test_a_file_neither_changes_nor_makes_classes(pickled: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        leaves.load_leaves(b"\x80\x04" + pickled, [])
    assert not any(hasattr(each, "tampered") for each in (Fraction, Path, re._compile, ABSENT))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "harmful",
    [
        b"cos\nsystem\n(S'echo harm'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n.",
        b"cnumpy\nload\n.",
        b"ctorch\nload\n.",
        b"cturnwise.state.leaves\npickle.loads\n.",
        b"\x80\x05\x8c\x0bcollections\x8c\x0c_sys.modules\x93.",
    ],
)
def test_no_foreign_code_runs(harmful: bytes) -> None:
    with pytest.raises(CheckpointError, match="harmless"):
        leaves.load_leaves(harmful, [], allow_pickle=False)


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


# ---- damage ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x"
    store = Store()
    state = store.state({"a": [1, 2], "t": TokenArray([5]), "n": np.arange(9.0), "s": {1}, "p": (1, [])})
    store.save(path, {"one": state.commit(), "two": state, "three": state.fork()})
    return path.read_bytes()


def refused(data: bytes, path: Path) -> str:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def test_files_that_are_none(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x"
    assert "not a file of States" in refused(b"", path)
    assert "not a file of States" in refused(b"PK\x03\x04 something else", path)
    assert "not a file of States" in refused(pickle.dumps({"a": 1}), path)
    assert "format 2; this turnwise reads format 1" in refused(whole[:8] + struct.pack("<I", 2) + whole[12:], path)
    assert "cut off" in refused(whole[:100], path)
    assert "something was added" in refused(whole + b"\0", path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path, whole: bytes) -> None:
    for length in (*range(200), *range(200, len(whole), 5)):
        refused(whole[:length], tmp_path / "x")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_refused(tmp_path: Path, whole: bytes, seed: int) -> None:
    rng = random.Random(seed)
    used = struct.unpack_from("<Q", whole, 16 + 3 * 32)[0]  # where the buffers start; zeros before it are padding
    end = struct.unpack_from("<QQ", whole, 16 + 2 * 32)
    for _ in range(400):
        place = rng.randrange(len(whole))
        if sum(end) <= place < used:
            continue
        altered = bytearray(whole)
        altered[place] ^= 1 << rng.randrange(8)
        refused(bytes(altered), tmp_path / "x")


def resealed(whole: bytes, section: int, change: Any) -> bytes:
    """The file with one section replaced and every checksum right."""
    places = [struct.unpack_from("<QQ", whole, 16 + 32 * i) for i in range(4)]
    sections = [whole[offset : offset + length] for offset, length in places]
    sections[section] = change(sections[section])
    head, offset, body = whole[:16], 160, b""
    for number, data in enumerate(sections):
        gap = -offset % 64 if number == 3 else 0
        offset += gap
        body += bytes(gap) + data
        head += struct.pack("<QQ", offset, len(data)) + hashlib.blake2b(data, digest_size=16).digest()
        offset += len(data)
    return head + hashlib.blake2b(head, digest_size=16).digest() + body


def test_nonsense_with_right_checksums_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x"
    (tmp_path / "same").write_bytes(resealed(whole, 0, lambda data: data))
    assert saving.shape(load(tmp_path / "same")["two"])
    for header in (b"", b"[]", b"{}", b"nonsense", b"\xff", b"[" * 100_000):
        assert "header" in refused(resealed(whole, 0, lambda _, header=header: header), path)
    for old, new in [
        (b'"versions":3', b'"versions":-1'),
        (b'"versions":3', b'"versions":1000000000000'),
        (b'"versions":3', b'"versions":2'),
        (b'"names":["one"', b'"names":["two"'),
        (b'"frozen":[0]', b'"frozen":{"a":[]}'),
        (b'"frozen":[0]', b'"frozen":[]'),
        (b'"commits":[[1,0]]', b'"commits":[[1,7]]'),
        (b'"commits":[[1,0]]', b'"commits":[[1,2]]'),
        (b'"commits":[[1,0]]', b'"commits":[[1,"x"]]'),
        (b'"buffers":[72]', b'"buffers":[720]'),
        (b'"buffers":[72]', b'"buffers":[-72]'),
        (b'"buffers":[72]', b'"buffers":[71]'),
        (b'"buffers":[72]', b'"buffers":[]'),
        (b'"arrays":"frozen"', b'"arrays":"molten"'),
    ]:
        assert old in whole
        refused(resealed(whole, 0, lambda data, old=old, new=new: data.replace(old, new)), path)
    for objects in (
        pickle.dumps({}),
        pickle.dumps([]),
        pickle.dumps([1] * 50),
        b"",
        b"garbage",
        pickle.dumps([[]] * 9),
    ):
        refused(resealed(whole, 2, lambda _, objects=objects: objects), path)
    for structure in (b"", b"\x01", b"\x02", b"\x01\x10\x20\x80\x04\x08\x21", bytes(100)):
        refused(resealed(whole, 1, lambda _, structure=structure: structure), path)


def use(state: State) -> None:
    """Everything that a damaged structure could trip."""
    state.to_python()
    fork = state.fork()
    for item in saving.containers(fork)[:20]:
        if isinstance(item, dict):
            item["fresh"] = [1]
            for key in list(item)[:3]:
                del item[key]
            assert "absent" not in item
        else:
            item.insert(0, 1)
            item += [2, [3]]
            del item[: len(item) // 2]
    fork.data  # noqa: B018
    fork.collect()
    fork.fork().diff(state)
    fork.store.stats()


def mangled(structure: bytes, rng: random.Random) -> bytes:
    data = bytearray(structure)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place, length = rng.randrange(len(data)), rng.randrange(1, 12)
        match rng.randrange(6):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place] = rng.choice([0, 1, 2, 3, 127, 128, 255, rng.randrange(256)])
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = rng.randbytes(length)
            case 4:
                data[place:place] = data[place : place + length]
            case 5:
                other = rng.randrange(len(data))
                data[place : place + length] = data[other : other + length]
        if not data:
            data = bytearray(b"\0")
    return bytes(data)


FUZZ = """
import faulthandler, random, sys
faulthandler.enable()
sys.path.insert(0, sys.argv[1])
import test_files
test_files.fuzz(int(sys.argv[2]), int(sys.argv[3]))
"""


def fuzz(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    store = Store()
    refused_count = 0
    for number in range(rounds):
        if number % 100 == 0:
            states = list(saving.tree(rng, store, 4).values())
            structure, objects, versions = store._archive(states)
        damaged = mangled(structure, rng)
        try:
            loaded = store._restore(damaged, list(objects), versions)
        except (CheckpointError, OpaqueError, MemoryError):
            refused_count += 1
            continue
        for state in loaded:
            with contextlib.suppress(RecursionError):  # tuples may be deep
                use(state)
    print(f"{refused_count} of {rounds} refused")
    assert refused_count > rounds // 2


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_mangled_structures_never_crash(seed: int) -> None:
    """In a process of its own, whose death is a failure with the seed in its name."""
    command = [sys.executable, "-c", FUZZ, str(Path(__file__).parent), str(seed), "1500"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
