"""Deep copies and pickles that keep the whole object, or raise.

Some classes pass to pickle, and so to :func:`copy.deepcopy`, only a part of their objects. EzPickle, a base of many
Gymnasium and PettingZoo environments, stores only the constructor's arguments: a copy is a new game without the moves
so far. The functions here reject such objects. Other classes with pickling hooks may omit parts on purpose, for example
a cache. If a copy visibly differs from its original, they warn once per class.

:func:`own_copy` never raises: it is for a question that several attempts get, whatever is in it.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

_HOOKS = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SIZED = frozenset({list, tuple, dict, set, frozenset, bytearray})
_LOOKED_AT = "(turnwise: originals that were looked at)"
"""Memo key: the number of originals that :func:`check_copies` has seen. All other keys are ids."""

SLOW = 0.1
"""Seconds from which a copy of a question is worth a warning."""

_faithful: set[type] = {list, dict, tuple}
_rebuilt: dict[type, bool] = {}
_warned: set[type] = set()
_told: set[tuple[str, type]] = set()


def deep_copy(value: T, memo: dict[Any, Any] | None = None) -> T:
    """Return :func:`copy.deepcopy` of ``value``. Raises ``TypeError`` if that would lose part of an object."""
    memo = {} if memo is None else memo
    fresh = copy.deepcopy(value, memo)
    check_copies(memo)
    return fresh


def check_copies(memo: dict[Any, Any]) -> None:
    """Check the deep copies made with ``memo`` since the last call; raise ``TypeError`` for a loss."""
    originals = memo.get(id(memo))  # deepcopy keeps the originals alive here
    if originals is None:
        return
    seen = memo.get(_LOOKED_AT, 0)
    memo[_LOOKED_AT] = len(originals)
    for original in originals[seen:] if seen else originals:
        kind = type(original)
        if kind in _faithful:
            continue
        if not _is_suspect(kind):
            _faithful.add(kind)
            continue
        made = memo.get(id(original), original)
        if made is original:
            continue
        if is_rebuilt(kind):
            raise refusal(kind)
        _warn_of_loss(original, made)


def own_copy(value: T, memo: dict[Any, Any] | None = None) -> T:
    """Return a copy of ``value`` that shares nothing with it that can change. ``memo`` has copies made before.

    Containers of Python keep their types, and cost about as much as ``list.copy``. Constants are shared: numbers,
    texts, tuples and frozensets of constants, the keys of dicts, read-only arrays. Other objects are deep-copied. One
    that can't be copied is shared, with a warning; one that takes long is warned of, too.

    Example: ``own_copy({"deck": ["J", "Q"]})["deck"].pop()`` leaves the original's deck as it is.
    """
    if type(value) in _ATOMS:
        return value
    known = {key: made for key, made in (memo or {}).items() if key != _LOOKED_AT}
    shared: dict[int, Any] = {}
    while True:
        try:
            return _OwnCopy(dict(known), shared).of(value)
        except _CopyError as error:  # the memo may hold half of its parts, so begin again
            shared[id(error.culprit)] = error.culprit


class _CopyError(Exception):
    """An object can't be copied."""

    def __init__(self, culprit: Any) -> None:
        super().__init__()
        self.culprit = culprit


class _OwnCopy:
    """One run of :func:`own_copy`. ``shared`` are objects that can't be copied, by id."""

    def __init__(self, memo: dict[Any, Any], shared: dict[int, Any]) -> None:
        self.memo, self.shared = memo, shared
        self._unfilled: list[Any] = []

    def of(self, value: Any) -> Any:
        begun = perf_counter()
        made = self._own(value)
        # Containers get their contents one after another, without recursion: they may be nested deeply.
        while self._unfilled:
            copied = self._unfilled.pop()
            if type(copied) is dict:
                for key, item in copied.items():
                    copied[key] = self._own(item)
            else:
                copied[:] = map(self._own, copied)
        if (seconds := perf_counter() - begun) >= SLOW:
            _warn_once(
                ("slow", type(value)),
                f"an attempt's own copy of its artifact, {type(value).__name__}, took {seconds:.1f} s. What no attempt "
                "changes can be shared: a tuple, a frozenset, a read-only array, or an object whose __deepcopy__ "
                "returns itself",
            )
        return made

    def _own(self, item: Any) -> Any:
        kind = type(item)
        if kind in _ATOMS or id(item) in self.shared:
            return item
        if (made := self.memo.get(id(item), _LOOKED_AT)) is not _LOOKED_AT:
            return made
        if kind is dict or kind is list:
            made = self.memo[id(item)] = item.copy()
            if not _ATOMS.issuperset(map(type, made.values() if kind is dict else made)):
                self._unfilled.append(made)
            return made
        if kind is tuple:
            parts = [self._own(part) for part in item]
            same = all(ours is theirs for ours, theirs in zip(parts, item, strict=True))
            return self.memo.setdefault(id(item), item if same else tuple(parts))
        if kind in (set, frozenset) and _ATOMS.issuperset(map(type, item)):
            return self.memo.setdefault(id(item), item.copy())
        if (
            (kind.__module__, kind.__name__) == ("numpy", "ndarray")
            and not item.dtype.hasobject
            and not item.flags.writeable
        ):
            return item
        try:
            return deep_copy(item, self.memo)
        except Exception as error:
            _warn_once(
                ("shared", kind),
                f"an artifact holds a {kind.__qualname__}, which can't be copied, so all attempts at the question "
                f"share it and see what one changes: {type(error).__name__}: {str(error)[:300]}",
            )
            raise _CopyError(item) from error


def _warn_once(key: tuple[str, type], text: str) -> None:
    if key not in _told:
        _told.add(key)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def dumps(value: Any) -> bytes:
    """Return the pickle of ``value``. Raises ``TypeError`` for an object that unpickling would create as a new one."""
    stream = io.BytesIO()
    CheckedPickler(stream, protocol=5).dump(value)
    return stream.getvalue()


class CheckedPickler(pickle.Pickler):
    """Raises ``TypeError`` for an object that unpickling would create as a new one."""

    def reducer_override(self, value: Any) -> Any:
        if is_rebuilt(type(value)):
            raise refusal(type(value))
        return NotImplemented


def is_rebuilt(kind: type) -> bool:
    """True if pickle calls the constructor to copy objects of ``kind``: an EzPickle without its own hooks."""
    rebuilt = _rebuilt.get(kind)
    if rebuilt is None:
        definers = {_definer(kind, name) for name in ("__reduce__", "__reduce_ex__")}
        rebuilt = _rebuilt[kind] = is_ez_pickle(kind) and definers == {object}
    return rebuilt


def is_ez_pickle(kind: type) -> bool:
    """True if objects of ``kind`` unpickle by passing the pickled arguments to their constructor."""
    setter = _definer(kind, "__setstate__")
    return setter is not None and setter.__name__ == "EzPickle"


def refusal(kind: type) -> TypeError:
    """Return the error that explains why objects of ``kind`` are not copied, and the remedy."""
    name = kind.__name__
    return TypeError(
        f"{name} is an EzPickle: its constructor makes each copy, without the moves so far. Make its "
        f"copies forks, class Forkable{name}(ForkableMixin, {name}), or keep its seed and the actions "
        "instead, and replay them"
    )


def _is_suspect(kind: type) -> bool:
    """True if a deep copy of such an object uses pickling hooks of its own class."""
    if hasattr(kind, "__deepcopy__") or not kind.__dictoffset__:
        return False
    return any(_definer(kind, name) not in (None, object) for name in _HOOKS)


def _definer(kind: type, name: str) -> type | None:
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def _warn_of_loss(original: Any, made: Any) -> None:
    kind = type(original)
    if kind in _warned or type(made) is not kind:
        return
    names = list(_differing(vars(original), vars(made)))
    if names:
        _warned.add(kind)
        warnings.warn(
            f"copies of {kind.__qualname__} differ from the original in {', '.join(names)}: its pickling hooks leave "
            "that out, or create it again. If the game needs it, write a __deepcopy__ that keeps it; one that leaves "
            "it out on purpose ends this warning",
            RuntimeWarning,
            stacklevel=2,
        )


def _differing(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield attributes that differ at a quick look: atoms by value, containers by size."""
    for name, value in before.items():
        other = after.get(name, _LOOKED_AT)
        kind = type(value)
        if other is value:
            continue
        if (
            type(other) is not kind
            or (kind in _ATOMS and value != other)
            or (kind in _SIZED and len(value) != len(other))
        ):
            yield name
