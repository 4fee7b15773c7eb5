"""Deep copies and pickles that keep the whole object, or raise.

Some classes pass to pickle, and so to :func:`copy.deepcopy`, only a part of their objects. EzPickle, a base of many
Gymnasium and PettingZoo environments, stores only the constructor's arguments: a copy is a new game without the moves
so far. The functions here reject such objects. Other classes with pickling hooks may omit parts on purpose, for example
a cache. If a copy visibly differs from its original, they warn once per class.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_HOOKS = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SIZED = frozenset({list, tuple, dict, set, frozenset, bytearray})
_LOOKED_AT = "(turnwise: originals that were looked at)"
"""Memo key: the number of originals that :func:`check_copies` has seen. All other keys are ids."""

_faithful: set[type] = {list, dict, tuple}
_rebuilt: dict[type, bool] = {}
_warned: set[type] = set()


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
