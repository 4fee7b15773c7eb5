"""Folders that an untrusted program has filled: read and removed without recursion, links, pipes or long waits."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

ENTRIES, DEEPEST = 500_000, 100
"""Entries and folders in each other that a search looks at; the rest is left out."""
OPEN = 64
"""Folders in each other that a removal has open."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def read_regular(path: str | Path, most: int, *, folder: int | None = None) -> bytes:
    """Return at most ``most`` bytes of a file. Raises ``OSError``, or ``ValueError`` for anything but a regular file.

    A link may lead to answers, and a pipe would never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def regular_files(root: Path, patterns: Sequence[str], most: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and texts, of at most ``most`` bytes, of the files in a folder that match a pattern.

    A pattern is a path below the folder; ``*`` stands for a part of a name, ``**`` for any number of folders. Names are
    in alphabetical order, folder by folder. Links, pipes and the like are left out.
    """
    wanted = [parts for pattern in patterns if (parts := Path(pattern).parts)]
    looked = 0
    left: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [((), wanted)]
    while left:
        parts, open_patterns = left.pop()
        names, below = [], []
        with contextlib.suppress(OSError, ValueError), _opened(root, parts) as folder, os.scandir(folder) as entries:
            for entry in entries:
                if (looked := looked + 1) > ENTRIES:
                    return
                rests = [rest for pattern in open_patterns for rest in _after(pattern, entry.name)]
                if rests and entry.is_dir(follow_symlinks=False):
                    below.append(((*parts, entry.name), [rest for rest in rests if rest]))
                elif () in rests:
                    names.append(entry.name)
            for name in sorted(names):
                with contextlib.suppress(OSError, ValueError):
                    yield os.path.join(*parts, name), read_regular(name, most, folder=folder)
        if len(parts) < DEEPEST:
            left += [part for part in sorted(below, reverse=True) if part[1]]


def _after(pattern: tuple[str, ...], name: str) -> list[tuple[str, ...]]:
    """Return what is left of a pattern below ``name``: ``()`` if it is matched, nothing if it isn't."""
    first, *rest = pattern
    if first == "**":
        return [pattern, *(_after(tuple(rest), name) if rest else [()])]
    return [tuple(rest)] if fnmatch.fnmatchcase(name, first) else []


@contextlib.contextmanager
def _opened(root: Path, parts: Sequence[str]) -> Iterator[int]:
    """Yield a descriptor of a folder below ``root``, which no link on the way leads out of."""
    folder = os.open(root, FOLDER)
    try:
        for part in parts:
            inner = os.open(part, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def remove_tree(root: Path) -> None:
    """Remove a folder that nothing writes into any more. What can't be removed stays, with a warning; never raises."""
    problems: list[str] = []
    try:
        top = os.open(root, FOLDER)
        try:
            _Removal(top, problems).run()
        finally:
            os.close(top)
        root.rmdir()
    except OSError as error:
        problems.append(str(error))
    if problems:
        warnings.warn(f"{root}: is left behind: {problems[0]}", stacklevel=2)


class _Removal:
    """Empties the folder ``top``. What is nested deeper than :data:`OPEN` is moved up to it before it is emptied."""

    def __init__(self, top: int, problems: list[str]) -> None:
        self.top, self.problems = top, problems
        self.opened: list[tuple[int, str, list[str]]] = []
        """From ``top`` on, each folder in the one before it: a descriptor, its name, and the folders left in it."""

    def run(self) -> None:
        left, prefix = self.emptied(self.top), token_hex(8)
        moved = count()
        while left or self.opened:
            if not self.opened:
                self.enter(left.pop())
                continue
            folder, name, inner = self.opened[-1]
            if not inner:
                self.opened.pop()
                os.close(folder)
                self.attempt(os.rmdir, name, dir_fd=self.parent)
            elif len(self.opened) < OPEN:
                self.enter(inner.pop())
            else:
                new = f"{prefix}-{next(moved)}"
                if self.attempt(os.rename, inner.pop(), new, src_dir_fd=folder, dst_dir_fd=self.top):
                    left.append(new)

    @property
    def parent(self) -> int:
        return self.opened[-1][0] if self.opened else self.top

    def enter(self, name: str) -> None:
        """Open a folder, and remove all in it but folders."""
        try:
            try:
                folder = os.open(name, FOLDER, dir_fd=self.parent)
            except PermissionError:  # a program may have taken its own rights
                os.chmod(name, 0o700, dir_fd=self.parent)
                folder = os.open(name, FOLDER, dir_fd=self.parent)
        except OSError as error:
            self.problems.append(str(error))
            return
        self.attempt(os.fchmod, folder, 0o700)
        self.opened.append((folder, name, self.emptied(folder)))

    def emptied(self, folder: int) -> list[str]:
        """Remove all in ``folder`` but folders, and return their names."""
        folders = []
        try:
            with os.scandir(folder) as entries:
                names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        except OSError as error:
            self.problems.append(str(error))
            return []
        for name, is_folder in names:
            if is_folder:
                folders.append(name)
            else:
                self.attempt(os.unlink, name, dir_fd=folder)
        return folders

    def attempt(self, action: Callable[..., object], *arguments: Any, **options: Any) -> bool:
        """Return True if ``action`` succeeds, and keep its error otherwise."""
        try:
            action(*arguments, **options)
        except OSError as error:
            self.problems.append(str(error))
            return False
        return True


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="turnwise-agent-"))
