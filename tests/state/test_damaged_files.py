"""``load`` of files that are damaged, mangled on purpose, or none: each is refused, and none crashes."""

from __future__ import annotations

import hashlib
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.state import CheckpointError, Store, TokenArray, load

from . import saving


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
    assert "format 3; this turnwise reads format 2" in refused(whole[:8] + struct.pack("<I", 3) + whole[12:], path)
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
        (b'"frozen":[0]', b'"frozen":{"a":[]}', b'"frozen":[]', b'"frozen":[0,9]', b'"frozen":[true]'),
        (
            b'"commits":[[1,0]]',
            b'"commits":[[1,7]]',
            b'"commits":[[1,2]]',
            b'"commits":[[1,"x"]]',
            b'"commits":[[1,0],[2305843009213693952,0]]',
        ),
        (b",72]", b",720]", b",-72]", b",71]", b"]"),
        (b'"arrays":"frozen"', b'"arrays":"molten"'),
    ]:
        assert old in whole
        for new in wrong:
            refused(resealed(whole, 0, lambda data, old=old, new=new: data.replace(old, new)), path)
    for objects in (b"{}", b"[]", b'{"kinds":""}', b'{"kinds":"s","s":["a"]}', b"", b"garbage", pickle.dumps([])):
        refused(resealed(whole, 2, lambda _, objects=objects: objects), path)
    for structure in (b"", b"\x01", b"\x02", b"\x01\x10\x20\x80\x04\x08\x21", bytes(100)):
        refused(resealed(whole, 1, lambda _, structure=structure: structure), path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_mangled_structures_never_crash(seed: int) -> None:
    """In a process of its own, whose death is a failure with the seed in its name."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import saving; saving.fuzz({seed}, 1500)"
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]


# ---- structures that are small and take long ------------------------------------------------------------------------
ENTRIES, PLACES = (4, 32), (12, 8)
"""First byte of a block of each type, and how many items one holds, see csrc/state/archive.h."""


def number(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)


def large(kind: tuple[int, int], items: list[bytes]) -> bytes:
    """The blocks of one array, the root last."""
    record, size = kind
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    written = [bytes([record]) + number(place) + number(len(part)) + b"".join(part) for place, part in enumerate(parts)]
    level, height = list(range(len(parts))), 0
    while len(level) > 1:
        height, above = height + 1, []
        for place in range(0, len(level), 32):
            below = level[place : place + 32]
            backs = b"".join(number(len(written) - each) for each in below)
            above.append(len(written))
            written.append(bytes([record + 2]) + number(height) + number(place // 32) + number(len(below)) + backs)
        level = above
    return b"".join(written)


def test_small_structures_that_would_take_long_are_refused() -> None:
    store = Store()
    start, integer = store._archive([store.state({})])[0][:6], number(1 << 3 | 2)
    dict_of_these = bytes([16, 1])
    keys = [(2**61 - 1) * each for each in range(1, 30_001)]
    chain = [number((place + 2) << 1 | 1) for place in range(19_999)] + [number(1)]
    heaps = [bytes([32, 1]) + integer + number(1 + place % 2) for place in range(8000)]
    for structure, leaves, versions, message in [
        (large(ENTRIES, [number(0) + integer] * len(keys)) + dict_of_these, keys, 0, "dicts that take too long"),
        (
            large(ENTRIES, [number(each << 3 | 2) + integer for each in range(9999)]) + dict_of_these * 999,
            [],
            0,
            "dicts",
        ),
        (large(PLACES, chain) + b"".join(heaps), [], len(heaps), "versions that take too long to compare"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            store._restore(start + structure, leaves, [(True, -1)] * versions)


def test_an_object_of_a_type_that_forks_share_is_no_object_to_copy() -> None:
    store = Store()
    structure, objects, versions = store._archive([store.state({"a": bytearray(b"x")})])
    for wrong in (5, None, int, frozenset({1}), 2.5):
        with pytest.raises(CheckpointError, match="an object to copy, of a type that forks share"):
            store._restore(structure, [wrong if type(each) is bytearray else each for each in objects], versions)
