from __future__ import annotations

import dataclasses
import enum
import json
import os
import subprocess
import sys
import threading
import typing

import numpy as np
import pytest

from turnwise.arena.recording.lossless_json import (
    UnserializableValueError,
    UntrustedValueError,
    decode,
    encode,
)
from turnwise.state import forkable
from turnwise.types import Artifact, Sampling


class Point:
    """Neither a dataclass nor JSON."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and self.x == other.x


VALUES = [
    *(None, True, 3, 0.1 + 0.2, float("inf"), "text", b"bytes", {1, 2}),
    *((1, (2, "x")), [(1,), []], {"a": (1, 2), "b": {"c": None}}, {1: "one", (2, 3): [4]}),
    *({"$tuple": [1]}, {"$map": 1, "other": 2}),
    *(
        Artifact("q", {"cells": (1, 2)}, weight=0.5),
        Sampling(stop_token_ids=(1, 2)),
        ValueError("message", 3),
        Point(5),
    ),
]


@pytest.mark.parametrize("value", VALUES)
def test_values_come_back_equal_and_of_their_types(value):
    plain = json.loads(json.dumps(encode(value)))
    if isinstance(value, Point):
        with pytest.raises(UntrustedValueError, match=r"it names .*Point, which is not one of the types"):
            decode(plain)
    back = decode(plain, allow_pickle=isinstance(value, Point))
    assert type(back) is type(value)
    assert (back.args if isinstance(value, ValueError) else back) == (
        value.args if isinstance(value, ValueError) else value
    )


def test_arrays_and_what_lies_in_a_state():
    assert decode(encode(np.arange(3))).tolist() == [0, 1, 2]
    assert encode(forkable({"grid": [[1], [2]]})) == {"grid": [[1], [2]]}


class Colour(enum.Enum):
    RED = 1


class Place(typing.NamedTuple):
    row: int


@dataclasses.dataclass(frozen=True)
class Board:
    """Its methods would tell."""

    cells: tuple[int, ...]
    size: int = dataclasses.field(init=False)

    def __post_init__(self):
        CALLS.append("__post_init__")
        object.__setattr__(self, "size", len(self.cells))

    def __setstate__(self, state):
        CALLS.append("__setstate__")


class TwoPartError(Exception):
    def __init__(self, first, second):
        CALLS.append("__init__")
        super().__init__(f"{first} and {second}")
        self.second = second


CALLS: list[str] = []


def test_data_classes_come_back_without_their_methods():
    value = {Colour.RED: [Place(3), Board((1, 2))], "error": KeyError("x"), "array": np.float32(2), "of": Board}
    error = TwoPartError("one", 2)
    plain = json.loads(json.dumps(encode([value, error])))
    CALLS.clear()
    back, read = decode(plain)
    assert CALLS == [] and repr(back) == repr(value)
    assert type(read) is TwoPartError and (str(read), read.second) == ("one and 2", 2)


def test_aliases_and_cycles_stay():
    shared, loop = [1], {}
    loop["self"] = (loop, shared)
    board = Board((1,))
    back = decode(json.loads(json.dumps(encode([shared, loop, shared, {board: board}, {(1, 2): (1, 2)}]))))
    assert back[0] is back[2] is back[1]["self"][1] and back[1]["self"][0] is back[1]
    assert back[3] == {board: board} and back[4] == {(1, 2): (1, 2)}


def test_what_is_nested_too_deeply_is_lost_alone():
    deep = []
    for _ in range(1000):
        deep = [deep]
    plain = encode([1, deep, 2])
    assert (plain[0], plain[2]) == (1, 2)
    with pytest.raises(UnserializableValueError):
        decode(plain)
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        decode(deep)


class Evil:
    """What it names is called when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


def test_what_is_read_runs_no_code_and_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "not_imported_yet.py").write_text("import pathlib\npathlib.Path('made').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    popen = {"args": ["touch", "made"]}
    for plain in (
        {"$dataclass": ["subprocess:Popen", popen]},
        {"$dataclass": ["not_imported_yet:X", {}]},
        {"$dataclass": ["os:system", {"command": "touch made"}]},
        encode(Evil(os.system, "touch made")),
        encode(Evil(subprocess.Popen, ["touch", "made"])),
        {"$name": "not_imported_yet:X"},
        {"$object": {"of": "not_imported_yet:X", "args": []}},
        [{"a": {"$tuple": [{"$dataclass": ["subprocess:Popen", popen]}]}}],
    ):
        with pytest.raises(UntrustedValueError, match="it names"):
            decode(plain)
    assert "not_imported_yet" not in sys.modules and not (tmp_path / "made").exists()
    decode(encode(Evil(os.system, "touch made")), allow_pickle=True)
    assert (tmp_path / "made").exists()


def test_what_cannot_be_kept_says_so_when_it_is_asked_for_and_not_before():
    plain = encode({"lock": threading.Lock(), "fine": 1})
    assert plain["fine"] == 1
    with pytest.raises(UnserializableValueError, match=r"lock.* could not be recorded"):
        decode(plain)
