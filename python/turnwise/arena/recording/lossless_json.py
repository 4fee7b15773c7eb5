"""JSON that keeps values exactly: tuples stay tuples, and objects without a JSON form are pickled.

Reading never imports a module. It creates only plain types and *data classes*: dataclasses, named tuples, enums and
exceptions of modules that are already imported. ``allow_pickle`` creates any object, which can run code.
"""

from __future__ import annotations

import base64
import enum
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from turnwise.state import CheckpointError, StateDict, StateList, to_python
from turnwise.state.leaves import find_harmless, load_pickle
from turnwise.types import RoutedExperts
from turnwise.utils.copies import dumps
from turnwise.utils.output import text_of

TUPLE, MAP, DATACLASS, PICKLE, LOST = "$tuple", "$map", "$dataclass", "$pickle", "$lost"
"""Keys that mark an encoded value: ``{"$tuple": [1, 2]}``."""

_PLAIN = (type(None), bool, int, float, str)


class UnserializableValueError(ValueError):
    """A value that could not be serialized when it was recorded."""


class UntrustedValueError(ValueError):
    """A value whose class could run code while unpickling, without ``allow_pickle``."""


def _find(module: str, name: str) -> Any:
    """Return a data class that is already imported, or a harmless builtin."""
    imported = _imported(module, name)
    return imported if _is_data(imported) else find_harmless(module, name)


def unpickle(content: bytes, *, allow_pickle: bool = False) -> Any:
    """Unpickle ``content``. Raises :class:`UntrustedValueError` for an object that needs ``allow_pickle``."""
    if allow_pickle:
        return pickle.loads(content)
    try:
        return load_pickle(content, _find)
    except CheckpointError as error:
        raise UntrustedValueError(str(error).partition(":")[0]) from error


def _imported(module: str, title: str) -> Any:
    """Return the object ``module.title`` if the module is already imported, else ``None``."""
    imported: Any = sys.modules.get(module)
    for part in title.split("."):
        imported = getattr(imported, "__dict__", {}).get(part)
    return imported


def _is_data(found: Any) -> bool:
    return isinstance(found, type) and (
        is_dataclass(found)
        or issubclass(found, enum.Enum | BaseException)
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )


def encode(value: Any) -> Any:
    """Return ``value`` as plain JSON. :func:`decode` turns it into an equal value of the same types.

    A value that can't be pickled is kept as its ``repr``; decoding it raises :class:`UnserializableValueError`.
    ``RoutedExperts`` in a dict are left out, as in all records.

    Example: ``encode({"cell": (1, 2)}) == {"cell": {"$tuple": [1, 2]}}``
    """
    try:
        return _encode(value)
    except Exception:  # of any object's code, and of a value that contains itself
        return _pickled(value)


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (StateDict, StateList):
        return _encode(to_python(value))
    if kind is list:
        return [_encode(item) for item in value]
    # Values without an exact JSON form become a dict with one marker key.
    if kind is tuple:
        return {TUPLE: [_encode(item) for item in value]}
    if kind is dict:
        value = {key: item for key, item in value.items() if not isinstance(item, RoutedExperts)}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item) for key, item in value.items()}
        return {MAP: [[_encode(key), _encode(item)] for key, item in value.items()]}
    if is_dataclass(value) and "." not in kind.__qualname__ and all(field.init for field in fields(value)):
        parts = {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
        return {DATACLASS: [f"{kind.__module__}:{kind.__qualname__}", parts]}
    return _pickled(value)


def _pickled(value: Any) -> dict[str, str]:
    try:
        return {PICKLE: base64.b64encode(dumps(value)).decode()}
    except Exception:  # pickling runs the object's code, which can raise any error; recording must not end a run
        return {LOST: text_of(value)}


def decode(plain: Any, *, allow_pickle: bool = False) -> Any:
    """Return the value that :func:`encode` received.

    Raises :class:`UnserializableValueError` for a value that could not be recorded, and :class:`UntrustedValueError`
    for an object that is neither plain nor a data class. ``allow_pickle`` creates such objects too, which can run code:
    use it only for your own records.
    """
    again = partial(decode, allow_pickle=allow_pickle)
    if isinstance(plain, list):
        return [again(item) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    if len(plain) == 1 and (key := next(iter(plain))) in _DECODERS:
        return _DECODERS[key](plain[key], again)
    if len(plain) == 1 and key == PICKLE:
        return unpickle(base64.b64decode(plain[key]), allow_pickle=allow_pickle)
    return {key: again(item) for key, item in plain.items()}


def _dataclass(parts: Any, again: Callable[[Any], Any]) -> Any:
    name, values = parts
    module, _, title = name.partition(":")
    kind = _imported(module, title)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise UntrustedValueError(f"it names {name!r}, which is no dataclass of a module that is imported already")
    return kind(**again(values))


def _lost(shown: str, again: Callable[[Any], Any]) -> Any:
    raise UnserializableValueError(f"{shown} could not be recorded, as it can't be pickled")


_DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    TUPLE: lambda items, again: tuple(again(items)),
    MAP: lambda pairs, again: {again(key): again(item) for key, item in pairs},
    DATACLASS: _dataclass,
    LOST: _lost,
}
