"""Find the values that only one object refers to. A copy-on-write container can replace them unnoticed."""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

from turnwise._C import State, StateDict, StateList, TokenArray

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose objects never change and refer to nothing: these exact types, not their subclasses."""

HOLDERS = frozenset({set, frozenset, collections.deque, collections.OrderedDict, collections.Counter, bytearray})
"""Containers that a State copies as a whole; they may hold only constants."""


def _references(values: list[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


# Reference count of a value that only the list holds; the number differs between Python versions.
_BASE = _references([[]])[0]


def held_once(values: list[Any], elsewhere: int = 1) -> list[bool]:
    """Return True for each value that only the list and ``elsewhere`` other places hold."""
    return [count == _BASE + elsewhere for count in _references(values)]


def is_constant(value: Any) -> bool:
    """Return True for an atom, or a tuple or frozenset of atoms, also nested."""
    return _all_constant((value,))


def _all_constant(values: Iterable[Any]) -> bool:
    open_, seen = [values], set()
    while open_:
        group = open_.pop()
        if ATOMS.issuperset(map(type, group)):
            continue
        for item in group:
            kind = type(item)
            if kind in ATOMS:
                continue
            if kind is not tuple and kind is not frozenset:
                return False
            if id(item) not in seen:  # one tuple may occur in many
                seen.add(id(item))
                open_.append(item)
    return True


def exclusive_graphs(values: list[Any], home: State | None, is_shared: Callable[[type], bool]) -> list[bool]:
    """Return True for each value that a State may take over unnoticed, with everything that it refers to.

    ``values`` and one other place, the owner, must hold each value. If the graphs of several values overlap, a State
    may take over all of them or none. Containers, constants, arrays, generators and facades of ``home`` qualify. An
    object does not qualify if something outside the graphs refers to it. ``is_shared`` says which other types are
    leaves.
    """
    search = _Search(home, is_shared)
    for part in range(len(values)):
        search.parts.append(part)
        search.walk(values[part], part)
        search.walk(values[part], part)  # the list's own reference
    return search.result()


def graph_of(value: Any, is_shared: Callable[[type], bool]) -> set[int] | None:
    """Return the ids of ``value`` and of all that it refers to; ``None`` if a State can't hold a copy of it."""
    search = _Search(None, is_shared)
    search.parts.append(0)
    search.walk(value, 0)
    return None if search.bad else set(search.references)


class _Search:
    def __init__(self, home: State | None, is_shared: Callable[[type], bool]) -> None:
        self.home, self.is_shared = home, is_shared
        self.nodes: list[Any] = []
        self.references: dict[int, list[int]] = {}  # id -> references met, and the part that met it first
        self.parts: list[int] = []  # union-find: parts whose graphs overlap
        self.bad: set[int] = set()

    def leader(self, part: int) -> int:
        while self.parts[part] != part:
            part = self.parts[part]
        return part

    def walk(self, value: Any, part: int) -> None:
        open_ = [value]
        del value
        while open_:
            item = open_.pop()
            kind = type(item)
            if kind in ATOMS:
                continue
            if (entry := self.references.get(id(item))) is not None:
                entry[0] += 1
                self.parts[self.leader(entry[1])] = self.leader(part)
                continue
            if kind is tuple and is_constant(item):
                continue
            if not self.enter(item, kind, open_):
                self.bad.add(part)
                return

    def enter(self, item: Any, kind: type, open_: list[Any]) -> bool:
        """Add the contents of ``item`` to the walk. Returns False if a State can't take ``item`` over."""
        if kind is StateList or kind is StateDict:
            return item._state is self.home
        if kind is list or kind is tuple:
            if not ATOMS.issuperset(map(type, item)):
                open_.extend(item)
        elif kind is dict:
            if not self.all_constant(item):
                return False
            if not ATOMS.issuperset(map(type, item.values())):
                open_.extend(item.values())
        elif not self.is_leaf(item, kind):
            return False
        elif self.is_shared(kind):
            return True
        self.nodes.append(item)
        self.references[id(item)] = [1, self.parts[-1]]
        return True

    def all_constant(self, items: Iterable[Any]) -> bool:
        return _all_constant(items) or all(
            is_constant(item) or (self.is_shared(type(item)) and type(item) is not frozenset) for item in items
        )

    def is_leaf(self, item: Any, kind: type) -> bool:
        if kind in HOLDERS:
            return self.all_constant(item) and (not issubclass(kind, dict) or self.all_constant(item.values()))
        if kind is TokenArray:
            return item._state is None
        return is_whole(item, kind) or self.is_shared(kind)

    def result(self) -> list[bool]:
        for node, count in zip(self.nodes, _references(self.nodes), strict=True):
            references, part = self.references[id(node)]
            if count != references + _BASE:
                self.bad.add(part)
        bad = {self.leader(part) for part in self.bad}
        return [self.leader(part) not in bad for part in range(len(self.parts))]


def is_whole(value: Any, kind: type) -> bool:
    """Return True for an object that refers to no other Python object: a generator, or an array of numbers."""
    if kind is random.Random:
        return True
    if kind.__module__ == "numpy":
        return kind.__name__ == "ndarray" and not value.dtype.hasobject
    if kind.__module__ == "numpy.random._generator":
        # Another object may hold only the bit generator.
        return sys.getrefcount(value.bit_generator) <= _BIT_GENERATOR
    return kind.__module__ == "numpy.random.mtrand" and kind.__name__ == "RandomState"


_BIT_GENERATOR = 2
