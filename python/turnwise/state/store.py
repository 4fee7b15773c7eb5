"""The store: policies for forking objects that it can't look into, and the memory that versions share."""

from __future__ import annotations

import array
import collections
import copy
import datetime
import decimal
import enum
import fractions
import os
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise import _C
from turnwise.state import files
from turnwise.state.deep_copies import copy_linked
from turnwise.state.leaves import freeze_array
from turnwise.state.shared import SharedObjects
from turnwise.state.versions import Stats
from turnwise.utils import copies

PolicyTuple = tuple[int, Callable[[Any], Any] | None, bool]
"""``(mode, copy, private)``, as the core reads it; see ``Policy`` in ``csrc/bindings/state/policy.h``."""

SHARE, COPY, FREEZE, LINKED = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Policy:
    """The rule by which a fork handles objects of one type.

    ``copy(object)`` makes the copy for another version; ``None`` shares the object itself. ``private=False`` promises
    that copies are never changed. All versions may then read one copy.

    Example: ``Policy(copy=lambda board: board.clone())``
    """

    copy: Callable[[Any], Any] | None = None
    private: bool = True

    def as_tuple(self) -> PolicyTuple:
        return (SHARE, None, False) if self.copy is None else (COPY, self.copy, self.private)


def _through_pickle(value: Any) -> Any:
    return pickle.loads(copies.dumps(value))


def _through_hooks(value: Any) -> Any:
    fresh = copy.copy(value)
    fresh.restore(value.snapshot())
    return fresh


def copy_random(source: random.Random) -> random.Random:
    fresh = type(source)()
    fresh.setstate(source.getstate())
    return fresh


def _copy_torch_generator(source: Any) -> Any:
    fresh = type(source)(device=source.device)
    fresh.set_state(source.get_state())
    return fresh


NAMED: dict[str, Policy] = {
    "share": Policy(),
    "copy": Policy(copies.deep_copy),
    "pickle": Policy(_through_pickle),
    "hooks": Policy(_through_hooks),
}
"""Policies by name. ``hooks`` makes a shallow copy and calls ``restore(snapshot)`` on it with the object's snapshot.

``restore`` must replace the members that it would change, because both objects share them until then.
"""

SHARED_TYPES: tuple[type, ...] = (
    *(complex, type(None), type(Ellipsis), type(NotImplemented), range, frozenset, type, property, slice),
    *(types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.ModuleType, re.Pattern),
    *(enum.Enum, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, pathlib.PurePath, bytes, str, int, float),
)
"""Types whose objects all versions share, as they are immutable.

Forks also share objects of their subclasses, unless these have attributes: then forks copy them. A frozenset with items
that may change is copied like a set.
"""

IDENTITY_TYPES: tuple[type, ...] = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum, datetime.tzinfo),
)
"""Shared types whose objects have attributes, but belong to the program, not to a state."""

COPIED_TYPES: tuple[type, ...] = (
    *(set, bytearray, array.array),
    *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
)
"""Types whose objects forks copy with :func:`copy.deepcopy`."""


LIBRARY_TYPES: dict[tuple[str, str], Policy] = {
    ("numpy", "ndarray"): NAMED["copy"],
    **dict.fromkeys(
        [("numpy", "generic"), ("numpy", "dtype"), ("torch", "dtype"), ("torch", "device")], NAMED["share"]
    ),
    **dict.fromkeys([("numpy.random", "Generator"), ("numpy.random", "RandomState")], NAMED["copy"]),
    ("torch", "Generator"): Policy(_copy_torch_generator),
}
"""Policies for types of numpy and torch, by module and name; subclasses have the same."""

SHARED_UNLESS_OBJECTS: PolicyTuple = (SHARE, None, True)
"""Policy of frozensets: one whose items may change is treated as a set."""

LINKED_OBJECT: PolicyTuple = (LINKED, copies.deep_copy, True)
"""Policy for objects that may refer to one another and to containers of their State. A fork copies them together."""


class Store(_C.StoreBase):
    """Creates States. It knows how to fork the objects in them, and holds the memory that they share.

    ``arrays`` sets how numpy arrays are stored. ``"frozen"`` (default): a read-only leaf that all versions share;
    :meth:`State.writable` returns a private copy. ``"copy"``: a separate array in each version that reads it.
    ``check_shared=True`` checks objects registered with ``"share"`` on insertion and at each fork and commit. It raises
    :class:`StateError` if one was changed in place: slow, for debugging. Unpicklable objects are not checked.

    Example::

        store = Store()
        state = store.state({"board": [[0] * 3 for _ in range(3)], "log": []})
        branches = state.fork(8)
        branches[0].data["board"][1][1] = 5     # the others still see 0
    """

    def __init__(self, *, arrays: str = "frozen", check_shared: bool = False) -> None:
        if arrays not in ("frozen", "copy"):
            raise ValueError(f"arrays={arrays!r}: expected 'frozen' or 'copy'")
        self.arrays = arrays
        self._registered: dict[type, Policy] = {}
        self._shared = SharedObjects() if check_shared else None
        self._checks_shared = check_shared

    def register(self, type_: type, policy: str | Policy) -> None:
        """Set the policy for objects of ``type_`` and its subclasses.

        ``"share"``: all versions hold the same object. ``"copy"``: each version gets a :func:`copy.deepcopy` on first
        access. ``"pickle"``: it gets a copy through pickle. ``"hooks"``: it gets a copy through the object's
        ``snapshot()`` and ``restore(snapshot)``. A :class:`Policy` is also accepted. The policy applies to objects
        inserted from now on.
        """
        if not isinstance(type_, type):
            raise TypeError(f"type_={type_!r}: expected a class")
        if isinstance(policy, str) and policy not in NAMED:
            raise ValueError(f"policy={policy!r}: expected one of {sorted(NAMED)}, or a Policy")
        if not isinstance(policy, str | Policy):
            raise TypeError(f"policy={policy!r}: expected one of {sorted(NAMED)}, or a Policy")
        copies_itself = policy == "copy" and hasattr(type_, "__deepcopy__")
        if policy in ("copy", "pickle") and copies.is_rebuilt(type_) and not copies_itself:
            raise ValueError(f"policy={policy!r}: {copies.refusal(type_)}")
        self._registered[type_] = NAMED[policy] if isinstance(policy, str) else policy
        self._policies.clear()

    def stats(self) -> Stats:
        """Return the memory of the living versions, with and without sharing, in time linear in their contents."""
        return Stats(*self._account())

    def save(self, path: str | os.PathLike[str], states: Mapping[str, _C.State]) -> None:
        """Write versions of this store to a file. Shared parts are written once. :func:`load` reads the file.

        The file is written whole or not at all. Objects that forks copy are written in their current state.

        Example: ``store.save("tree.states", {"root": root, "best": best})``
        """
        files.save(self, path, states)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the store with its policies and without its States, which bring their own contents."""
        attributes = {name: value for name, value in vars(self).items() if name != "_shared"}
        return _store_with, (type(self), attributes, self._checks_shared)

    def __deepcopy__(self, memo: Any) -> Store:
        """Return the store itself: copies of objects that refer to it stay in it."""
        return self

    _copy_linked = staticmethod(copy_linked)

    def _check_shared(self, state: _C.State) -> None:
        """Check shared objects before a fork; the core calls this if ``_checks_shared`` is set."""
        if self._shared is not None:
            self._shared.check(state)

    def _policy_of(self, kind: type) -> PolicyTuple | None:
        """Return the policy of a type, which the core caches; ``None`` if there is none."""
        for base in kind.__mro__:
            if base in self._registered:
                mode, copy_object, private = self._registered[base].as_tuple()
                if self._shared is not None and mode == SHARE:
                    copy_object = self._shared.note
                return mode, copy_object, private
        if issubclass(kind, _C.State | _C.StateDict | _C.StateList):
            return None
        for (module, name), policy in LIBRARY_TYPES.items():
            library_type = getattr(sys.modules.get(module), name, None)  # None: the library is not imported
            if library_type is not None and issubclass(kind, library_type):
                # Subclasses of arrays can hold more than values: masks, units.
                frozen = name == "ndarray" and self.arrays == "frozen" and kind is library_type
                return (FREEZE, freeze_array, False) if frozen else policy.as_tuple()
        # Types of Python, and objects that fork themselves.
        if kind is random.Random:
            return Policy(copy_random).as_tuple()
        if kind in COPIED_TYPES:
            return NAMED["copy"].as_tuple()
        if getattr(kind, "__turnwise_forkable__", False):
            return LINKED_OBJECT
        if issubclass(kind, SHARED_TYPES):
            shared = not getattr(kind, "__dictoffset__", 0) or issubclass(kind, IDENTITY_TYPES)
            if shared and issubclass(kind, frozenset):
                return SHARED_UNLESS_OBJECTS
            return NAMED["share" if shared else "copy"].as_tuple()
        return None


def load(
    path: str | os.PathLike[str],
    *,
    store: Store | None = None,
    allow: Iterable[type | Callable[..., Any]] = (),
    allow_pickle: bool = False,
) -> dict[str, _C.State]:
    """Read the States of a file written by :meth:`Store.save`, by name. Sharing is restored.

    They belong to ``store``, or to a new :class:`Store`, which must know the types of objects that forks copy
    (:meth:`Store.register`). Arrays are read-only views of one block of memory.

    A file may name classes: those of its objects and enum members, and classes stored as values. Names of Python, numpy
    and torch that only build values are allowed. Any other name is refused before import, unless ``allow`` lists that
    class or function; its own code then runs (constructors, ``__setstate__``). No file can create a class, or change
    one that it names. ``allow_pickle=True`` allows everything, including arbitrary code by the file's author.

    Example: ``load("tree.state", allow=[Board])["root"]``

    Raises :class:`CheckpointError`, which names the path, for files that are damaged, cut off, of another format, or
    not States at all. Raises :class:`OpaqueError` for a type without a policy in the store.
    """
    make = (lambda arrays: Store(arrays=arrays)) if store is None else (lambda _: store)
    return files.read(path, make, allow=allow, allow_pickle=allow_pickle)


def _store_with(kind: type[Store], attributes: dict[str, Any], check_shared: bool) -> Store:
    store = kind.__new__(kind)
    Store.__init__(store, check_shared=check_shared)
    vars(store).update(attributes)
    return store


class _Objects(Store):
    """The store of forkable objects. Objects without a policy are deep-copied, with the same memo."""

    def __init__(self) -> None:
        super().__init__(arrays="copy")

    def _policy_of(self, kind: type) -> PolicyTuple | None:
        return super()._policy_of(kind) or LINKED_OBJECT

    def is_shared(self, kind: type) -> bool:
        if kind not in self._policies:
            self._policies[kind] = self._policy_of(kind)
        policy = self._policies[kind]
        return policy is not None and policy[0] == SHARE


OBJECTS = _Objects()
