"""Make objects forkable: ``copy.deepcopy`` of an environment takes microseconds, for one changed line in its class."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, MutableMapping
from itertools import compress
from typing import Any, ClassVar

from turnwise._C import State, StateDict, StateError, StateList, TokenArray
from turnwise.state.deep_copies import copying, explained, fork_within, keep_alive
from turnwise.state.exclusive import ATOMS, HOLDERS, exclusive_graphs, held_once, is_whole
from turnwise.state.store import OBJECTS, copy_random
from turnwise.utils.copies import check_copies, is_ez_pickle

_LATER = "(turnwise: copied when asked for)"
"""Key in an instance dict. Its value holds the attributes to copy on first use, by name."""


class _HasDict:
    """Defines the instance dict; :class:`ForkableMixin` shows it complete."""


_instance_dict = vars(_HasDict)["__dict__"].__get__


class ForkableMixin(_HasDict):
    """Makes ``copy.deepcopy`` of a class's objects a fork: containers are shared until one side writes to them.

    Copies are independent and equal those of :func:`copy.deepcopy`: aliasing, cycles, memo and pickling hooks are kept
    (except EzPickle's, which rebuild an object by its constructor). If only the object refers to a list or
    dict, the first fork replaces it with a facade of a :class:`State`, in the object too. Arrays, generators, deques,
    counters and bytearrays are copied on first use by either side. The rest, including sets, is deep-copied at the
    fork. Attributes named in ``share``, e.g. a large config, are never copied. Facades are lists and dicts to Python,
    but not to C code such as ``heapq`` and ``json``. An attribute that can't be copied (a lock, a file) raises
    :class:`OpaqueError` with its path.

    Example::

        class Env(ForkableMixin, share=("config",)):    # or, in the class: share = ("config",)
            def __init__(self, config):
                self.config, self.board, self.rng = config, [[0] * 3 for _ in range(3)], random.Random(0)

        branches = [copy.deepcopy(env) for _ in range(8)]
    """

    __turnwise_forkable__ = True
    _turnwise_share: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, share: tuple[str, ...] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = vars(cls).get("share") if share is None else share
        if names is None:
            return
        if isinstance(names, str):
            raise TypeError(f"share={names!r} of {cls.__name__}: expected a tuple of names, such as ({names!r},)")
        if share is None and not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
            return  # an attribute of the class, with another meaning
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"share={names!r} of {cls.__name__}: expected names of attributes")
        cls._turnwise_share = tuple(dict.fromkeys((*cls._turnwise_share, *names)))

    def _show_dict(self) -> dict[str, Any]:
        attributes = _instance_dict(self)
        if _LATER in attributes:
            for name in list(attributes.get(_LATER, ())):
                _copy_now(attributes, name)
        return attributes

    __dict__ = property(_show_dict, vars(_HasDict)["__dict__"].__set__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        attributes = _instance_dict(self)
        for name in type(self)._turnwise_share:
            value = attributes.get(name)
            if value is not None and id(value) not in memo:
                memo[id(value)] = value
                keep_alive(value, memo)
        plan = _plan_of(type(self))
        _take_over(attributes, memo)
        if plan.slots:
            _take_over(_Slots(self, plan.slots), memo)
        try:
            fresh = _rebuild(self, memo) if plan.has_hooks else _copy_attributes(self, attributes, plan, memo)
            check_copies(memo)
            return fresh
        except TypeError as error:
            if copying.explains:
                raise
            raise explained(self, error) from error

    def __copy__(self) -> Any:
        plan = _plan_of(type(self))
        if plan.has_hooks:
            return _rebuild(self, None)
        fresh = type(self).__new__(type(self))
        _instance_dict(fresh).update(self.__dict__)
        for name, member in plan.slots.items():
            if hasattr(self, name):
                member.__set__(fresh, member.__get__(self))
        return fresh

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce the object with plain containers instead of facades."""
        return _reduced(self, protocol)


# ---- the copy plan of a class ---------------------------------------------------------------------------------------
class _Plan:
    """The rules for copying objects of one class."""

    def __init__(self, cls: type) -> None:
        self.slots: dict[str, Any] = {
            name: member
            for base in reversed(cls.__mro__)
            for name, member in vars(base).items()
            if type(member).__name__ == "member_descriptor" and not name.startswith("__")
        }
        hooks = (cls.__reduce_ex__ is not ForkableMixin.__reduce_ex__, cls.__reduce__ is not object.__reduce__)
        own_state = cls.__getstate__ is not object.__getstate__ or hasattr(cls, "__setstate__")
        own_state &= not is_ez_pickle(cls)  # EzPickle would lose everything since the constructor
        own_new = hasattr(cls, "__getnewargs__") or hasattr(cls, "__getnewargs_ex__")
        self.has_hooks = any(hooks) or own_state or own_new or issubclass(cls, list | dict | tuple | set)
        # Readers of __dict__ must find every attribute. A class before the mixin in the MRO may show the bare dict.
        shown = next(vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base))
        self.copies_later = shown is vars(ForkableMixin)["__dict__"]


_plans: dict[type, _Plan] = {}


def _plan_of(cls: type) -> _Plan:
    if cls not in _plans:
        _plans[cls] = _Plan(cls)
    return _plans[cls]


class _Slots(MutableMapping[str, Any]):
    """The attributes of an object that are stored in ``__slots__``, as a dict."""

    def __init__(self, owner: Any, members: dict[str, Any]) -> None:
        self.owner, self.members = owner, members

    def __getitem__(self, name: str) -> Any:
        return self.members[name].__get__(self.owner)

    def __setitem__(self, name: str, value: Any) -> None:
        self.members[name].__set__(self.owner, value)

    def __delitem__(self, name: str) -> None:
        self.members[name].__delete__(self.owner)

    def __iter__(self) -> Iterator[str]:
        for name, member in self.members.items():
            try:
                member.__get__(self.owner)
            except AttributeError:
                continue
            yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


# ---- copying --------------------------------------------------------------------------------------------------------
_PLAIN = frozenset({list, dict, tuple, TokenArray})
# Sets are excluded. A copy may have another order, and the order must not depend on which side used the set first.
_LATER_KINDS = HOLDERS - {set, frozenset}

_changing = threading.RLock()
"""Held while a fork, or the first use of an attribute, changes the instance dict of an object that other threads may
read. Nothing inside waits for another thread."""


def _take_over(attributes: MutableMapping[str, Any], memo: dict[int, Any]) -> None:
    """Turn containers added since the last fork into facades, if only this object refers to them."""
    names = [
        name
        for name, value in list(attributes.items())
        if type(value) in _PLAIN and id(value) not in memo and _is_new(value)
    ]
    if not names:
        return
    with _changing:
        home = _home_of(attributes, memo)
        values = [attributes[name] for name in names]
        exclusive = exclusive_graphs(values, home, OBJECTS.is_shared)
        chosen = list(compress(names, exclusive))
        if chosen:
            try:
                facades = (home or OBJECTS.state(None))._take_over(list(compress(values, exclusive)))
            except StateError:
                if home is None or home.pruned:
                    raise
                return  # another thread forks it: this time the containers are copied as they are
            attributes.update(zip(chosen, facades, strict=True))


def _is_new(value: Any) -> bool:
    """Return True if a State can take the value over and has not done so. For a tuple its contents decide."""
    kind = type(value)
    if kind is TokenArray:
        return value._state is None
    return kind is not tuple or any(type(item) in _PLAIN and _is_new(item) for item in value)


def _home_of(attributes: MutableMapping[str, Any], memo: dict[int, Any]) -> State | None:
    """Return the State of the object's containers, unless this copy has already forked it."""
    for value in attributes.values():
        if type(value) is StateDict or type(value) is StateList:
            state = value._state
            if state.store is OBJECTS and not state.frozen and not state.pruned and id(state) not in memo:
                return state
    return None


def _copy_attributes(source: Any, attributes: dict[str, Any], plan: _Plan, memo: dict[int, Any]) -> Any:
    cls: Any = type(source)
    fresh = cls.__new__(cls)
    memo[id(source)] = fresh
    target = _instance_dict(fresh)
    # Put off attributes of the instance dict, then share, fork or deep-copy the others.
    with _changing:
        waiting = _put_off(source, attributes, memo) if plan.copies_later else None
        items = list(attributes.items())
    for name, value in items:
        kind = type(value)
        if kind in ATOMS or name in cls._turnwise_share:
            target[name] = value
        elif kind is StateDict or kind is StateList:
            state = value._state
            target[name] = (memo.get(id(state)) or fork_within(state, memo))._facade(value)
        elif kind is TokenArray and value._state is not None and id(value) not in memo:
            target[name] = fork_within(value._state, memo)._facade(value)
        elif name != _LATER:
            target[name] = copy.deepcopy(value, memo)
    if waiting:
        target[_LATER] = waiting
    for name, value in _Slots(source, plan.slots).items() if plan.slots else ():
        plan.slots[name].__set__(fresh, copy.deepcopy(value, memo))
    return fresh


def _reduced(source: Any, protocol: int) -> Any:
    """Return the result of the class's pickling hooks, which may contain facades."""
    vars(source)  # copies the attributes that are still pending
    if type(source).__reduce_ex__ is not ForkableMixin.__reduce_ex__:
        return source.__reduce_ex__(protocol)
    if not is_ez_pickle(type(source)):
        return object.__reduce_ex__(source, protocol)
    reduced: Any = object.__reduce_ex__(source, max(protocol, 2))
    make, args, _, items, pairs = reduced
    return make, args, object.__getstate__(source), items, pairs, _set_state


def _rebuild(source: Any, memo: dict[int, Any] | None) -> Any:
    """Copy through the class's own pickling hooks, as the copy module does. Without a memo the copy is shallow."""

    def copied(value: Any) -> Any:
        return value if memo is None else copy.deepcopy(value, memo)

    reduced = _reduced(source, 4)
    if isinstance(reduced, str):
        return source
    make, args, state, items, pairs = (*reduced, None, None, None)[:5]
    fresh = make(*map(copied, args))
    if memo is not None:
        memo[id(source)] = fresh
    if state is not None:
        state = copied(state)
        if hasattr(fresh, "__setstate__"):
            fresh.__setstate__(state)
        else:
            _set_state(fresh, state)
    for item in items or ():
        fresh.append(copied(item))
    for key, value in pairs or ():
        fresh[copied(key)] = copied(value)
    return fresh


def _set_state(fresh: Any, state: Any) -> None:
    values, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    fresh.__dict__.update(values or {})
    for name, value in (slots or {}).items():
        setattr(fresh, name, value)


# ---- attributes copied on first use ---------------------------------------------------------------------------------
class _Cell:
    """A value that waits to be copied. Each holder of the cell copies the value on first use; the last one takes it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Waiting(dict[str, _Cell]):
    """The pending cells of one object."""

    __slots__ = ()


def _copy_now(attributes: dict[str, Any], name: str) -> Any:
    with _changing:
        later = attributes.get(_LATER, {})
        if name in later:
            if name not in attributes:  # otherwise it has been assigned since
                cells = [later[name]]
                value = cells[0].value
                if not held_once(cells)[0]:
                    value = copy_random(value) if type(value) is random.Random else copy.deepcopy(value)
                attributes[name] = value
            del later[name]  # last, so that other threads find the attribute in one of both
            if not later:
                del attributes[_LATER]
        return attributes[name]


class _Later:
    """A descriptor for an attribute that some objects have yet to copy.

    Python calls it only if the object's own dict lacks the attribute.
    """

    def __init__(self, name: str, inherited: Any) -> None:
        self.name, self.inherited = name, inherited

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None:
            attributes = _instance_dict(instance)
            if self.name in attributes.get(_LATER, ()) or self.name in attributes:  # another thread was faster
                return _copy_now(attributes, self.name)
        if not self.inherited:
            if instance is None:
                raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {self.name!r}")
        (member,) = self.inherited
        get = getattr(type(member), "__get__", None)
        return member if get is None else get(member, instance, owner)


def _put_off(source: Any, attributes: dict[str, Any], memo: dict[int, Any]) -> _Waiting:
    """Turn attributes that nothing else refers to into cells, and return cells for the copy, which hold the same."""
    names = [
        name
        for name, value in attributes.items()
        if (type(value) in _LATER_KINDS or is_whole(value, type(value)))
        and id(value) not in memo
        and name not in type(source)._turnwise_share
    ]
    cells = attributes.get(_LATER) or _Waiting()
    for name in [name for name in cells if name in attributes]:
        del cells[name]  # it has been assigned since
    if names:
        values = [attributes[name] for name in names]
        exclusive = held_once(values)
        if any(type(value) in _LATER_KINDS for value in values):
            exclusive = list(map(all, zip(exclusive, exclusive_graphs(values, None, OBJECTS.is_shared), strict=True)))
        for name, value, is_exclusive in zip(names, values, exclusive, strict=True):
            if is_exclusive and _install_descriptor(type(source), name):
                cells[name] = _Cell(value)
                attributes[_LATER] = cells
                del attributes[name]
    return _Waiting(cells)


def _install_descriptor(cls: type, name: str) -> bool:
    """Install the descriptor for ``name``. Returns False if the class can't serve ``name`` for objects that lack it."""
    if type(vars(cls).get(name)) is _Later:
        return True
    members = [vars(base)[name] for base in cls.__mro__ if name in vars(base)][:1]
    if members and (hasattr(type(members[0]), "__set__") or hasattr(type(members[0]), "__delete__")):
        return False
    try:
        setattr(cls, name, _Later(name, members))
    except (AttributeError, TypeError):
        return False
    return True
