"""Writes files whole or not at all, and links to files that never change."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose bytes replace ``path`` when the block ends. After an error, ``path`` is unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all."""
    with replacing(path) as stream:
        stream.write(text.encode("utf-8"))


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
