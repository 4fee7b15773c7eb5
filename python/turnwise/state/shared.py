"""Detect shared objects that were changed in place, which affects every version. A debugging aid."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

from turnwise._C import State, StateDict, StateError, StateList


class SharedObjects:
    """Fingerprints of a Store's shared objects: taken on insertion, and compared at forks and commits."""

    def __init__(self) -> None:
        self._fingerprints: dict[int, tuple[Callable[[], Any], bytes]] = {}

    def note(self, value: Any) -> None:
        if id(value) in self._fingerprints:
            return
        digest = _digest(value)
        if digest is None:
            return
        key, fingerprints = id(value), self._fingerprints
        try:
            fingerprints[key] = (weakref.ref(value, lambda _: fingerprints.pop(key, None)), digest)
        except TypeError:  # without weak references the object lives as long as the store
            fingerprints[key] = (lambda: value, digest)

    def check(self, state: State) -> None:
        """Raise :class:`StateError` for the first object that has changed."""
        for reference, digest in list(self._fingerprints.values()):
            value = reference()
            if value is not None and _digest(value) != digest:
                raise StateError(
                    f"{_path_of(state, value)}: a shared object of type {type(value).__name__} was changed in place, "
                    "which every version sees. Change a copy and put that in, or register the type with 'copy'"
                )


def _digest(value: Any) -> bytes | None:
    try:
        written = pickle.dumps(value, 5)
    except Exception:  # a lock or a client can't be pickled, so it can't be compared
        return None
    return hashlib.blake2b(written, digest_size=16).digest()


def _path_of(state: State, value: Any) -> str:
    """Return the path of ``value`` in the State."""
    seen: set[int] = set()
    alive: list[Any] = []
    open_: list[tuple[str, Any]] = [("data", state.data)]
    while open_:
        path, item = open_.pop()
        if item is value:
            return path
        if type(item) not in (StateDict, StateList, dict, list) and not isinstance(item, tuple):
            continue
        if id(item) not in seen:
            seen.add(id(item))
            alive.append(item)
            parts = item.items() if isinstance(item, dict) else enumerate(item)
            open_.extend((f"{path}[{key!r}]", part) for key, part in parts)
    return "in another State of this Store"
