"""The SQLite file behind a durable store. Every change has a revision, and the file can go back to any revision.

Changes overwrite nothing. A removed artifact keeps its row, with the revision that removed it. Weights and attempt
statistics have a row per revision. Going back deletes newer rows. So a checkpoint holds only a number.
:meth:`SqliteStore.prune_revisions_before` deletes rows that no checkpoint needs any more.

Each change is one transaction in a write-ahead log, so a kill leaves all of it or nothing. Other processes may read at
any time; what several queries read is of one moment. One process writes, or several that all set ``shared``. Each reads
the others' changes before it writes its own.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.arena.stores.sampling import AttemptStats
from turnwise.arena.stores.sqlite_rows import (
    APPLICATION,
    FORMAT,
    ROWS,
    TABLES,
    check_journal,
    own_schema,
    read_row,
    row_of,
    schema_of,
)
from turnwise.types import Artifact

PATIENCE = 30.0
"""Seconds that a write waits for another process's write."""

_SUPERSEDED = """
DELETE FROM known WHERE place NOT IN (SELECT place FROM artifacts) OR EXISTS (
    SELECT 1 FROM known later
    WHERE later.place = known.place AND later.revision > known.revision AND later.revision <= ?)
"""


@dataclass(slots=True)
class ExternalChanges:
    """Changes of the file since it was last read. ``whole`` means that they replace everything read before."""

    made: int
    plays: int
    whole: bool = False
    removed: list[str] = field(default_factory=list)
    present: list[tuple[Artifact, AttemptStats]] = field(default_factory=list)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time run the block: SQLite fails at once where two switch a new file to its log."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class SqliteStore:
    """One process's connection to the file at ``path``. It creates a missing file.

    The first write locks the file for this process, or for all processes with ``shared``. Raises ``ValueError`` for a
    file that is not a store, or a store of another name than ``name``. Raises ``OSError`` for a file that can't be
    opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], name: str, *, shared: bool = False, allow_pickle: bool = False
    ) -> None:
        self.path, self.shared, self._allow_pickle = Path(path), shared, allow_pickle
        self.writer, self.label = secrets.token_hex(8), ""
        self._seen = self._rewinds = -1
        self._wrote, self._synced = -1, False
        self._changed = False
        self._claim: int | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_journal(self.path)
        with self._explained():
            # SQLite gives its other files the mode of this one. It may be there, or be made by another process now.
            with suppress(OSError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._database = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
            # Decode damaged text without an error, so that its checksum can report it.
            self._database.text_factory = lambda text: text.decode(errors="surrogateescape")
            try:
                with _alone_in(self.path.parent):
                    self._prepare(name)
            except BaseException:
                self._database.close()
                raise

    def _prepare(self, name: str) -> None:
        run = self._database.execute
        [[tables]] = run("SELECT count(*) FROM sqlite_master")  # read first: another process may be creating them now
        [[application]], [[format]] = run("PRAGMA application_id"), run("PRAGMA user_version")
        if tables and application != APPLICATION:
            raise ValueError(f"path={str(self.path)!r}: a database of something else, no artifact store")
        if tables and format != FORMAT:
            raise ValueError(f"path={str(self.path)!r}: format {format}; this version reads format {FORMAT}")
        [[mode]] = run("PRAGMA journal_mode = WAL")
        # Without shared memory, SQLite has no write-ahead log. Then only full syncs keep the file whole.
        run(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        run("BEGIN IMMEDIATE")
        if not run("SELECT count(*) FROM sqlite_master").fetchone()[0]:  # another process may have created them
            for statement in TABLES.split(";"):
                run(statement)
            run("INSERT INTO store VALUES (?, ?, 0, 0, 0, 0, 0)", (name, secrets.token_hex(8)))
            run(f"PRAGMA application_id = {APPLICATION}")
            run(f"PRAGMA user_version = {FORMAT}")
        if schema_of(self._database) != own_schema():  # a view or a trigger of the file's could do anything
            raise ValueError(f"path={str(self.path)!r}: its tables are not those of an artifact store")
        run("COMMIT")
        rows = run("SELECT name, file, revision, rewinds, oldest, made, plays FROM store").fetchall()
        if [list(map(type, row)) for row in rows] != [[str, str, int, int, int, int, int]]:
            raise ValueError(f"path={str(self.path)!r}: its row of the store is damaged")
        found, self.file, self._begun = rows[0][:3]
        if found != name:
            raise ValueError(f"path={str(self.path)!r}: holds the store {found!r}, not {name!r}")

    @property
    def run(self) -> str:
        """Name of the run: a readable label, and a unique id that a resumed run keeps."""
        return f"{self.label}@{self.writer}" if self.label else self.writer

    def close(self) -> None:
        """Close the file. Later use of the store raises an error."""
        self._database.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def claim(self) -> None:
        """Lock the file for writing. Raises ``OSError`` if another process writes and not all of them share."""
        if self._claim is not None:
            return
        claim = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(claim, (fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(claim)
            raise OSError(
                f"{self.path}: another run writes to this file; give each its own, or open all of them with shared=True"
            ) from None
        self._claim = claim  # the lock ends with the process, also after a kill

    # -- reading -------------------------------------------------------------------------------------------------------
    def news(self) -> ExternalChanges | None:
        """Return changes by others since the last call or write, at first everything; ``None`` if there are none."""
        with self._reading():
            query = "SELECT revision, rewinds, oldest, made, plays FROM store"
            revision, rewinds, oldest, made, plays = self._run(query).fetchone()
            if (revision, rewinds) == (self._seen, self._rewinds):
                return None
            # Pruned rows no longer show which artifacts were removed, so read everything again.
            news = ExternalChanges(made, plays, whole=rewinds != self._rewinds or self._seen < oldest)
            undone = "SELECT 1 FROM rewinds WHERE writer = ? AND target < ? AND at >= ?"
            if self._run(undone, (self.writer, self._wrote, self._wrote)).fetchone():
                raise RuntimeError(f"{self.path}: another process resumed this run, and took back what this one wrote")
            seen = {"seen": -1 if news.whole else self._seen}
            gone = "SELECT id FROM artifacts WHERE removed > :seen AND added <= :seen"
            news.removed = [] if news.whole else [id for (id,) in self._run(gone, seen)]
            news.present = [read_row(self.path, row, self._allow_pickle) for row in self._run(ROWS, seen)]
            self._seen, self._rewinds = revision, rewinds
            return news

    def preexisting_ids(self) -> frozenset[str]:
        """Return the ids of present artifacts that were added before the run began, see :meth:`save_revision`."""
        with self._reading():
            query = "SELECT id FROM artifacts WHERE added <= ? AND removed IS NULL"
            return frozenset(id for (id,) in self._run(query, (self._begun,)))

    # -- writing -------------------------------------------------------------------------------------------------------
    @contextmanager
    def writing(self, catch_up: Callable[[], None]) -> Iterator[None]:
        """Run the block as one transaction. Nested blocks join it.

        ``catch_up`` is called at its start, and again if a transaction with changes is rolled back.
        """
        with self._lock, self._explained():
            if self._database.in_transaction:
                yield
                return
            self.claim()
            self._run("BEGIN IMMEDIATE")
            self._changed = False
            # Commit the block's changes as one new revision. After an error, undo them in the file and in memory.
            try:
                catch_up()
                yield
                if self._changed:
                    self._run("INSERT INTO changes VALUES (?, ?)", (self._seen + 1, self.writer))
                    self._run("UPDATE store SET revision = ?", (self._seen + 1,))
                self._run("COMMIT")
            except BaseException:
                with suppress(sqlite3.OperationalError):  # a full disk has already rolled back
                    self._database.execute("ROLLBACK")
                if self._changed:
                    self._changed, self._rewinds = False, -1
                    catch_up()
                raise
            if self._changed:
                self._changed, self._seen = False, self._seen + 1
                self._wrote, self._synced = self._seen, False

    def insert(self, artifact: Artifact, outcome: AttemptStats, made: int) -> None:
        self._write(
            "INSERT INTO artifacts (id, data, source, parents, meta, run, digest, added) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*row_of(artifact, self._allow_pickle), self._seen + 1),
        )
        self.put(artifact, outcome)
        self._write("UPDATE store SET made = ?", (made,))

    def put(self, artifact: Artifact, outcome: AttemptStats) -> None:
        """Write an artifact's weight and attempt statistics."""
        known = (outcome.attempts, outcome.reward, outcome.success, outcome.score, outcome.last)
        self._write(
            "INSERT OR REPLACE INTO known SELECT place, ?, ?, ?, ?, ?, ?, ? FROM artifacts "
            "WHERE id = ? AND removed IS NULL",
            (self._seen + 1, artifact.weight, *known, artifact.id),
        )

    def remove(self, id: str) -> None:
        self._write("UPDATE artifacts SET removed = ? WHERE id = ? AND removed IS NULL", (self._seen + 1, id))

    def set_plays(self, plays: int) -> None:
        self._write("UPDATE store SET plays = ?", (plays,))

    # -- revisions -----------------------------------------------------------------------------------------------------
    def save_revision(self) -> dict[str, Any]:
        """Sync the file. Return its revision now and at the run's start, for :meth:`restore_revision`."""
        with self._lock, self._explained():
            self.claim()
            if not self._synced:
                self._run("PRAGMA wal_checkpoint(PASSIVE)")
                self._synced = True
            return {"file": self.file, "revision": self._seen, "writer": self.writer, "begun": self._begun}

    def restore_revision(self, mark: Mapping[str, Any], made: int, plays: int) -> int:
        """Undo the changes that the run of ``mark`` made after it. Return how many changes by other runs stay.

        Changes by others are allowed only with ``shared``. Raises ``ValueError``, and changes nothing, if the file
        can't go back.
        """
        with self._lock, self._explained():
            self.claim()
            self._run("BEGIN IMMEDIATE")
            try:
                others = self._check_mark(mark)
                target, writer = mark["revision"], mark["writer"]
                own = {"target": target, "writer": writer, "made": made, "plays": plays}
                # Delete rows of the undone revisions, and bring back artifacts that they removed.
                after = "IN (SELECT revision FROM changes WHERE revision > :target AND writer = :writer)"
                if self._run(f"SELECT 1 FROM changes WHERE revision {after}", own).fetchone():
                    self._run(f"DELETE FROM artifacts WHERE added {after}", own)
                    self._run(f"DELETE FROM known WHERE revision {after}", own)
                    self._run(f"UPDATE OR IGNORE artifacts SET removed = NULL WHERE removed {after}", own)
                    self._run("INSERT INTO rewinds SELECT :target, revision, :writer FROM store", own)
                    self._run("DELETE FROM changes WHERE revision > :target AND writer = :writer", own)
                    self._run("UPDATE store SET revision = revision + 1, rewinds = rewinds + 1")
                    if not others:
                        self._run("UPDATE store SET made = :made, plays = :plays", own)
                self._run("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            # Continue as that run, and read everything again at the next call of ``news``.
            self.writer, self._rewinds, self._wrote, self._synced = writer, -1, -1, False
            self._begun = mark.get("begun", 0)
            return others

    def _check_mark(self, mark: Mapping[str, Any]) -> int:
        """Count the changes by others after ``mark``. Raises ``ValueError`` if the file can't go back to it."""
        revision, oldest = self._run("SELECT revision, oldest FROM store").fetchone()
        target, writer = mark["revision"], mark["writer"]
        where = f"{self.path}: can't go back to revision {target}"
        if mark["file"] != self.file:
            raise ValueError(f"{where}: it was saved of another file")
        if target > revision:
            raise ValueError(f"{where}: the file is older, it ends at {revision}")
        if target < oldest:
            raise ValueError(f"{where}: what came before {oldest} was forgotten when newer checkpoints were saved")
        query = "SELECT 1 FROM rewinds WHERE writer = ? AND target < ? AND at >= ?"
        if self._run(query, (writer, target, target)).fetchone():
            raise ValueError(f"{where}: the run went back to an older one since")
        query = "SELECT count(*) FROM changes WHERE revision > ? AND writer != ?"
        [[others]] = self._run(query, (target, writer))
        if others and not self.shared:
            raise ValueError(
                f"{where}: {others} changes by other runs came after it and would be lost: "
                "give each run its own file, or open the store with shared=True, which leaves them"
            )
        return int(others)

    def prune_revisions_before(self, revision: int) -> None:
        """Delete rows that only revisions before ``revision`` need. The file can't go back to those revisions any more.

        A ``shared`` file keeps them, because other runs may have older checkpoints.
        """
        if self.shared:
            return
        with self._lock, self._explained():
            self.claim()
            self._run("BEGIN IMMEDIATE")
            try:
                self._run("DELETE FROM artifacts WHERE removed <= ?", (revision,))
                self._run(_SUPERSEDED, (revision,))
                self._run("DELETE FROM changes WHERE revision <= ?", (revision,))
                self._run("UPDATE store SET oldest = max(oldest, ?)", (revision,))
                self._run("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise

    # -- inside --------------------------------------------------------------------------------------------------------
    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Let the block's queries read the file as of one moment: that of the first one, or of the open transaction."""
        with self._lock, self._explained():
            if self._database.in_transaction:
                yield
                return
            self._run("BEGIN")
            try:
                yield
            finally:
                if self._database.in_transaction:
                    self._database.execute("COMMIT")

    def _run(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self.path} was opened in another process: open the store again in this one")
        return self._database.execute(statement, values)

    def _write(self, statement: str, values: Any) -> None:
        self._changed = True
        self._run(statement, values)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into ``OSError`` if the file is inaccessible, ``ValueError`` if it is damaged."""
        try:
            yield
        except (sqlite3.OperationalError, sqlite3.ProgrammingError) as error:
            raise OSError(f"{self.path}: the artifact store can't be read or written: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"path={str(self.path)!r}: no artifact store can be read from it: {error}") from error
