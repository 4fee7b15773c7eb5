"""Reads the records of a run: files of JSON lines, each with a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.utils.files import bounded_lines, open_regular, parse_json_line

TIME = "cluster/time"
"""Metric with the time at which a step began, in Unix seconds."""


def read_metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``, or of file ``name``, without an unfinished last line.

    Raises ``ValueError`` naming a bad line.
    """
    return [row for _, row in read_lines(folder / name)]


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line of ``path``, as bytes and parsed; nothing if there is no file.

    An incomplete last line, which a kill may leave, is omitted. Raises ``ValueError`` naming the file and the line
    for any other line that is not a JSON object with a step.
    """
    if not path.exists():
        return
    with open_regular(path) as stream:
        for number, line in enumerate(bounded_lines(stream, path), 1):
            try:
                yield line.rstrip(b"\n") + b"\n", parse_line(line, path, number)
            except ValueError:
                if line.endswith(b"\n"):
                    raise


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse line ``number`` of the records in ``path``. Raises ``ValueError`` naming both."""
    try:
        row: dict[str, Any] = parse_json_line(line)
        float(row["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}, line {number}: expected a JSON object with a step, got {line[:40]!r} ({error}). Fix or delete "
            "the line"
        ) from error
    return row
