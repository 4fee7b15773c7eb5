"""The growing files of a run, JSON lines with a step: appends to them, and reads and cuts them from either end.

Steps only rise within a file, so the newest rows are found from its end, whatever its length.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from turnwise.utils.files import (
    bounded_lines,
    lines_from_end,
    open_regular,
    open_to_append,
    parse_json_line,
    replacing,
)

HELD_OUT = "held_out.json"
"""File of a run folder with the held-out success after its last step."""

TIME = "cluster/time"
"""Metric with the time at which a step began, in Unix seconds."""

_BLOCK = 1 << 20
"""Bytes that are copied at once."""


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """A line of a file, its first byte in the file, and its row. A last line may lack its line end."""

    start: int
    content: bytes
    row: dict[str, Any]

    @property
    def end(self) -> int:
        return self.start + len(self.content)


def append_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append ``rows`` to ``path``, one line each. Values that JSON can't express become numbers or strings."""
    with open_to_append(path) as stream:
        for row in rows:
            stream.write(_line_of(row))


def read_metrics(folder: str | Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``, or of file ``name``, without an unfinished last line.

    Raises ``ValueError`` naming a bad line. The rows of a long run take much memory: :func:`read_rows` yields one after
    another.
    """
    return list(read_rows(Path(folder) / name))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the row of each line of ``path``; nothing if there is no file.

    An incomplete last line, which a kill may leave, is omitted. Raises ``ValueError`` naming the file and the line
    for any other line that is not a JSON object with a step.
    """
    if not path.exists():
        return
    with open_regular(path) as stream:
        for line in read_lines(stream, path):
            yield line.row


def read_lines(stream: BinaryIO, path: Path) -> Iterator[RecordedLine]:
    """Yield the lines of ``stream``, which is ``path`` at its start, as :func:`read_rows` does."""
    start = 0
    for number, content in enumerate(bounded_lines(stream, path), 1):
        try:
            yield RecordedLine(start, content, parse_line(content, path, number))
        except ValueError:
            if content.endswith(b"\n"):
                raise
        start += len(content)


def newest_lines(path: Path) -> Iterator[RecordedLine]:
    """Yield the lines of ``path`` from the last one to the first, as :func:`read_rows` does, and read only these."""
    if not path.exists():
        return
    with open_regular(path) as stream:
        for start, content in lines_from_end(stream, path):
            try:
                row = parse_line(content, path, 0)
            except ValueError:
                if content.endswith(b"\n"):
                    parse_line(content, path, 1 + _line_ends(stream, start))  # raises with the line's number
                continue
            yield RecordedLine(start, content, row)


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


def count_lines(path: Path) -> int:
    """Return the number of whole lines of ``path``, and parse none."""
    with open_regular(path) as stream:
        return _line_ends(stream, None)


def rows_with(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``path`` that have ``key``, and parse no others but those that spell it. No file has none.

    Raises ``ValueError`` naming a bad line.
    """
    if not path.exists():
        return
    spelt = json.dumps(key).encode()
    with open_regular(path) as stream:
        for number, line in enumerate(bounded_lines(stream, path), 1):
            if spelt in line and line.endswith(b"\n") and key in (row := parse_line(line, path, number)):
                yield row


def keep_steps(path: Path, last: int) -> None:
    """Drop the lines of steps after ``last``, and an incomplete last line. Reads back to the last line that stays."""
    if not path.exists():
        return
    kept = next((line for line in newest_lines(path) if line.row["step"] <= last), None)
    end = 0 if kept is None else kept.end
    with open_to_append(path) as stream:
        if os.fstat(stream.fileno()).st_size != end:
            stream.truncate(end)
        if kept is not None and not kept.content.endswith(b"\n"):
            stream.write(b"\n")


def add_to_step(path: Path, step: int, values: Mapping[str, Any]) -> None:
    """Add ``values`` to the row of ``step`` in ``path``, or to a new row at its end, whole or not at all.

    The lines before it are copied, not parsed.
    """
    later: list[bytes] = []
    for line in newest_lines(path):
        if line.row["step"] < step:
            break
        if line.row["step"] == step:
            with open_regular(path) as old, replacing(path) as new:
                _copy(old, new, line.start)
                new.writelines([_line_of({**line.row, **values}), *reversed(later)])
            return
        later.append(line.content.rstrip(b"\n") + b"\n")
    append_lines(path, [{"step": step, **values}])


def _line_of(row: Mapping[str, Any]) -> bytes:
    from turnwise.arena.recording.rollouts_jsonl import json_line  # those who read need none of it

    return f"{json_line(row)}\n".encode()


def _line_ends(stream: BinaryIO, end: int | None) -> int:
    """Return the number of line ends before byte ``end`` of ``stream``; ``None`` is its end."""
    stream.seek(0)
    count, left = 0, float("inf") if end is None else end
    while left and (block := stream.read(int(min(left, _BLOCK)))):
        count += block.count(b"\n")
        left -= len(block)
    return count


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    """Copy the first ``count`` bytes."""
    while count and (block := source.read(min(count, _BLOCK))):
        target.write(block)
        count -= len(block)
