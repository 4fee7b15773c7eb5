"""Many objects' attributes and many dicts' values at once are what Python reads one by one."""

from __future__ import annotations

import gc
import random
import sys
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from turnwise._C import read_attributes, read_items

COUNTS = [0, 1, 7, 8, 9, 16, 17, 40]
"""Around the distances that the core fetches ahead."""


@dataclass(slots=True)
class Slots:
    first: Any
    second: Any = None


@dataclass(slots=True)
class More(Slots):
    third: Any = None


@dataclass
class Plain:
    first: Any
    second: Any = None


class Shadowed(Slots):
    """A property stands before the slot of the class below."""

    def __init__(self, first: Any) -> None:
        self.first = first
        Slots.second.__set__(self, "in the slot")  # type: ignore[attr-defined]

    @property
    def second(self) -> Any:  # type: ignore[override]
        return ("property", self.first)


class Asked(Slots):
    """Answers for its attributes itself."""

    def __getattribute__(self, name: str) -> Any:
        return f"asked for {name}"


class Late(Slots):
    """Has attributes beside its slots."""

    def __init__(self, first: Any) -> None:
        super().__init__(first)
        self.third = first


MAKERS: list[Callable[[Any], Any]] = [Slots, More, Plain, Shadowed, Asked, Late]


@pytest.mark.parametrize("seed", range(20))
def test_attributes_are_those_that_python_reads(seed: int) -> None:
    draw = random.Random(seed)
    for count in COUNTS:
        makers = draw.sample(MAKERS, draw.randint(1, len(MAKERS)))
        objects = [draw.choice(makers)([seed, number]) for number in range(count)]
        columns = read_attributes(objects, ["first", "second", "__class__"])
        assert columns == tuple([getattr(one, name) for one in objects] for name in ("first", "second", "__class__")), (
            f"seed {seed}, {count} objects"
        )
        for one, value in zip(objects, columns[0], strict=True):
            assert type(one) is Asked or value is one.first, f"seed {seed}"


def test_members_that_are_no_slots_and_any_sequence() -> None:
    numbers = [complex(number, -number) for number in range(20)]
    assert read_attributes(numbers, ["real", "imag"]) == ([one.real for one in numbers], [one.imag for one in numbers])
    assert read_attributes([slice(1, 2), slice(None)], ["start", "stop"]) == ([1, None], [2, None])
    assert read_attributes([sys, gc], ["__name__"]) == (["sys", "gc"],)
    assert read_attributes((Slots(1), Slots(2)), ["first"]) == ([1, 2],)
    assert read_attributes([Slots(1)], []) == ()
    assert read_attributes([], ["first", "second"]) == ([], [])
    with pytest.raises(TypeError):
        read_attributes(None, ["first"])  # type: ignore[arg-type]
    with pytest.raises((TypeError, RuntimeError)):
        read_attributes([Slots(1)], [3])  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 5, 39])
def test_a_missing_attribute_is_an_attribute_error(place: int) -> None:
    objects: list[Any] = [Slots(number) for number in range(40)]
    objects[place] = object()
    with pytest.raises(AttributeError, match="'object' object has no attribute 'first'"):
        read_attributes(objects, ("__class__", "first"))
    objects[place] = Slots(1)
    del objects[place].second
    with pytest.raises(AttributeError, match="second"):
        read_attributes(objects, ["first", "second"])


def test_references_are_counted() -> None:
    value = object()
    objects = [Slots(value) for _ in range(20)]
    before = sys.getrefcount(value), sys.getrefcount(objects[0])
    columns = read_attributes(objects, ["first", "second"])
    assert sys.getrefcount(value) == before[0] + 20
    del columns
    with pytest.raises(AttributeError):
        read_attributes(objects, ["first", "none"])
    assert (sys.getrefcount(value), sys.getrefcount(objects[0])) == before

    mappings = [{"a": value} for _ in range(20)]
    before = sys.getrefcount(value), sys.getrefcount(mappings[0])
    items = read_items(mappings, {"a": None, "b": value})
    assert sys.getrefcount(value) == before[0] + 40
    del items
    assert (sys.getrefcount(value), sys.getrefcount(mappings[0])) == before


def test_a_property_may_change_the_list_that_is_read() -> None:
    objects: list[Any] = []

    class Clears:
        @property
        def first(self) -> str:
            objects.clear()
            gc.collect()
            return "cleared"

    objects += [Clears(), *(Slots([number]) for number in range(30))]
    assert read_attributes(objects, ["first"])[0] == ["cleared", *([number] for number in range(30))]
    assert objects == []


@dataclass
class Counted:
    """A mapping that is no dict."""

    values: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)


class Default(dict[str, Any]):
    """A dict that answers otherwise."""

    def get(self, key: str, default: Any = None) -> Any:
        return ("own", super().get(key, default))


@pytest.mark.parametrize("seed", range(20))
def test_items_are_those_that_get_finds(seed: int) -> None:
    draw = random.Random(seed)
    names = ["a", "b", "c", "temperature"]
    for count in COUNTS:
        mappings: list[Any] = []
        for _ in range(count):
            held = {name: [name] for name in draw.sample([*names, *map(str, range(draw.choice([0, 3, 300])))], 3)}
            mappings.append(draw.choice([dict, dict, dict, ChainMap, Counted, Default])(held))  # type: ignore[operator]
        defaults = {"c": None, "a": 1.0, "none": "there is none"}
        wanted = tuple([held.get(key, default) for held in mappings] for key, default in defaults.items())
        assert read_items(mappings, defaults) == wanted, f"seed {seed}, {count} mappings"


def test_items_of_what_is_no_mapping() -> None:
    with pytest.raises(AttributeError, match="get"):
        read_items([{}, 3], {"a": 1})  # type: ignore[list-item]
    assert read_items([], {"a": 1}) == ([],)
    assert read_items([{}], {}) == ()
