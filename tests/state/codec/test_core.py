"""Every kind of value comes back from JSON: equal, of its type, with aliases and cycles."""

from __future__ import annotations

import array
import collections
import json
import pathlib
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.state import ABSENT, TokenArray
from turnwise.state.codec import Names, Reader, Writer

from . import hostile


def through(value: Any, **options: Any) -> Any:
    buffers: list[memoryview] = []
    writer = Writer(buffers if options.pop("buffers", False) else None)
    plain = json.loads(json.dumps(writer.write(value)))
    return Reader(Names(**options), buffers).load(plain)


def same(one: Any, other: Any) -> bool:
    """Equal, of one type, and with equal items of one type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) and not one.dtype.hasobject:
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, np.ndarray | torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    if isinstance(one, random.Random):
        return one.getstate() == other.getstate()
    if isinstance(one, np.random.Generator | np.random.RandomState):
        return [one.random() for _ in range(700)] == [other.random() for _ in range(700)]
    if isinstance(one, torch.Generator):
        return torch.equal(torch.rand(9, generator=one), torch.rand(9, generator=other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("name", hostile.leaves())
def test_values_of_every_kind_come_back(name: str, buffers: bool) -> None:
    value = hostile.leaves()[name]
    assert same(through(value, buffers=buffers), value)


@pytest.mark.parametrize(
    "value",
    [
        *(ABSENT, NotImplemented, TokenArray([1, 2]), array.array("d", [1.5]), array.array("u", "h\u00e9"), type(...)),
        *(pathlib.PureWindowsPath("c:/x"), torch.bfloat16, torch.device("cpu"), torch.zeros(0, 3), np.array(5)),
        *(
            torch.ones(2, dtype=torch.bfloat16),
            np.array([[1, "a"], [None, [2]]], object),
            np.zeros((0, 3)),
            np.zeros(2)[::2],
        ),
        *(10**5000, -(2**63), [2**63, (10**5000,)], {"$ref": 1}, {"$tuple": 1, "other": 2}, float("-inf"), -0.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_at_the_edge_come_back(value: Any) -> None:
    back = through(value)
    assert same(back, value)


def test_what_an_array_is_comes_back() -> None:
    frozen = np.arange(300.0)
    frozen.setflags(write=False)
    columns = np.asfortranarray(np.ones((2, 3)))
    back = through([frozen, columns, np.arange(300), torch.zeros(2, requires_grad=True)], buffers=True)
    assert [each.flags.writeable for each in back[:3]] == [False, True, True]
    assert back[1].flags.f_contiguous and not back[1].flags.c_contiguous and back[3].requires_grad


def test_generators_go_on_alike() -> None:
    bits = np.random.PCG64([1, 2])
    first, second = through([np.random.Generator(bits), np.random.Generator(bits)])
    assert first.bit_generator is second.bit_generator
    assert first.spawn(1)[0].random() == np.random.Generator(np.random.PCG64([1, 2])).spawn(1)[0].random()


def test_tuples_that_hold_themselves_and_deep_ones() -> None:
    held: list[Any] = []
    whole = ((held, 1, [held]), [3])
    held += [whole, whole[0]]
    back, part = through([whole, whole[0]])
    assert back[0] is part is back[0][0][1] and back[0][0][0] is back
    deep: Any = ({1},)
    for _ in range(1000):
        deep = (deep, deep)
    back = through(deep)
    for _ in range(1000):
        assert back[0] is back[1]
        back = back[0]
    assert back == ({1},)


def test_what_cannot_be_written() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    for value in (threading.Lock(), [{"a": threading.Lock()}], lambda: 1, deep):
        with pytest.raises((TypeError, AttributeError)):
            Writer().write(value)
    shared = [1]
    plain = Writer(lose=True).write([shared, (threading.Lock(), [2]), shared])
    assert plain[0] == [1] and "lock" in plain[1]["$tuple"][0]["$lost"] and plain[2] == {"$ref": 1}


def test_any_class_may_be_named_by_who_trusts_the_file() -> None:
    value = [collections.ChainMap({1: 2}), collections.UserList([1]), pathlib.Path.home, len, hostile.Place(1, [2])]
    back = through(value, anything=True)
    assert repr(back) == repr(value) and list(map(type, back)) == list(map(type, value))
    with pytest.raises(ValueError, match=r"it names collections\.ChainMap"):
        through(value)
