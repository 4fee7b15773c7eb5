"""``load`` of files that are damaged, mangled on purpose, or none: each is refused, and none crashes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.state import (
    CheckpointError,
    OpaqueError,
    State,
    Store,
    TokenArray,
    load,
)

# The helper beside this file; --import-mode=importlib puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
saving = importlib.import_module("saving")
sys.path.pop(0)


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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
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
    for old, *wrong in [
        (b'"versions":3', b'"versions":-1', b'"versions":1000000000000', b'"versions":2'),
        (b'"names":["one"', b'"names":["two"'),
        (b'"frozen":[0]', b'"frozen":{"a":[]}', b'"frozen":[]'),
        (b'"commits":[[1,0]]', b'"commits":[[1,7]]', b'"commits":[[1,2]]', b'"commits":[[1,"x"]]'),
        (b'"buffers":[72]', b'"buffers":[720]', b'"buffers":[-72]', b'"buffers":[71]', b'"buffers":[]'),
        (b'"arrays":"frozen"', b'"arrays":"molten"'),
    ]:
        assert old in whole
        for new in wrong:
            refused(resealed(whole, 0, lambda data, old=old, new=new: data.replace(old, new)), path)
    for objects in (*map(pickle.dumps, ({}, [], [1] * 50, [[]] * 9)), b"", b"garbage"):
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
import test_damaged_files
test_damaged_files.fuzz(int(sys.argv[2]), int(sys.argv[3]))
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
