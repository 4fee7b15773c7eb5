"""The store: what a fork does with objects that it can't look into, and how the versions share memory."""

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise import _C, copies
from turnwise.state import files
from turnwise.state.arrays import freeze_array
from turnwise.state.joint import copy_linked
from turnwise.state.shared import SharedObjects
from turnwise.state.versions import Stats, stats

PolicyTuple = tuple[int, Callable[[Any], Any] | None, bool]
"""``(mode, copy, private)``, as the core reads it; see ``Policy`` in ``csrc/bindings/state.h``."""

SHARE, COPY, FREEZE, LINKED = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Policy:
    """What a fork does with objects of one type.

    ``copy(object)`` makes the copy that another version gets; ``None`` shares the object itself. ``private=False`` says
    that nobody changes the copies, so that all versions may read one.

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


def _copy_random(source: random.Random) -> random.Random:
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
"""The policies by name. ``hooks``: a shallow copy of the object takes its ``snapshot()`` by ``restore(snapshot)``,
which must put new members in the place of those that it would change, since the two share them until then."""

SHARED_TYPES: tuple[type, ...] = (
    *(complex, type(None), type(Ellipsis), type(NotImplemented), range, frozenset, type, property, slice),
    *(types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.ModuleType, re.Pattern),
    *(enum.Enum, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, pathlib.PurePath, bytes, str, int, float),
)
"""Types of which no object changes, nor objects of their subclasses without attributes."""

COPIED_TYPES: tuple[type, ...] = (
    *(set, bytearray, array.array),
    *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
)
"""Types whose objects are copied by :func:`copy.deepcopy` at forks."""


def _foreign_type(module: str, name: str) -> type | None:
    """A type of a library, if something has imported that library."""
    return getattr(sys.modules.get(module), name, None)


LINKED_OBJECT: PolicyTuple = (LINKED, copies.deep_copy, True)
"""Of objects that may lead to one another and to containers of their State: a fork copies them together."""


class Store(_C.StoreBase):
    """Where States come from: it knows how to fork the objects in them, and what they all share.

    ``arrays`` says what a numpy array becomes: ``"frozen"`` (default), a read-only leaf that all versions share, of
    which :meth:`State.writable` hands out a private copy; or ``"copy"``, one of its own in each version that asks.
    ``check_shared=True`` looks at every object registered with ``"share"`` when it is put in and at each fork and
    commit, and raises :class:`StateError` if one was changed in place: slow, for debugging. Objects that pickle can't
    write are not looked at.

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
        """Say what forks do with objects of ``type_`` and its subclasses.

        ``"share"``: all versions hold the same object. ``"copy"``: each gets a :func:`copy.deepcopy` when it first asks
        for it. ``"pickle"``: the same through pickle. ``"hooks"``: through the object's ``snapshot()`` and
        ``restore(snapshot)``. Or a :class:`Policy`. It holds for objects that are put in from now on.
        """
        if not isinstance(type_, type):
            raise TypeError(f"type_={type_!r}: expected a class")
        if isinstance(policy, str) and policy not in NAMED:
            raise ValueError(f"policy={policy!r}: expected one of {sorted(NAMED)}, or a Policy")
        if not isinstance(policy, str | Policy):
            raise TypeError(f"policy={policy!r}: expected one of {sorted(NAMED)}, or a Policy")
        copies_itself = policy == "copy" and hasattr(type_, "__deepcopy__")
        if policy in ("copy", "pickle") and copies.is_made_anew(type_) and not copies_itself:
            raise ValueError(f"policy={policy!r}: {copies.refusal(type_)}")
        self._registered[type_] = NAMED[policy] if isinstance(policy, str) else policy
        self._policies.clear()

    def stats(self) -> Stats:
        """What the living versions cost together, and what they would cost without sharing."""
        return stats(self)

    def save(self, path: str | os.PathLike[str], states: Mapping[str, _C.State]) -> None:
        """Write versions of this store to a file; what they share is written once. :func:`load` reads it.

        The file appears whole or not at all. Objects that forks copy are written as they are now.

        Example: ``store.save("tree.states", {"root": root, "best": best})``
        """
        files.save(self, path, states)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A store with the same policies and none of the States, which bring their contents themselves."""
        attributes = {name: value for name, value in vars(self).items() if name != "_shared"}
        return _store_with, (type(self), attributes, self._checks_shared)

    def __deepcopy__(self, memo: Any) -> Store:
        """Itself: copies of what refers to it go on living in it."""
        return self

    _copy_linked = staticmethod(copy_linked)

    def _check_shared(self, state: _C.State) -> None:
        """What the core calls before a fork, if ``_checks_shared`` says so."""
        if self._shared is not None:
            self._shared.check(state)

    def _policy_of(self, kind: type) -> PolicyTuple | None:
        """The policy of a type, which the core remembers; ``None`` where there is none."""
        for base in kind.__mro__:
            if base in self._registered:
                policy = self._registered[base].as_tuple()
                return policy if self._shared is None or policy[0] != SHARE else (SHARE, self._shared.note, False)
        if issubclass(kind, _C.State | _C.StateDict | _C.StateList):
            return None
        ndarray = _foreign_type("numpy", "ndarray")
        if ndarray is not None and issubclass(kind, ndarray):
            # Subclasses can hold more than values: masks, units.
            frozen = self.arrays == "frozen" and kind is ndarray
            return (FREEZE, freeze_array, False) if frozen else NAMED["copy"].as_tuple()
        for module, name in (("numpy", "generic"), ("numpy", "dtype"), ("torch", "dtype"), ("torch", "device")):
            found = _foreign_type(module, name)
            if found is not None and issubclass(kind, found):
                return NAMED["share"].as_tuple()
        for module, name in (("numpy.random", "Generator"), ("numpy.random", "RandomState")):
            found = _foreign_type(module, name)
            if found is not None and issubclass(kind, found):
                return NAMED["copy"].as_tuple()
        generator = _foreign_type("torch", "Generator")
        if generator is not None and issubclass(kind, generator):
            return Policy(_copy_torch_generator).as_tuple()
        if kind is random.Random:
            return Policy(_copy_random).as_tuple()
        if kind in COPIED_TYPES:
            return NAMED["copy"].as_tuple()
        if getattr(kind, "__turnwise_forkable__", False):
            return LINKED_OBJECT
        if issubclass(kind, SHARED_TYPES) and (not _has_attributes(kind) or issubclass(kind, SHARED_TYPES[5:])):
            return NAMED["share"].as_tuple()
        return None


def _store_with(kind: type[Store], attributes: dict[str, Any], check_shared: bool) -> Store:
    store = kind.__new__(kind)
    Store.__init__(store, check_shared=check_shared)
    vars(store).update(attributes)
    return store


def _has_attributes(kind: type) -> bool:
    return bool(getattr(kind, "__dictoffset__", 0))
