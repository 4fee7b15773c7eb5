"""Adds the less common dict and list methods to the compiled StateDict, StateList and their views."""

from __future__ import annotations

import operator
import sys
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Set, ValuesView
from reprlib import recursive_repr
from typing import Any

from turnwise._C import StateDict, StateDictItems, StateDictKeys, StateDictValues, StateList
from turnwise.state.deep_copies import copy_facade

_MISSING = object()
_IN_EVERY_CLASS = frozenset(vars(type("_", (), {"__eq__": None}))) - {"__eq__"} | {
    "__firstlineno__",
    "__static_attributes__",
}


def add_to(kind: type) -> Any:
    """Copy the attributes of a class body onto a compiled type."""

    def add(body: type) -> type:
        for name in vars(body).keys() - _IN_EVERY_CLASS:
            setattr(kind, name, vars(body)[name])
        return kind

    return add


@add_to(StateDict)
class _DictMethods:
    def setdefault(self: Any, key: Any, default: Any = None, /) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self: Any, other: Any = (), /, **named: Any) -> None:
        if isinstance(other, Mapping) or hasattr(other, "keys"):
            for key in other.keys():  # noqa: SIM118 - what dict.update calls
                self[key] = other[key]
        else:
            for index, pair in enumerate(other):
                try:
                    items = list(pair)
                except TypeError:
                    message = f"cannot convert dictionary update sequence element #{index} to a sequence"
                    raise TypeError(message) from None
                if len(items) != 2:
                    raise ValueError(
                        f"dictionary update sequence element #{index} has length {len(items)}; 2 is required"
                    )
                self[items[0]] = items[1]
        for name, value in named.items():
            self[name] = value

    def copy(self: Any) -> dict[Any, Any]:
        return dict(self.items())

    __copy__ = copy

    @staticmethod
    def fromkeys(keys: Iterable[Any], value: Any = None, /) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)

    def __or__(self: Any, other: Any) -> Any:
        if not isinstance(other, dict):
            return NotImplemented
        return self.copy() | (other.copy() if type(other) is StateDict else other)

    def __ror__(self: Any, other: Any) -> Any:
        return other | self.copy() if isinstance(other, dict) else NotImplemented

    def __ior__(self: Any, other: Any) -> Any:
        self.update(other)
        return self

    @recursive_repr("{...}")
    def __repr__(self: Any) -> str:
        return "{" + ", ".join(f"{key!r}: {value!r}" for key, value in self.items()) + "}"

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Pickle a dict item by item, so that pickle itself keeps aliasing and cycles.
        return dict, (), None, None, iter(self.items())

    __deepcopy__ = copy_facade


def _bound(given: Any, size: int) -> int:
    """Return a start or stop of ``list.index``, counted from the front."""
    try:
        index = operator.index(given)
    except TypeError:
        raise TypeError("slice indices must be integers or have an __index__ method") from None
    return max(index + size, 0) if index < 0 else index


@add_to(StateList)
class _ListMethods:
    def index(self: Any, value: Any, start: Any = 0, stop: Any = sys.maxsize, /) -> int:
        size = len(self)
        start, stop = _bound(start, size), _bound(stop, size)
        at = start
        while at < stop and at < len(self):
            item = self[at]
            if item is value or item == value:
                return at
            at += 1
        raise ValueError(f"{value!r} is not in list")

    def count(self: Any, value: Any, /) -> int:
        return sum(1 for item in self if item is value or item == value)

    def remove(self: Any, value: Any, /) -> None:
        for at, item in enumerate(self):
            if item is value or item == value:
                del self[at]
                return
        raise ValueError("list.remove(x): x not in list")

    def reverse(self: Any) -> None:
        self[:] = self[::-1]

    def sort(self: Any, *, key: Any = None, reverse: bool = False) -> None:
        before = self[:]
        after = sorted(before, key=key, reverse=reverse)
        if len(self) != len(before):
            raise ValueError("list modified during sort")
        self[:] = after

    def copy(self: Any) -> list[Any]:
        return self[:]

    __copy__ = copy

    def __add__(self: Any, other: Any) -> Any:
        return [*self, *other] if isinstance(other, list) else NotImplemented

    def __radd__(self: Any, other: Any) -> Any:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __iadd__(self: Any, other: Any) -> Any:
        self.extend(other)
        return self

    def __mul__(self: Any, times: Any) -> Any:
        return self[:] * times if hasattr(times, "__index__") else NotImplemented

    __rmul__ = __mul__

    def __imul__(self: Any, times: Any) -> Any:
        self[:] = self[:] * times
        return self

    @recursive_repr("[...]")
    def __repr__(self: Any) -> str:
        return "[" + ", ".join(map(repr, self)) + "]"

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return list, (), None, iter(self)

    __deepcopy__ = copy_facade


_SET_METHODS = (
    *("__and__", "__rand__", "__or__", "__ror__", "__sub__", "__rsub__", "__xor__", "__rxor__"),
    *("__le__", "__lt__", "__ge__", "__gt__", "__eq__", "isdisjoint"),
)
for _view in (StateDictKeys, StateDictItems):
    # Keys and items get the set methods of collections.abc. The results are plain sets.
    add_to(_view)(type("_", (), {name: getattr(Set, name) for name in _SET_METHODS} | {"_from_iterable": set}))
    setattr(_view, "__hash__", None)  # noqa: B010


def _view_repr(name: str) -> Any:
    return recursive_repr("...")(lambda self: f"{name}([{', '.join(map(repr, self))}])")


@add_to(StateDictKeys)
class _KeysMethods:
    __repr__ = _view_repr("dict_keys")

    def __contains__(self: Any, key: Any) -> bool:
        return key in self.mapping


@add_to(StateDictItems)
class _ItemsMethods:
    __repr__ = _view_repr("dict_items")

    def __contains__(self: Any, item: Any) -> bool:
        if not (isinstance(item, tuple) and len(item) == 2):
            return False
        value = self.mapping.get(item[0], _MISSING)
        return value is not _MISSING and (value is item[1] or value == item[1])


@add_to(StateDictValues)
class _ValuesMethods:
    __repr__ = _view_repr("dict_values")


KeysView.register(StateDictKeys)
ItemsView.register(StateDictItems)
ValuesView.register(StateDictValues)
