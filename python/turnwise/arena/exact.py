"""Values as JSON that gives them back exactly: tuples stay tuples, and what JSON has no word for is pickled."""

from __future__ import annotations

import base64
import importlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from turnwise.copies import dumps
from turnwise.state import StateDict, StateList, to_python

TUPLE, MAP, DATACLASS, PICKLE, LOST = "$tuple", "$map", "$dataclass", "$pickle", "$lost"
"""The only key of the object that stands for a value which is not plain JSON."""

_PLAIN = (type(None), bool, int, float, str)


class LostValueError(ValueError):
    """A value that could not be written down when it was recorded."""


def encode(value: Any) -> Any:
    """``value`` as plain JSON, from which :func:`decode` makes an equal one of the same types.

    What can't be pickled is kept as its ``repr`` alone; decoding it raises :class:`LostValueError`.

    Example: ``encode({"cell": (1, 2)}) == {"cell": {"$tuple": [1, 2]}}``
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (StateDict, StateList):
        return encode(to_python(value))
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {TUPLE: [encode(item) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {MAP: [[encode(key), encode(item)] for key, item in value.items()]}
    if is_dataclass(value) and "." not in kind.__qualname__ and all(field.init for field in fields(value)):
        parts = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        return {DATACLASS: [f"{kind.__module__}:{kind.__qualname__}", parts]}
    try:
        return {PICKLE: base64.b64encode(dumps(value)).decode()}
    except Exception:  # pickling runs the object's own code, which may raise anything; a record must not end a run
        return {LOST: repr(value)}


def decode(plain: Any) -> Any:
    """What :func:`encode` was given. It unpickles and imports by name: decode only your own runs' records.

    Raises :class:`LostValueError` for what could not be kept.
    """
    if isinstance(plain, list):
        return [decode(item) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    if len(plain) == 1 and (key := next(iter(plain))) in _DECODERS:
        return _DECODERS[key](plain[key])
    return {key: decode(item) for key, item in plain.items()}


def _dataclass(parts: Any) -> Any:
    name, values = parts
    module, _, title = name.partition(":")
    return getattr(importlib.import_module(module), title)(**decode(values))


def _lost(shown: str) -> Any:
    raise LostValueError(f"{shown} could not be recorded, as it can't be pickled")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    TUPLE: lambda items: tuple(decode(items)),
    MAP: lambda pairs: {decode(key): decode(item) for key, item in pairs},
    DATACLASS: _dataclass,
    PICKLE: lambda text: pickle.loads(base64.b64decode(text)),
    LOST: _lost,
}
