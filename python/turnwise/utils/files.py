"""Writes files whole or not at all, links to files that never change, reads JSON Lines, and names shared files."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from turnwise.utils.values import check_texts

MEMBERS = Path("cluster") / "members.json"
"""File of a run folder with the addresses of the run's processes. Its supervisor replaces it whole."""

EVENTS = Path("cluster") / "events.jsonl"
"""File of a run folder in which the supervisor records the events of each process."""

KEY_VARIABLE = "TURNWISE_CLUSTER_KEY"
"""Environment variable with the secret of a run, with which its processes authenticate each other."""


MOST = 1 << 28
"""Most bytes of a line, or of a small file, that are read."""

_BLOCK = 1 << 16
"""Bytes that are read at once from the end of a file."""

_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")
"""A dotted key for which ``tomllib`` takes time and memory that grow with the square of its length."""

AnyPath = TypeVar("AnyPath", str, Path)


def expanded(path: AnyPath) -> AnyPath:
    """Return ``path`` with the home folder in place of a ``~`` or ``~user`` at its start."""
    return type(path)(os.path.expanduser(path))


class _Expanded:
    """Marks a field of a pydantic model whose values are :func:`expanded`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(expanded, handler(source))


PathText = Annotated[str, _Expanded()]
"""Type of an option that names a file or folder and stays a text, as it may also be another name."""

FilePath = Annotated[Path, _Expanded()]
"""Type of an option that is a path."""


def create_beside(path: Path, mode: int = 0o666) -> tuple[Path, int]:
    """Create an empty file with a random name in the folder of ``path``. Return its path and an open descriptor.

    The folder may come from someone else, and hold links at names that can be predicted: writing through such a link
    would overwrite a file elsewhere. All temporary files of turnwise are made here.
    """
    file = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    return file, os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield the path of a new empty file, which replaces ``path`` when the block ends. After an error it is deleted.

    For writers that take a path. They may also replace the file itself.
    """
    temporary, descriptor = create_beside(path)
    os.close(descriptor)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Yield a stream whose bytes replace ``path`` when the block ends. After an error, ``path`` is unchanged.

    ``mode`` is that of the new file, less the process's mask. With ``sync`` the bytes are on the disk before its name.
    """
    temporary, descriptor = create_beside(path, mode)
    try:
        with open(descriptor, "wb") as stream:
            yield stream
            if sync:
                stream.flush()
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_private(folder: Path) -> None:
    """Create ``folder`` for its owner alone, whatever the process's mask; its parents as usual. One that exists stays.

    For folders with recordings: prompts and answers may be private, and a config may name keys.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(0o700, exist_ok=True)


def open_to_append(path: Path) -> BinaryIO:
    """Open ``path`` to append, and create it if it is missing. Raises ``OSError`` for a link, and for no file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return open(descriptor, "ab")


def open_regular(path: str | PathLike[str], *, follow: bool = False) -> BufferedReader:
    """Open a file to read it. Raises ``OSError`` for a pipe, a device or a folder, and for a link unless ``follow``.

    All records in the folder of a run are opened here, as someone else may have made the folder: a link could lead to
    a private file, a pipe never ends, and a device has effects.
    """
    about = os.stat(path, follow_symlinks=follow)
    if not stat.S_ISREG(about.st_mode):
        kind = "link" if stat.S_ISLNK(about.st_mode) else "folder" if stat.S_ISDIR(about.st_mode) else "pipe or device"
        raise OSError(errno.EINVAL, f"expected a regular file, got a {kind}", str(path))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return open(os.open(path, flags), "rb")


def read_regular(path: str | PathLike[str], *, follow: bool = False, most: int = MOST) -> bytes:
    """Return the bytes of a file that :func:`open_regular` opens. Raises ``ValueError`` for more than ``most``."""
    with open_regular(path, follow=follow) as stream:
        content = stream.read(most + 1) if os.fstat(stream.fileno()).st_size <= most else None
    if content is None or len(content) > most:
        raise ValueError(f"{path}: expected at most {most} bytes")
    return content


def read_json(path: str | PathLike[str], *, follow: bool = False, most: int = MOST) -> Any:
    """Return the value in a file that :func:`open_regular` opens. Raises ``ValueError`` if it is not JSON."""
    return parse_json_line(read_regular(path, follow=follow, most=most))


def bounded_lines(stream: BinaryIO, path: str | PathLike[str], *, most: int = MOST) -> Iterator[bytes]:
    """Yield the lines of ``stream`` with their ends. Raises ``ValueError`` for a line of more than ``most`` bytes.

    A file with holes costs its sender nothing, and its one line would take all memory.
    """
    for number in itertools.count(1):
        line = stream.readline(most + 1)
        if len(line) > most:
            raise ValueError(f"{path}, line {number}: expected at most {most} bytes")
        if not line:
            return
        yield line


def lines_from_end(stream: BinaryIO, path: str | PathLike[str], *, most: int = MOST) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of ``stream`` as :func:`bounded_lines` does, but the last one first, each after its place.

    The place is that of its first byte. Only the yielded lines and at most a block before them are read.
    """
    start = stream.seek(0, os.SEEK_END)
    parts: list[bytes] = []  # of the line whose beginning is not found yet, its end first
    length = 0
    while start:
        start -= (size := min(_BLOCK, start))
        stream.seek(start)
        block = stream.read(size)
        end = len(block)
        while (cut := block.rfind(b"\n", 0, end)) >= 0:
            if line := b"".join([block[cut + 1 : end], *reversed(parts)]):
                yield start + cut + 1, line
            parts, length, end = [b"\n"], 1, cut
        parts.append(block[:end])
        length += end
        if length > most:
            raise ValueError(f"{path}, before byte {start + size}: expected at most {most} bytes in a line")
    if parts:
        yield 0, b"".join(reversed(parts))


@contextmanager
def damage_named(place: object) -> Iterator[None]:
    """Raise ``ValueError`` that names ``place`` for errors of code that takes apart what a damaged file holds."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{place}: expected what a run writes, got damaged records ({error!r:.200})") from error


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all."""
    with replacing(path) as stream:
        stream.write(text.encode("utf-8"))


def check_no_links(folder: Path, path: Path) -> None:
    """Raise ``ValueError`` if a link in ``folder`` leads from it to ``path``, or one is below ``path``.

    For commands that write to ``path`` in the folder of a run that may come from someone else.
    """
    parents = [parent for parent in (path, *path.parents) if parent.is_relative_to(folder) and parent != folder]
    for each in (*parents, *path.rglob("*")):
        if each.is_symlink():
            raise ValueError(
                f"{str(each)!r}: expected a file or folder of the run, got a link, through which another file would be "
                "overwritten. Delete the link, or write elsewhere"
            )


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno == errno.ENOSPC or not source.is_file():
            raise
        shutil.copyfile(source, target)


def sync_folder(folder: Path) -> None:
    """Flush the listing of ``folder`` to the disk, so that renames in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_lines(path: str | PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Yield each line of a JSON Lines file as its place, ``file:line``, and its value. Skips blank lines.

    Only ``\\n`` ends a line, not the other line separators in a text. A byte order mark is not part of a line.
    Raises ``OSError`` for a file that can't be read, and ``ValueError`` that begins with the place of a bad line, also
    of one that fails :func:`check_texts`.
    """
    with Path(path).open("rb") as stream:
        for number, line in enumerate(bounded_lines(stream, path), 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                value = parse_json_line(line)
                check_texts(value)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            yield place, value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the settings in ``text``. Raises ``tomllib.TOMLDecodeError``, also for what would take long to read."""
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError("a key has more than 64 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply") from None


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
