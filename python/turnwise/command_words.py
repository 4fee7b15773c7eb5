"""Words of a command line as what they stand for: config overrides, pairs of name and value, literals."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def split_overrides(arguments: Iterable[str], known: set[str]) -> tuple[list[str], dict[str, str]]:
    """Takes config overrides out of a command line: every ``--key value`` and ``--key=value`` that is not ``known``.

    ``["run.toml", "--loop.steps", "5", "--seed=-1"]`` gives ``(["run.toml"], {"loop.steps": "5", "seed": "-1"})``.
    Values stay text; the config knows their types. A key without a value, or twice, raises ``ValueError``.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        key, equals, value = word.partition("=")
        if not word.startswith("--") or key in known:
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ValueError(f"{key}: expected a value, as in `{key} 5` or `{key}=5`")
        name = key.removeprefix("--")
        if not name:
            raise ValueError(f"{word!r}: expected the name of a config key after the dashes, as in `--loop.steps 5`")
        if name in overrides:
            raise ValueError(f"{key}: given twice, as {overrides[name]!r} and {value!r}")
        overrides[name] = value
    return rest, overrides


def parse_pairs(option: str, words: Iterable[str], convert: Callable[[str], Any]) -> dict[str, Any]:
    """``["a=1"]`` as ``{"a": convert("1")}``. Raises ``ValueError`` naming ``option`` for what is no such pair."""
    pairs: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals or name in pairs:
            raise ValueError(f"{option} {word!r}: expected NAME=VALUE, each name once")
        pairs[name] = convert(value)
    return pairs


def literal(text: str, expected: Any = Any) -> Any:
    """``text`` as a value of the type ``expected``, an annotation such as ``float | None``.

    A legal literal, and any word where only text is expected, stays as it is. Else ``none`` and ``null`` are ``None``,
    ``true`` and ``false`` are switches, and numbers, lists and tables are read as Python reads them, where ``expected``
    has room for them. Quotes make text of anything. A word that fits nowhere stays text, so that a check can name it.

    Example: ``literal("none", Literal["best", "none"])`` is ``"none"``, ``literal("none", float | None)`` is ``None``.
    """
    kinds, word = _kinds(expected), text.lower()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
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
    """What an annotation has room for: literal strings, the types of scalars, ``list`` for all that holds values.

    ``Any`` stands for every type that a word can't be held against.
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
    """``007``, ``nan`` and ``-inf``, which are no Python literals."""
    for kind in (int, float):
        with suppress(ValueError):
            if kind in kinds:
                return kind(text)
    return text
