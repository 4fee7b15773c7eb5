"""Words of a command line as what they stand for: config overrides, pairs of name and value, literals, code."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwise.naming import code_in


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


def literal(text: str) -> Any:
    """``text`` as the Python literal that it is, else as it stands; ``true`` and ``false`` are switches."""
    switches = {"true": True, "false": False}
    if text.lower() in switches:
        return switches[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def tell_code(settings: Any, what: str = "is imported") -> None:
    """Say on stderr which code the plain data of a configuration can name, before any of it is imported."""
    if named := [f"{key} = {name!r}" for key, name in code_in(settings)]:
        print(f"turnwise: the config can name code, which {what} here: {', '.join(named)}", file=sys.stderr)


def tell_code_of(run_dir: Path, what: str = "is imported") -> None:
    """:func:`tell_code` of the config in a run folder; one that is not there or no TOML is told by who reads it."""
    with suppress(OSError, ValueError):
        tell_code(tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8")), what)
