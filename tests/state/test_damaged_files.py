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
        (b'"frozen":[0]', b'"frozen":{"a":[]}', b'"frozen":[]'),
        (b'"commits":[[1,0]]', b'"commits":[[1,7]]', b'"commits":[[1,2]]', b'"commits":[[1,"x"]]'),
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
