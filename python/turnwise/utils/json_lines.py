"""Reads JSON Lines: they end at ``\\n`` alone, whatever else a text holds, and a byte order mark is no part of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any


def read_json_lines(path: str | PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Yield each line of a JSON Lines file as its place, ``file:line``, and its value. Skips blank lines.

    Raises ``OSError`` for a file that can't be read, and ``ValueError`` that begins with the place of a bad line.
    """
    with Path(path).open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield place, parse_json_line(line)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None


def parse_json_line(line: bytes) -> Any:
    """Return the value of one line. Raises ``ValueError`` that says why it is not JSON."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
