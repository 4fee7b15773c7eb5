"""The tables of a durable store's file, and each artifact as a row of them. Nothing in a file is taken on trust."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any

from turnwise.arena.recording.lossless_json import UntrustedValueError, decode, encode
from turnwise.arena.stores.sampling import AttemptStats
from turnwise.types import Artifact

APPLICATION = 0x74_77_73_74  # "twst"
FORMAT = 4
"""Formats 1 to 3 are those of versions before 0.1.0, which kept pickles."""

TRUST = "If you trust the file: ArtifactStore(..., allow_pickle=True)"

TABLES = """
CREATE TABLE store (name TEXT, file TEXT, revision INTEGER, rewinds INTEGER, oldest INTEGER, made INTEGER,
    plays INTEGER);
CREATE TABLE artifacts (place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, data NOT NULL, source TEXT,
    parents TEXT NOT NULL, meta NOT NULL, added INTEGER NOT NULL, removed INTEGER, run TEXT,
    digest BLOB);
CREATE UNIQUE INDEX present ON artifacts (id) WHERE removed IS NULL;
CREATE INDEX by_added ON artifacts (added);
CREATE INDEX by_removed ON artifacts (removed) WHERE removed IS NOT NULL;
CREATE TABLE known (place INTEGER, revision INTEGER, weight REAL, attempts INTEGER, reward REAL, success REAL,
    score REAL, last INTEGER, PRIMARY KEY (place, revision)) WITHOUT ROWID;
CREATE INDEX by_revision ON known (revision);
CREATE TABLE changes (revision INTEGER PRIMARY KEY, writer TEXT NOT NULL);
CREATE TABLE rewinds (target INTEGER, at INTEGER, writer TEXT);
"""

_COLUMNS = (int, bytes, str, str, str | None, str, str, str | None, float, int, float, float, float | None, int)
"""Types of a row of ``ROWS``, without the last value."""

_SECOND_FILE = bytes.fromhex("d9d505f920a163d7")
"""Last bytes of a rollback journal that names a second file. SQLite deletes that file after the rollback."""

ROWS = """
SELECT a.place, a.digest, a.id, a.data, a.source, a.parents, a.meta, a.run,
    k.weight, k.attempts, k.reward, k.success, k.score, k.last, MAX(k.revision)
FROM artifacts a JOIN known k USING (place)
WHERE a.removed IS NULL AND k.revision > :seen GROUP BY a.place ORDER BY a.place
"""
"""Artifacts added or changed after ``seen``. New artifacts have a row in ``known`` too. MAX picks the newest row."""


def check_journal(path: Path) -> None:
    """Refuse a file with a rollback journal that no store wrote: SQLite could delete another file."""
    try:
        handle = os.open(os.path.realpath(path) + "-journal", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    with open(handle, "rb") as journal:
        size = os.fstat(handle).st_size
        journal.seek(max(0, size - len(_SECOND_FILE)))
        if journal.read(len(_SECOND_FILE)) == _SECOND_FILE:
            raise ValueError(f"path={str(path)!r}: its journal, {path}-journal, names another file. Remove the journal")


def schema_of(database: sqlite3.Connection) -> set[tuple[str, ...]]:
    """Return the tables, indices, views and triggers, without those that SQLite keeps for its statistics."""
    rows = database.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return {(*row[:3], " ".join((row[3] or "").split())) for row in rows if row[:2] != ("table", "sqlite_stat1")}


@cache
def own_schema() -> set[tuple[str, ...]]:
    """Return the schema that a new file has."""
    database = sqlite3.connect(":memory:")
    database.executescript(TABLES)
    try:
        return schema_of(database)
    finally:
        database.close()


def row_of(artifact: Artifact, allow_pickle: bool) -> tuple[Any, ...]:
    """Return id, data, source, parents, meta, run and checksum. Raises ``TypeError`` for data that JSON can't hold."""
    data, meta = (_packed(each, allow_pickle) for each in (artifact.data, artifact.meta))
    payload = (artifact.id, data, artifact.source, json.dumps(artifact.parents), meta, artifact.run)
    return (*payload, digest(*payload))


def read_row(path: Path, row: tuple[Any, ...], allow_pickle: bool) -> tuple[Artifact, AttemptStats]:
    """Return the artifact of a row of :data:`ROWS` with its statistics. Raises ``ValueError`` for a damaged one."""
    place, checksum, id, data, source, parents, meta, run, weight, *known = row
    if checksum != digest(id, data, source, parents, meta, run):
        raise ValueError(
            f"path={str(path)!r}: artifact {id!r} (row {place}) is damaged: its checksum does not fit. Take an older "
            f"copy of the file, or give the artifact up: DELETE FROM artifacts WHERE place = {place}"
        )
    good = all(isinstance(value, kind) for value, kind in zip(row, _COLUMNS, strict=False))
    if not (good and 0 <= weight < math.inf):
        raise ValueError(f"path={str(path)!r}: artifact {id!r} (row {place}) is damaged: a value is of another type")
    try:
        made = (_unpacked(each, allow_pickle) for each in (data, meta))
        ids = json.loads(parents)
        if not (isinstance(ids, list) and all(isinstance(each, str) for each in ids)):
            raise ValueError(f"its parents {ids!r} are no ids")
        artifact = Artifact(id, next(made), weight, source, next(made), tuple(ids), run)
    except UntrustedValueError as error:
        raise ValueError(f"path={str(path)!r}: artifact {id!r} can't be read: {error}. {TRUST}") from error
    except Exception as error:
        raise ValueError(f"path={str(path)!r}: artifact {id!r} can't be read: {error}") from error
    return artifact, AttemptStats(*known[:5])


def digest(*fields: Any) -> bytes:
    """Return the checksum of an artifact's row without its revisions. It is compared before reading them."""
    hashed = hashlib.blake2b(digest_size=16)
    for each in fields:
        text = "" if each is None else str(each)  # a number where the file was changed
        raw = each if isinstance(each, bytes) else text.encode(errors="surrogateescape")
        hashed.update(f"{type(each).__name__} {len(raw)} ".encode() + raw)
    return hashed.digest()


def _packed(value: Any, allow_pickle: bool) -> str:
    """Return ``value`` as JSON. Raises ``TypeError`` for data that could not be read back."""
    try:
        written = json.dumps(encode(value, strict=True))
        if '"$' in written:  # the mark of a value that JSON doesn't have
            _unpacked(written, allow_pickle)
    except UntrustedValueError as error:
        raise TypeError(f"data={value!r}: can't be read back from a file: {error}. {TRUST}") from error
    except Exception as error:  # the object's own hooks can raise any error
        raise TypeError(f"data={value!r}: can't be kept in a file: {error}") from error
    return written


def _unpacked(value: str, allow_pickle: bool) -> Any:
    return decode(json.loads(value), allow_pickle=allow_pickle)
