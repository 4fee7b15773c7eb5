"""Read API keys from the environment or a file. ``turnwise serve`` writes its key where the user's clients find it."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit


def key_from_environment(variable: str) -> str:
    """The key in an environment variable. Raises ``ValueError`` if it is empty or an HTTP header can't carry it."""
    return checked_key(os.environ.get(variable, ""), f"api_key_env={variable!r}: the environment variable")


def key_file(url: str) -> Path:
    """The file, private to this user, where ``turnwise serve`` on this host writes the key of the server at ``url``."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    name = re.sub(r"[^\w.-]", "_", f"{host}-{port}.key")
    return Path(tempfile.gettempdir()) / f"turnwise-{os.getuid()}" / name


def read_key(path: Path) -> str | None:
    """Read the key that :func:`write_key` wrote. ``None`` if the file is missing or others could have written it."""
    try:
        with open(path, encoding="ascii", opener=_open_itself) as file:
            return file.read().rstrip("\n") if _is_ours(os.fstat(file.fileno())) else None
    except (OSError, UnicodeDecodeError):
        return None


def write_key(path: Path, key: str) -> None:
    """Write ``key`` to a file that only this user can read. Raises ``OSError`` if others can use its folder."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    found = path.parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_ours(found):
        raise OSError(f"{path.parent} can be used by others: delete it, or set TMPDIR to another folder")
    partial = path.with_suffix(f".{os.getpid()}")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(key + "\n")
    partial.replace(path)


def _is_ours(found: os.stat_result) -> bool:
    """True for a file or folder that only this user can read or write."""
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def checked_key(key: str, source: str) -> str:
    if not key:
        raise ValueError(f"{source} does not exist or is empty")
    if (bad := re.search("[^!-~]", key)) is not None:
        raise ValueError(
            f"{source} holds a key whose character {bad.start() + 1} of {len(key)} is no letter, digit or sign of "
            "ASCII: expected these only, without spaces and line breaks"
        )
    return key
