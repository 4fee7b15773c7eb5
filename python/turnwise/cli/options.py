"""Exit codes, and parsers of arguments that argparse does not know: config overrides, pairs of name and value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from turnwise.utils.signals import SIGNALS

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_BY_SIGNAL = frozenset(128 + number for number in SIGNALS)


def split_overrides(arguments: Iterable[str], known: set[str]) -> tuple[list[str], dict[str, str]]:
    """Take config overrides out of a command line: every ``--key value`` and ``--key=value`` that is not ``known``.

    ``["run.toml", "--loop.steps", "5", "--seed=-1"]`` gives ``(["run.toml"], {"loop.steps": "5", "seed": "-1"})``.
    Values stay text; the config knows their types. Raises ``ValueError`` for a key without a value, for a key that
    appears twice, and for a mistyped option of ``known``.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        key, equals, value = word.partition("=")
        if not word.startswith("--") or key in known:
            rest.append(word)
            continue
        # A word like a known option is a typo; any other is a config key with its value.
        if close := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            raise ValueError(f"unknown option {key}; did you mean {close[0]}?")
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
    """Parse ``["a=1"]`` into ``{"a": convert("1")}``. Raises ``ValueError`` for any other word."""
    pairs: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals or name in pairs:
            raise ValueError(f"{option} {word!r}: expected NAME=VALUE, each name once")
        pairs[name] = convert(value)
    return pairs
