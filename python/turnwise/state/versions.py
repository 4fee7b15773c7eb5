"""Operations on whole versions of a State or a Store: differences, private arrays, sizes."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from turnwise._C import State, StateDict, StateList, TokenArray
from turnwise.state.leaves import freeze_array
from turnwise.state.plain import to_python


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
"""Marks a value that a version lacks."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two versions: the value at ``path`` changed from ``before`` to ``after``, both plain.

    Example: ``Change(path=("board", 0, 2), before=0, after=5)``; ``before`` is :data:`ABSENT` for a new value.
    """

    path: tuple[Hashable, ...]
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Stats:
    """Memory of the living versions of a store, without leaves (strings, numbers, arrays).

    ``bytes`` counts each block once, ``unshared_bytes`` once for every version that holds it. Their ratio is the
    saving from sharing.

    Example: ``Stats(versions=2049, containers=6400, bytes=1_300_000, unshared_bytes=410_000_000)``
    """

    versions: int
    containers: int
    bytes: int
    unshared_bytes: int


# ---- differences ----------------------------------------------------------------------------------------------------
def diff(self: State, other: State) -> list[Change]:
    """Return the differences of ``other`` from this version, in the order of a walk from the root.

    Containers that both share are skipped. Lists are compared index by index. If several paths lead to a pair of
    containers, the difference is reported at the first. The same holds for tuples inside one tuple.

    The cost is that of what changed, after one look at all references. The store keeps an index of them, about 16 bytes
    each, until both versions are gone.
    """
    if type(other) is not State:
        raise TypeError(f"other={other!r}: expected a State")
    self._settle()
    other._settle()
    marks = self._differing(other) if self.store is other.store else None
    seen: set[tuple[int, int]] = set()
    alive: list[Any] = []  # facades and tuples kept alive, so that the ids in `seen` and `nested` stay valid
    changes: list[Change] = []
    # Entries are (path, old, new, nested). Within a tuple, `nested` holds the pairs of tuples met in the outermost one.
    open_: list[tuple[tuple[Hashable, ...], Any, Any, set[tuple[int, int]] | None]] = []
    open_.append(((), self.data, other.data, None))
    while open_:
        path, old, new, nested = open_.pop()
        if old is new:
            continue
        kind = type(old)
        if kind is not type(new) or kind not in (StateDict, StateList, TokenArray, tuple):
            if not _equal(old, new):
                changes.append(Change(path, to_python(old), to_python(new)))
            continue
        # Skip a pair that was met before, and containers that did not change since the versions separated.
        if kind is not tuple:
            nested = None
        elif nested is None:
            nested = set()
        met = seen if nested is None else nested
        if (id(old), id(new)) in met:
            continue
        met.add((id(old), id(new)))
        alive += (old, new)
        if kind is not tuple and marks is not None and old._slot == new._slot and old._slot not in marks:
            continue
        # Without marks, and for tuples and reordered dicts, compare all items; else those that may differ.
        at = None
        if marks is not None and kind in (StateDict, StateList):
            at = self._changed_items(other, old._slot, new._slot, marks)
        if at is not None:
            pairs = _pairs_at(at, old, new)
        else:
            pairs = _pairs_of_dicts(old, new) if kind is StateDict else _pairs_of_lists(old, new)
        open_.extend(reversed([((*path, key), ours, theirs, nested) for key, ours, theirs in pairs]))
    return changes


def _pairs_at(keys: Sequence[Any], old: Any, new: Any) -> Iterator[tuple[Hashable, Any, Any]]:
    ours, theirs = (value if isinstance(value, StateDict) else range(len(value)) for value in (old, new))
    for key in keys:
        yield key, old[key] if key in ours else ABSENT, new[key] if key in theirs else ABSENT


def _pairs_of_dicts(old: StateDict, new: StateDict) -> Iterator[tuple[Hashable, Any, Any]]:
    for key, value in old.items():
        yield key, value, new.get(key, ABSENT)
    for key, value in new.items():
        if key not in old:
            yield key, ABSENT, value


def _pairs_of_lists(old: Sequence[Any], new: Sequence[Any]) -> Iterator[tuple[Hashable, Any, Any]]:
    for index, (before, after) in enumerate(zip_longest(old, new, fillvalue=ABSENT)):
        yield index, before, after


def _equal(old: Any, new: Any) -> bool:
    try:
        if type(old) is type(new) and old == new:
            return True
    except ValueError:  # arrays have no single truth value
        pass
    if isinstance(old, str | int | float | bytes | type(None)) or type(old) is not type(new):
        return False
    try:  # generators and arrays are equal if their pickles are
        return pickle.dumps(old) == pickle.dumps(new)
    except Exception:  # an object that can't be written differs from every other
        return False


# ---- private arrays -------------------------------------------------------------------------------------------------
_WRITABLE_ARRAY = (1, freeze_array, False)


def writable(self: State, *path: Hashable) -> Any:
    """Return the numpy array at ``path`` for writing. It is private to this version from now on; forks copy it.

    Example: ``state.writable("maps", 0)[2, 3] = 1.0``
    """
    if not path:
        raise ValueError("path: expected the keys and indices that lead to an array, for example writable('grid')")
    container = self.data
    for key in path[:-1]:
        container = container[key]
    array = container[path[-1]]
    if not hasattr(array, "flags"):
        raise TypeError(f"path={path!r}: expected a numpy array there, not a {type(array).__name__}")
    if not array.flags.writeable:
        array = array.copy()
        self._put_live(container, path[-1], array, _WRITABLE_ARRAY)
    return array


def _repr(self: State) -> str:
    if self.pruned:
        return "<State, pruned>"
    return f"<State{', frozen' if self.frozen else ''}: {self.data!r:.60}>"


for _name, _method in (("diff", diff), ("writable", writable), ("to_python", to_python), ("__repr__", _repr)):
    setattr(State, _name, _method)
