"""Checks of the plain values that users give: data of questions, results of their functions, keys of a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any


def problem(key: str, reason: object, value: Any = ...) -> str:
    """Return the line ``config key 'loss.kl.coef' = 0.1: <reason>``, without the value if none is given."""
    return f"config key {key!r}{'' if value is ... else f' = {_as_toml(value)}'}: {reason}"


def _as_toml(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def listed(values: Any, where: str) -> list[Any]:
    """Return ``values`` as a list. Raises ``TypeError`` for those without an order of their own.

    These are dicts, whose keys are no values, sets, and texts. ``where`` names the origin.
    """
    if isinstance(values, (Mapping, Set, str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{where}: expected a list with one value for each, in their order, got {values!r:.80}")
    return list(values)


def check_texts(value: Any) -> None:
    """Raise ``ValueError`` for data that no model can read or JSON can't keep.

    That is a text with half of a character, such as ``"\\ud83d"`` of an emoji that was cut, or a key that is no text.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{value[max(0, error.start - 20) : error.end + 20]!r} has half of a character (a lone surrogate, "
                f"{value[error.start]!r}): expected whole ones. Cut texts between characters, and write UTF-8"
            ) from None
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is no text")
            check_texts(key)
            check_texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_texts(item)
