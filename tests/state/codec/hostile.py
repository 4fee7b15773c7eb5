"""Values that somebody chose to do harm, and mutations of good ones. It runs in a process of its own: see test_hostile.

Each crafted value is the JSON that stands in an archive of States, in a record, or in a store.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import copy
import datetime
import decimal
import enum
import fractions
import hashlib
import itertools
import json
import pickle
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from turnwise.arena.recording.lossless_json import decode, encode
from turnwise.state import CheckpointError, OpaqueError, Store, files, load
from turnwise.state.codec import CodecError, Names, Reader, Writer

POINTER = base64.b64encode((0x4141414141414141).to_bytes(8, "little")).decode()
EIGHT = base64.b64encode(bytes(8)).decode()


def array(dtype: Any, shape: list[Any], data: Any = EIGHT, **parts: Any) -> Any:
    return {"$array": {"dtype": dtype, "shape": shape, "data": data, **parts}}


def struct_of(formats: list[Any], offsets: list[int], itemsize: int = 8) -> Any:
    names = [f"f{number}" for number in range(len(formats))]
    titles = [None] * len(formats)
    facts = {"names": names, "formats": formats, "offsets": offsets, "titles": titles, "itemsize": itemsize}
    return facts | {"aligned": False, "record": False}


def bits(kind: str, change: dict[str, Any]) -> Any:
    """A generator of numpy whose state has other entries."""
    plain = encode(getattr(np.random, kind)(3))
    state = plain["$bits"][2]
    (state if set(change) <= set(state) else state["state"]).update(change)
    return {"$generator": plain}


def torch_generator(left: int, place: int, numbers: int | None = None) -> Any:
    state = bytearray(torch.Generator().get_state().numpy().tobytes())
    struct.pack_into("<QiiQ", state, 0, 3, left, 1, place)
    if numbers is not None:
        struct.pack_into("<624Q", state, 24, *[numbers] * 624)
    return {"$torch_generator": ["cpu", base64.b64encode(state).decode()]}


def tower(depth: int, mark: str) -> Any:
    """A tuple whose hash takes 2**depth steps: each of its tuples holds the one before twice."""
    below: Any = {mark: [{"$blank": None}]}
    values = [below]
    for number in range(1, depth):
        values.append({mark: [{"$ref": 2 * number}, {"$ref": 2 * number}]})
    return {"$map": [[{"$tuple": values}, 1]]}


def call(name: str, *args: Any) -> Any:
    return {"$object": {"of": name, "args": list(args)}}


def nested(depth: int, mark: str | None) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value] if mark is None else {mark: [value]}
    return value


ODD_BOOLS = base64.b64encode(b"\x02" * 8).decode()
PRIME = 2**61 - 1
CRAFTED: dict[str, Any] = {
    # Bytes of the file become pointers to objects.
    "array of objects": array("|O", [1], POINTER),
    "array of objects in a list": call("builtins:list", array("|O", [1], POINTER)),
    "array with an object in a field": array(struct_of(["|O"], [0]), [1], POINTER),
    "array with an object in a subarray": array({"base": "|O", "shape": [1]}, [1], POINTER),
    "array with an object deep in a field": array(struct_of([struct_of(["|O"], [0])], [0]), [1], POINTER),
    "scalar that is an object": {"$scalar": ["|O", POINTER]},
    "scalar with an object in a field": {"$scalar": [struct_of(["|O"], [0]), POINTER]},
    "array of objects without objects": {"$array": {"dtype": "|O", "shape": [9], "items": []}},
    # Memory that is not the array's.
    "field before the array": array(struct_of(["<i8"], [-64]), [1]),
    "field far behind the array": array(struct_of(["<i8"], [1 << 30]), [1]),
    "field beyond the end": array(struct_of(["<i8"], [4]), [1]),
    "more items than bytes": array("<i8", [1_000_000]),
    "fewer items than bytes": array("<i4", [1]),
    "negative size": array("<i8", [-1]),
    "two negative sizes": array("<i8", [-1, -1]),
    "size that is a bool": array("<i8", [True]),
    "size that overflows": array("<i8", [2**32, 2**32]),
    "no data": {"$array": {"dtype": "<i8", "shape": [64]}},
    "items of no bytes": array("|V0", [2**40], ""),
    "buffer that does not exist": array("<i8", [1], 7),
    "buffer before the first": array("<i8", [1], -1),
    "dtype by name": array("numpy.object_", [1]),
    "dtype with a list of fields": array("i4,O", [1]),
    "bool that is 2": array("|b1", [8], ODD_BOOLS),
    "bool that is 2 in a field": array(struct_of(["|b1"], [3]), [1], ODD_BOOLS),
    "bool that is 2 in a tensor": {"$tensor": {"dtype": "bool", "shape": [8], "data": ODD_BOOLS}},
    "scalar bool that is 2": {"$scalar": ["|b1", base64.b64encode(b"\2").decode()]},
    "array of objects that holds itself": {"$array": {"dtype": "|O", "shape": [1], "items": [{"$ref": 0}]}},
    "arrays of objects that hold each other": {
        "$array": {
            "dtype": "|O",
            "shape": [1],
            "items": [{"$array": {"dtype": "|O", "shape": [], "items": [{"$ref": 0}]}}],
        }
    },
    "more rows than bytes": array("<f8", [2**40, 0], ""),
    "tensor of more rows than bytes": {"$tensor": {"dtype": "float32", "shape": [2**40, 0], "data": ""}},
    "fields that overlap": array(struct_of(["|b1"] * 9, [0] * 9), [1]),
    "unit of no parts": {"$dtype": "<M8[D/0]"},
    "unit of 0": array("<m8[0s]", [1]),
    "character that does not exist": array("<U2", [1], base64.b64encode(b"\xff" * 8).decode()),
    "character that does not exist, swapped": array(">U2", [1], base64.b64encode(b"\1\0\0\0" * 2).decode()),
    "tensor that is quantized": {"$tensor": {"dtype": "quint8", "shape": [8], "data": EIGHT}},
    "tensor of a module": {"$tensor": {"dtype": "_inductor", "shape": [0], "data": ""}},
    "tensor without memory": {"$tensor": {"dtype": "float64", "shape": [1], "data": EIGHT, "device": "meta"}},
    "tensor of more items": {"$tensor": {"dtype": "float32", "shape": [1 << 30], "data": EIGHT}},
    "tensor of no type": {"$tensor": {"dtype": "load", "shape": [1], "data": EIGHT}},
    "generator beyond its numbers": bits("MT19937", {"pos": 1 << 28}),
    "generator before its numbers": bits("MT19937", {"pos": -5}),
    "buffer of a generator beyond its end": bits("Philox", {"buffer_pos": -(1 << 28)}),
    "generator of fewer numbers": bits("MT19937", {"key": array("<u4", [2])}),
    "generator of objects": bits("SFC64", {"state": [{}]}),
    "generator that draws zeros": bits("MT19937", {"key": array("<u4", [624], base64.b64encode(bytes(2496)).decode())}),
    "generator that steps by 0": bits("PCG64", {"inc": 0}),
    "random numbers that are zeros": {"$random": [3, [0] * 624 + [624], None]},
    "torch's generator that draws zeros": torch_generator(1, 0, numbers=0),
    "torch's generator beyond its numbers": torch_generator(624, 620),
    "torch's generator far beyond": torch_generator(2, 1 << 40),
    "error that points before its text": {
        "$error": ["builtins:UnicodeDecodeError", ["utf-8", {"$bytes": ""}, -9, -8, "x"], {}]
    },
    "error that points behind its text": {
        "$error": ["builtins:UnicodeEncodeError", ["utf-8", "a", 1 << 40, (1 << 40) + 1, "x"], {}]
    },
    # Little JSON that takes all memory or time.
    "int of a decimal": call("builtins:int", {"$decimal": "1E+999999999"}),
    "fraction of a text": {"$fraction": ["1e999999999", 1]},
    "fraction of a decimal": call("fractions:Fraction", {"$decimal": "1E+999999999"}),
    "list of a range": call("builtins:list", {"$range": [0, 1 << 33, 1]}),
    "bytes of a number": {"$bytes": 1 << 40},
    "bytearray of a number": {"$bytearray": 1 << 40},
    "object that is a number's bytes": call("builtins:bytes", 1 << 40),
    "seed with a large pool": {"$seed": [1 << 30, 0, {"$tuple": []}, 5]},
    "seed of a large number": {"$seed": [4, 0, {"$tuple": []}, {"$int": "0x1" + "0" * 400_000}]},
    "fraction of large numbers": {"$fraction": [{"$int": "0x1" + "7" * 400_000}, {"$int": "0x3" + "1" * 400_000}]},
    "keys of one hash": {"$map": [[PRIME * number, 0] for number in range(1, 20_000)]},
    "set of one hash": {"$set": [PRIME * number for number in range(1, 20_000)]},
    "keys of which half have one hash": {
        "$map": [[number * each, 0] for number in range(1, 9999) for each in (1, PRIME)]
    },
    "set of which a tenth has one hash": {"$set": [*range(1, 20_000), *(PRIME * number for number in range(1, 2000))]},
    "tuples that hash for ever": tower(64, "$tuple"),
    "pattern that compiles for ever": {"$pattern": ["[\\x00-\\U0010ffff]" * 200, 2]},
    "pattern that compiles for ever by its own flag": {"$pattern": ["(?i)" + "[\\x00-\\U0010ffff]" * 200, 32]},
    "long pattern": {"$pattern": ["[\\u0100-\\uffff]" * 10_000, 32]},
    "nested lists": nested(300, None),
    "nested tuples": nested(300, "$tuple"),
    "nested sets": nested(300, "$frozenset"),
    "nested refs": nested(300, "$again"),
    # Names.
    "command": call("os:system", "touch made"),
    "constructor": call("subprocess:Popen", ["touch", "made"]),
    "constructor of what may be named": call("builtins:type", "K", {"$tuple": []}, {}),
    "attribute": call("builtins:getattr", {"$name": "builtins:str"}, "__class__"),
    "module that is not imported": {"$name": "this:s"},
    "module of a module": {"$name": "torch:_inductor"},
    "default that is called": {"$default": [{"$dataclass": ["hostile:Board", {"cells": 1, "log": []}]}, []]},
    "default that is a class": {"$default": [{"$name": "hostile:Board"}, []]},
    "method of a dataclass": {
        "$dataclass": ["hostile:Board", {"cells": 1, "log": [], "__deepcopy__": {"$name": "builtins:list"}}]
    },
    "method of an exception": {"$error": ["builtins:ValueError", [], {"with_traceback": {"$name": "builtins:list"}}]},
    "name of a name": {"$name": "builtins:str.join"},
    "dataclass that is none": {"$dataclass": ["builtins:str", {}]},
    "enum that is none": {"$enum": ["builtins:int", "real"]},
    "exception that is none": {"$error": ["builtins:int", [5], {}]},
    "named tuple that is none": {"$named": ["builtins:tuple", []]},
    "name that is no text": {"$name": 5},
    # What is no value.
    "unknown kind": {"$pickle": "gASVBA=="},
    "reference to nothing": {"$ref": 5},
    "reference before the first": {"$ref": -1},
    "reference to itself": {"$tuple": [{"$ref": 0}]},
    "key that is a list": {"$map": [[[], 1]]},
    "set in a set": {"$set": [{"$set": []}]},
    "no base64": {"$bytes": "?"},
    "complex of texts": {"$complex": ["1", "2"]},
    "decimal of no text": {"$decimal": [0, [1], 5]},
    "date of the year 0": {"$date": [0, 1, 1]},
    "date by its memory": {"$date": ["\0\0\1\0"]},
    "time by its memory": {"$time": ["\x10\xff\xff\0\0\0", None, 0]},
    "moment by its memory": {"$datetime": ["\0\0\1\0\xff\xff\xff\0\0\0", None, 0]},
    "span of a text": {"$timedelta": ["1"]},
    "path of another kind": {"$path": ["Popen", "a"]},
    "random numbers of another kind": {"$random": [3, [1.5] * 625, None]},
}


def sealed(sections: list[bytes]) -> bytes:
    """The file of these sections, with every checksum right."""
    head, offset, body = struct.pack("<8sII", files.MAGIC, files.FORMAT, files.SECTIONS), 160, b""
    for number, data in enumerate(sections):
        gap = -offset % files.ALIGNMENT if number == 3 else 0
        offset += gap
        body += bytes(gap) + data
        head += struct.pack("<QQ", offset, len(data)) + hashlib.blake2b(data, digest_size=16).digest()
        offset += len(data)
    return head + hashlib.blake2b(head, digest_size=16).digest() + body


def sections_of(whole: bytes) -> list[bytes]:
    places = [struct.unpack_from("<QQ", whole, 16 + 32 * number) for number in range(4)]
    return [whole[offset : offset + length] for offset, length in places]


@contextlib.contextmanager
def bounded(size: int) -> Iterator[None]:
    """Let the block take 1 s of the processor, and 4 times ``size`` of memory and what an allocator rounds up."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + 4 * size + (48 << 20)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (most, unlimited[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, unlimited)


class SlowError(BaseException):
    pass


def _stop(*_: Any) -> None:
    raise SlowError


def check_keys() -> None:
    """A key that takes for ever to hash, or whose hash overflows the stack, is refused where it becomes a key."""
    signal.signal(signal.SIGVTALRM, _stop)
    wide: list[Any] = [{"$tuple": [{"$blank": None}]}]
    deep = list(wide)
    for number in range(5000):
        wide.append({"$tuple": [{"$ref": number + 1}] * 2})
        deep.append({"$tuple": [{"$ref": number + 1}]})
    for tuples in (wide[:64], deep):
        values = json.dumps([{"$deque": [None, tuples]}, {"$ref": len(tuples) + 1}])
        key = Reader(Names()).load_all(json.loads(values))[1]
        structure, _, versions = (store := Store())._archive([store.state({"a": 1})])
        try:
            with bounded(len(values)):
                store._restore(structure, [key], versions)
        except CheckpointError as error:
            assert "keys that take too long to hash" in str(error)
        else:
            raise AssertionError("it was read")
    whole = ((1, 2), (3, (4, "a")))
    assert store._restore(structure, [whole], versions)[0].data == {whole: 1}


def check_twice() -> None:
    """A dict that has one key twice is refused: in the first version and in a changed one, with an index and without"""
    for size in (2, 8, 40):
        store = Store()
        first = store.state({f"k{number}": number for number in range(size)})
        second = first.fork()
        second.data["k0x"] = 0
        structure, leaves, versions = store._archive([first, second])
        assert [len(state.data) for state in Store()._restore(structure, leaves, versions)] == [size, size + 1]
        for name, other in (("k1", "k0"), ("k0", f"k{size - 1}"), ("k0x", "k0"), ("k0x", f"k{size - 1}")):
            crafted = [other if leaf == name else leaf for leaf in leaves]
            try:
                Store()._restore(structure, crafted, versions)
            except CheckpointError as error:
                assert "a dict with a key twice" in str(error)
            else:
                raise AssertionError(f"{size} keys, {name} as {other}: it was read")


def check_crafted() -> None:
    """Read each crafted value in all ways. It must be refused."""
    signal.signal(signal.SIGVTALRM, _stop)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        Store().state({"a": {1}}).save(path)
        header, structure, _, buffers = sections_of(path.read_bytes())
        for name, plain in CRAFTED.items():
            text = json.dumps(plain)
            path.write_bytes(sealed([header, structure, f'{{"kinds":"sv","s":["a"],"v":[{text}]}}'.encode(), buffers]))
            reads = {
                "state": lambda: load(path),
                "record": lambda text=text: decode(json.loads(text)),
                "values": lambda text=text: Reader(Names()).load(json.loads(text)),
            }
            for way, read in reads.items():
                try:
                    with bounded(len(text)):
                        value = read()
                except (CheckpointError, CodecError):
                    continue
                except BaseException as error:
                    failed.append(f"{name}, {way}: {type(error).__name__}: {error}")
                else:
                    failed.append(f"{name}, {way}: it was read as {type(value)}")
    assert not failed, "\n".join(failed)


# ---- mutations ------------------------------------------------------------------------------------------------------
class Suit(enum.Flag):
    HEARTS = 1
    SPADES = 2


class Place(NamedTuple):
    row: int
    cells: list[int]


@dataclass
class Board:
    cells: Any
    log: list[Any] = field(default_factory=list)


def leaves() -> dict[str, Any]:
    """A value of each kind that any file may hold."""
    zone = datetime.timezone(datetime.timedelta(hours=2), "X")
    shared = [1, {"a": 2}]
    torch_part = {
        "tensor": [torch.arange(3.0), torch.ones(2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.complex64)],
        "flags": torch.tensor([True]),
        "objects": np.array([1, None, "a"], object),
        "torch": torch.Generator(),
    }
    return torch_part | {
        "texts": ["", "abc", "\u00e9\U0001f600"],
        "numbers": [1, -(2**70), 2.5, float("inf"), 1j, decimal.Decimal("1.50"), fractions.Fraction(1, 3)],
        "bytes": [b"ab", bytes(400), bytearray(b"x")],
        "tuples": [(1, "a"), ((1, 2), None), (1, (2, (3, {4})))],
        "sets": [{1, "a", (2, 3)}, frozenset({b"x"})],
        "dicts": {1: "a", (2, 3): [4], None: {"$x": 5}},
        "shared": [shared, shared],
        "times": [datetime.datetime(2026, 1, 2, 3, tzinfo=zone), datetime.date(1, 1, 1), datetime.timedelta(1)],
        "others": [range(3), slice(1, None), uuid.UUID(int=5), Path("/a/b"), re.compile("a+", 2), ..., int, type(None)],
        "containers": [
            *(collections.deque([1, [2]], 5), collections.Counter("abca"), collections.OrderedDict(a=1)),
            collections.defaultdict(list, {1: [2]}),
        ],
        "arrays": [
            *(np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3), "i2")), np.array(["a", "bcd"])),
            *(np.zeros(2, [("a", "<i4"), ("b", "?", (2,))]), np.array([True, False]), np.array(["2020"], "M8[D]")),
            *(np.array(["1", "2"], ">U1"), np.ones(1, "<f2"), np.ones(1, "c16")),
            np.array([5], "m8[25s]"),
        ],
        "scalars": [np.float32(1.5), np.str_("a"), np.bool_(True), np.dtype("f8"), np.int8],
        "generators": [
            *(random.Random(3), np.random.default_rng(3), np.random.RandomState(3)),
            *(np.random.Generator(kind(3)) for kind in (np.random.Philox, np.random.SFC64, np.random.MT19937)),
        ],
    }


def records() -> dict[str, Any]:
    errors = [KeyError("x"), OSError(2, "no", "f"), UnicodeDecodeError("utf-8", b"abc", 1, 2, "bad")]
    return leaves() | {"classes": [Suit.HEARTS, Suit(3), Place(1, [2]), Board(Board((1, 2))), errors]}


POOL: list[Any] = [
    *(None, True, -1, 0, 1, 2, 3, 624, 1 << 31, 1 << 40, 1 << 63, -(1 << 63), 10**30, 0.5, float("nan"), 1e308),
    *("", "a", "0x1", "|O", "<i8", "<U1", "<f8", "|b1", "builtins:int", "numpy:float32", "F", EIGHT, POINTER),
    *(
        [],
        {},
        [[]],
        [1, 2],
        {"$ref": 0},
        {"$ref": 3},
        {"$tuple": []},
        {"$set": [1]},
        {"$bytes": EIGHT},
        {"$int": "-0x5"},
    ),
]


def nodes(plain: Any) -> list[tuple[Any, Any]]:
    """Every place of a value in JSON: what holds it, and its key."""
    found, open_ = [], [plain]
    while open_:
        holder = open_.pop()
        keys: Any = holder if type(holder) is dict else range(len(holder)) if type(holder) is list else ()
        for key in keys:
            found.append((holder, key))
            open_.append(holder[key])
    return found


def change(plain: Any, rng: random.Random) -> Any:
    """A copy with a few values replaced, swapped, removed or renamed."""
    plain = [copy.deepcopy(plain)]
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = nodes(plain)
        (holder, key), (other, at) = rng.choice(places), rng.choice(places)
        match rng.randrange(6):
            case 0 | 1:
                holder[key] = copy.deepcopy(rng.choice(POOL))
            case 2:
                holder[key] = copy.deepcopy(other[at])
            case 3 if holder is not plain:
                del holder[key]
            case 4 if type(holder) is list:
                holder.insert(key, copy.deepcopy(other[at]))
            case 5 if type(holder) is dict and key.startswith("$"):
                marks = [name for _, name in places if type(name) is str and name.startswith("$")]
                holder[rng.choice(marks)] = holder.pop(key)
    return plain[0] if plain else None


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice([1, 1, 3])):
        place, length = rng.randrange(len(changed)), rng.randrange(1, 9)
        match rng.randrange(4):
            case 0:
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                changed[place] = rng.randrange(256)
            case 2:
                del changed[place : place + length]
            case 3:
                changed[place:place] = changed[place : place + length]
        changed = changed or bytearray(b"\0")
    return bytes(changed)


TOUCHES: list[Any] = [
    *(repr, str, hash, len, bool, copy.copy, lambda item: item == item, lambda item: pickle.dumps(item)),
    *(lambda item: item.tolist(), lambda item: item + item, lambda item: item.astype(str), lambda item: item.copy()),
    *(lambda item: np.sort(item), lambda item: item.nonzero(), lambda item: item.clone(), lambda item: item[0]),
    *(lambda item: item.ctime(), lambda item: item.isoformat(), lambda item: item.strftime("%A %B %S")),
    *(lambda item: [item.random() for _ in range(700)], lambda item: item.integers(10), lambda item: item.normal()),
    *(lambda item: item.normalvariate(0, 1), lambda item: torch.rand(700, generator=item)),
    lambda item: [int(item), float(item), complex(item)] if not isinstance(item, decimal.Decimal) else None,
    lambda item: Writer(lose=True).write(item),
]
"""What a program may do with a value. Each harm that was found came with one of these."""


def use(value: Any) -> None:
    """Touch what was read, as harm may come late. Any error is fine."""
    for item in itertools.islice(_below(value), 500):
        for touch in TOUCHES:
            with contextlib.suppress(Exception):
                touch(item)


def _below(value: Any) -> Iterator[Any]:
    open_, seen = [value], set()
    while open_:
        item = open_.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            open_ += item.values()
        elif isinstance(item, list | tuple | set | frozenset | collections.deque):
            open_ += list(item)
        else:
            yield item


def fuzz(kind: str, seed: int, rounds: int) -> None:
    """Read mutated archives or records. Each must give an error or a value."""
    signal.signal(signal.SIGVTALRM, _stop)
    rng = random.Random(seed)
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        Store(arrays=rng.choice(["frozen", "copy"])).state(_state_leaves()).save(path)
        whole = sections_of(path.read_bytes())
        objects = json.loads(whole[2])
        record = json.loads(json.dumps(encode(records())))
        for number in range(rounds):
            if kind == "archives":
                sections = list(whole)
                match rng.randrange(8):
                    case 0:
                        section = rng.randrange(4)
                        sections[section] = flip(sections[section], rng)
                    case 1:
                        sections[0] = json.dumps(change(json.loads(sections[0]), rng)).encode()
                    case _:
                        sections[2] = json.dumps(change(objects, rng)).encode()
                data = sealed(sections)
                path.write_bytes(data)
            elif rng.random() < 0.2:
                data = flip(json.dumps(record).encode(), rng)
            else:
                part = rng.choice(list(record))
                data = json.dumps(change(record if rng.random() < 0.2 else record[part], rng)).encode()
            try:
                with bounded(len(data)):
                    value = load(path)["state"].to_python() if kind == "archives" else decode(json.loads(data))
                    use(value)
            except (CheckpointError, OpaqueError, ValueError, KeyError):
                refused += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}, round {number}: {data!r:.5000}") from error
    print(f"{refused} of {rounds} refused")
    assert rounds // 10 < refused < rounds


def _state_leaves() -> dict[str, Any]:
    """The values without tensors and arrays of objects, which a store does not take."""
    values = leaves()
    return {name: value for name, value in values.items() if name not in ("tensor", "flags", "objects")}
