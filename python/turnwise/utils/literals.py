"""Values from text: turns a word of a command line into a value of an annotated type."""

from __future__ import annotations

import ast
from collections.abc import Collection
from contextlib import suppress
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def literal(text: str, expected: Any = Any) -> Any:
    """Read ``text`` as a value of the type ``expected``, an annotation such as ``float | None``.

    A choice of a ``Literal`` stays as it is, and so does every word if only text is expected. Otherwise, if
    ``expected`` allows them, ``none`` and ``null`` are ``None``, ``true`` and ``false`` are switches, and numbers,
    lists and tables follow Python's syntax. Quotes make any word text. A word of the wrong type stays text, so that a
    later check can report it.

    Example: ``literal("none", Literal["best", "none"])`` is ``"none"``, ``literal("none", float | None)`` is ``None``.
    """
    kinds, word = _kinds(expected), text.lower()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    # Choices and quoted words are text. Then come None, switches, collections and numbers.
    untyped = Any in kinds and str not in kinds
    if text in kinds or (isinstance(value, str) and value != text):
        return value if isinstance(value, str) else text
    if word in ("none", "null"):
        return None if NoneType in kinds or untyped else text
    if (bool in kinds and word in SWITCHES) or (untyped and word in ("true", "false")):
        return SWITCHES[word]
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        return value if kinds & {list, Any} else text
    if isinstance(value, (int, float)) and (untyped or kinds & {int, float}):
        return text if word in SWITCHES and isinstance(value, bool) else value
    return text if str in kinds else _number(text, kinds)


def _kinds(expected: Any) -> set[Any]:
    """List what an annotation allows: literal strings, types of scalars, and ``list`` for every collection.

    ``Any`` stands for types that text can't be checked against.
    """
    origin = get_origin(expected)
    if origin is Annotated:
        return _kinds(get_args(expected)[0])
    if origin in (Union, UnionType):
        return set().union(*map(_kinds, get_args(expected)))
    if origin is Literal:
        return {value if isinstance(value, str) else type(value) for value in get_args(expected)}
    kind = NoneType if expected is None else origin or expected
    if not isinstance(kind, type):
        return {Any}
    for known in (NoneType, bool, int, float, str):
        if issubclass(kind, known):
            return {known}
    return {str} if issubclass(kind, PurePath) else {list} if issubclass(kind, Collection) else {Any}


def _number(text: str, kinds: set[Any]) -> Any:
    """Read ``007``, ``nan`` and ``-inf``, which are not Python literals."""
    for kind in (int, float):
        with suppress(ValueError):
            if kind in kinds:
                return kind(text)
    return text
