"""Options that are ``None`` in TOML, which has no null: the file lists their keys under ``unset``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from turnwise.utils.files import parse_toml

UNSET = "unset"
"""Key of a config file that lists options that are ``None``, such as ``["task_options.subset"]``."""

PLACEHOLDER = ""
"""Stands for ``None`` in a list."""


def dumps(data: Mapping[str, Any]) -> str:
    """Return ``data`` as TOML, from which :func:`restore` makes equal data."""
    nulls: list[str] = []
    plain = _plain(data, "", nulls)
    return tomli_w.dumps({UNSET: nulls, **plain} if nulls else plain)


def restore(data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data`` with ``None`` at the keys that its ``unset`` lists. Raises ``ValueError`` for other values."""
    if UNSET not in data:
        return data
    keys = data[UNSET]
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{UNSET} = {keys!r}: expected a list of keys, as in ['task_options.subset']")
    restored: Any = {key: value for key, value in data.items() if key != UNSET}
    for key in keys:
        try:
            restored = _with_null(restored, _split(key))
        except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError, IndexError):
            raise ValueError(f"{UNSET}: got {key!r}, expected the key of an option in a table") from None
    return restored


def _plain(value: Any, at: str, nulls: list[str]) -> Any:
    """Return ``value`` without its ``None``, whose keys are added to ``nulls``."""
    if isinstance(value, Mapping):
        dotted = {key: f"{at}.{_key_text(str(key))}".lstrip(".") for key in value}
        nulls += [dotted[key] for key, each in value.items() if each is None]
        return {key: _plain(each, dotted[key], nulls) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        nulls += [f"{at}.{number}" for number, each in enumerate(value) if each is None]
        return [PLACEHOLDER if each is None else _plain(each, f"{at}.{n}", nulls) for n, each in enumerate(value)]
    return value


def _key_text(key: str) -> str:
    """Return a key as TOML writes it, quoted if it must be."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _split(key: str) -> list[str]:
    """Split a dotted key of TOML, whose parts may be quoted."""
    parts, rest = [], parse_toml(f"{key} = 0")
    while isinstance(rest, dict):
        [(name, rest)] = rest.items()
        parts.append(name)
    return parts


def _with_null(value: Any, keys: list[str]) -> Any:
    """Return a copy of ``value`` with ``None`` at ``keys``."""
    if not keys:
        return None
    first, *rest = keys
    if isinstance(value, list):
        index = int(first)
        return [*value[:index], _with_null(value[index], rest), *value[index + 1 :]]
    return {**value, first: _with_null(value.get(first, {}), rest)}
