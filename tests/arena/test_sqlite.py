"""Stores in files: what a kill, a second process, a resumed run and a bad file do to them."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import struct
from dataclasses import dataclass

import numpy as np
import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.recording.lossless_json import encode
from turnwise.arena.runtime.context import use_context
from turnwise.arena.stores import sqlite as store_file
from turnwise.arena.stores.sampling import PrioritizedLevelReplay
from turnwise.arena.stores.sqlite_rows import digest

from .test_store import episode, random_uses


@dataclass(frozen=True)
class Puzzle:
    rows: tuple[int, ...]


def contents(store):
    return [(a.id, a.data, a.weight, a.source, a.meta, a.parents, store.outcome(a.id)) for a in store]


def reopened(store, **options):
    store.close()
    return ArtifactStore(store.name, path=store.path, **options)


def through_json(state):
    return json.loads(json.dumps(state))


# -- the same store, kept elsewhere ------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", ["uniform", "weighted", "prioritized", "learnability"])
def test_a_file_does_what_memory_does(tmp_path, sampling):
    seed = random.randrange(2**32)
    print("seed", seed)
    options = {"max_size": 12, "dedup": True, "sampling": sampling, "seed": 3}
    memory = ArtifactStore("q", **options)
    file = ArtifactStore("q", path=tmp_path / "q.db", **options)
    assert random_uses(memory, seed) == random_uses(file, seed)
    assert contents(memory) == contents(file)
    again = reopened(file, **options)
    assert contents(again) == contents(memory)
    assert (again._contents.added, again._contents.plays) == (memory._contents.added, memory._contents.plays)
    ids = [[each.id_of(each.key(item)) for item in each] for each in (again._contents, memory._contents)]
    assert ids[0] == ids[1]
    assert again.add("new").id == memory.add("new").id


DATA = [
    *("text", None, 7, 0.1, True, {"a": [1, {"b": None}], "ü": "\ud800"}, (1, (2, 3)), {1: "one"}, {"kept": (1, 2)}),
    *(b"\x00\xff", frozenset({1, 2}), Puzzle((1, 2)), np.arange(6, dtype=np.int8).reshape(2, 3)),
]


@pytest.mark.parametrize("data", DATA, ids=repr)
def test_data_come_back_as_they_were(tmp_path, data):
    store = ArtifactStore("q", path=tmp_path / "deep" / "folder" / "q.db", dedup=True)
    store.add(data, meta={"seen": (1, 2)})
    again = reopened(store, dedup=True)
    [artifact] = again
    assert np.array_equal(artifact.data, data) if isinstance(data, np.ndarray) else artifact.data == data
    assert type(artifact.data) is type(data) and artifact.meta == {"seen": (1, 2)}
    assert getattr(artifact.data, "dtype", None) == getattr(data, "dtype", None)
    assert again.add(data) is None, "dedup knows what was loaded"


class EzPickle:
    """As Gymnasium's: what reads a pickle of it calls the constructor."""

    def __setstate__(self, state):
        self.__init__()


def test_what_can_not_be_kept_is_refused_and_changes_nothing(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db")
    store.add("kept")
    with pytest.raises(TypeError, match=r"data=.* can't be kept in a file: "):
        store.add(lambda: None)
    with pytest.raises(TypeError, match=r"data=.* can't be kept in a file: EzPickle is an EzPickle"):
        store.add([EzPickle()])
    assert [a.data for a in store] == ["kept"] == [a.data for a in reopened(store)]


# -- going back --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kill", [False, True], ids=["same process", "new process"])
def test_going_back_undoes_all_that_came_after(tmp_path, kill):
    seed = random.randrange(2**32)
    print("seed", seed)
    options = {"max_size": 12, "dedup": True, "sampling": PrioritizedLevelReplay(0.5), "seed": 1}
    store = ArtifactStore("q", path=tmp_path / "q.db", **options)
    random_uses(store, seed)
    saved, before = through_json(store.state_dict()), contents(store)
    onwards = random_uses(store, seed + 1)
    after = contents(store)
    assert after != before
    for _ in range(2):  # a run may be killed more than once after the same checkpoint
        if kill:
            store = reopened(store, **options)
        store.load_state_dict(saved)
        assert contents(store) == before
        assert random_uses(store, seed + 1) == onwards and contents(store) == after


def test_a_state_that_was_abandoned_is_refused(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db")
    store.add("a")
    early = store.state_dict()
    store.add("b")
    late = store.state_dict()
    store.load_state_dict(early)
    store.add("other b")
    with pytest.raises(ValueError, match=r"can't go back to revision 2: the run went back to an older one since"):
        store.load_state_dict(late)
    assert [a.data for a in store] == ["a", "other b"]


def test_states_of_other_files_are_refused(tmp_path):
    store, other = (ArtifactStore("q", path=tmp_path / name) for name in ("a.db", "b.db"))
    memory = ArtifactStore("q")
    store.add("x")
    state = store.state_dict()
    with pytest.raises(ValueError, match="saved of another file"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="'q': it was not saved of a store in a file, as this one is"):
        store.load_state_dict(memory.state_dict())
    with pytest.raises(ValueError, match="it was not saved of a store in memory"):
        memory.load_state_dict(state)
    store.close()
    shutil.copy(store.path, tmp_path / "copy.db")
    store = ArtifactStore("q", path=store.path)
    store.add("y")
    copy = ArtifactStore("q", path=tmp_path / "copy.db")
    with pytest.raises(ValueError, match=r"revision 2: the file is older, it ends at 1"):
        copy.load_state_dict(store.state_dict())


def test_what_no_checkpoint_needs_is_forgotten(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db", max_size=4)
    states = []
    for seed in range(5):
        random_uses(store, seed, actions=60)
        states.append((store.state_dict(), contents(store)))

    def rows():
        with sqlite3.connect(tmp_path / "q.db") as database:
            return [database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("artifacts", "known")]

    before = rows()
    store.prune_revisions_before(states[3][0])
    assert all(less < more for less, more in zip(rows(), before, strict=True))
    with pytest.raises(ValueError, match=r"what came before .* was forgotten when newer checkpoints were saved"):
        store.load_state_dict(states[2][0])
    for state, expected in (states[4], states[3]):
        store.load_state_dict(state)
        assert contents(store) == expected
        store = reopened(store, max_size=4)
        assert contents(store) == expected
    store.prune_revisions_before(states[3][0])
    assert rows() == [4, 4]


# -- files that are none -----------------------------------------------------------------------------------------------
def test_files_that_are_no_store_are_refused(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("no database at all, but a longer text than a header\n" * 10)
    with pytest.raises(ValueError, match=r"path=.*notes.txt': no artifact store can be read from it"):
        ArtifactStore("q", path=text)
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    with pytest.raises(ValueError, match="a database of something else, no artifact store"):
        ArtifactStore("q", path=tmp_path / "other.db")
    with pytest.raises(OSError, match="can't be read or written: unable to open"):
        ArtifactStore("q", path=tmp_path)
    ArtifactStore("q", path=tmp_path / "q.db").close()
    with pytest.raises(ValueError, match="holds the store 'q', not 'solved'"):
        ArtifactStore("solved", path=tmp_path / "q.db")
    with sqlite3.connect(tmp_path / "q.db") as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(ValueError, match="format 9; this version reads format 4"):
        ArtifactStore("q", path=tmp_path / "q.db")
    with pytest.raises(ValueError, match="shared=True: a store in memory"):
        ArtifactStore("q", shared=True)


class Board:
    """Neither JSON nor a data class."""

    def __init__(self, path=None):
        self.path = path

    def __reduce__(self):
        return (Board, ()) if self.path is None else (os.mkdir, (str(self.path),))


def test_objects_of_any_class_are_read_where_that_is_allowed(tmp_path):
    """Reading them can run any code, so it is asked for; and what could not be read back is not written."""
    store = ArtifactStore("q", path=tmp_path / "q.db")
    with pytest.raises(TypeError, match=r"can't be read back from a file: it names .*Board.*allow_pickle=True"):
        store.add({"board": Board()})
    assert len(store) == 0
    store = reopened(store, allow_pickle=True)
    store.add({"board": Board()})
    store = reopened(store, allow_pickle=True)
    assert type(next(iter(store)).data["board"]) is Board
    harmful = json.dumps(encode(Board(tmp_path / "made")))  # with a checksum that fits, as whoever wrote it can make
    store._file._database.create_function("digest", 6, digest)
    renewed = "UPDATE artifacts SET data = ?1, digest = digest(id, ?1, source, parents, meta, run)"
    store._file._database.execute(renewed, (harmful,))
    with pytest.raises(
        ValueError, match=r"q.db': artifact '.*' can't be read: it names posix.mkdir.*allow_pickle=True"
    ):
        reopened(store)
    assert not (tmp_path / "made").exists()


def test_a_damaged_file_is_told_apart(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db")
    for number in range(300):
        store.add({"text": f"{number} " * 50})
    store.close()
    damaged = bytearray((tmp_path / "q.db").read_bytes())
    damaged[8192:-4096] = b"\xab" * len(damaged[8192:-4096])
    (tmp_path / "q.db").write_bytes(damaged)
    with pytest.raises(ValueError, match="no artifact store can be read from it"):
        ArtifactStore("q", path=tmp_path / "q.db")


def test_a_write_that_breaks_off_in_the_middle_leaves_the_memory_as_the_file_is(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db", dedup=True)
    store.add("x", weight=2.0)
    for fails, message, mended in (
        ("PRAGMA query_only = ON", "readonly", "PRAGMA query_only = OFF"),
        (
            "CREATE TEMP TRIGGER broken BEFORE INSERT ON known BEGIN SELECT RAISE(ABORT, 'the disk is full'); END",
            "the disk is full",
            "DROP TRIGGER broken",
        ),
    ):
        store._file._database.execute(fails)
        for write in (lambda: store.add("y"), lambda: store.set_weight("q-0", 9.0), lambda: store.record("q-0", 1.0)):
            with pytest.raises((OSError, ValueError), match=message):
                write()
        assert [(a.data, a.weight) for a in store] == [("x", 2.0)] and store.outcome("q-0").attempts == 0
        store._file._database.execute(mended)
    with pytest.raises(RuntimeError, match="mine"), store.transaction():
        store.add("y")
        store.record("q-0", 1.0)
        raise RuntimeError("mine")
    assert [a.data for a in store] == ["x"] and store._contents.plays == 0
    with store.transaction():
        assert store.add("y").id == "q-1"
        store.record("q-1", 1.0)
    assert contents(store) == contents(reopened(store, dedup=True))


@pytest.mark.parametrize(
    ("opens", "place"),
    [
        *((True, place) for place in ("revision, rewinds", "FROM rewinds", "FROM artifacts a")),
        *((False, place) for place in ("revision, rewinds", "FROM rewinds", "removed >", "FROM artifacts a")),
    ],
)
def test_a_write_between_two_queries_of_a_read_is_seen_by_the_next_one(tmp_path, monkeypatch, place, opens):
    """A read is of one moment: when it begins. The other process evicts one artifact and changes another one."""
    path, options = tmp_path / "q.db", {"max_size": 3, "shared": True}
    other = ArtifactStore("q", path=path, **options)
    for number in range(3):
        other.add({"n": number})
    mine = None if opens else ArtifactStore("q", path=path, **options)
    other.add({"n": 3})
    plain, between = store_file.SqliteStore._run, [place]

    def run(self, query, *arguments):
        answer = plain(self, query, *arguments)
        if self is not other._file and between and between[0] in query:
            between.clear()
            other.add({"n": 4})
            other.record("q-3", 1.0)
        return answer

    monkeypatch.setattr(store_file.SqliteStore, "_run", run)
    if opens:
        mine = ArtifactStore("q", path=path, **options)
    # A store that opens the file has read it before the list is asked for, which is then the next read.
    assert [artifact.data["n"] for artifact in mine] == ([2, 3, 4] if opens else [1, 2, 3]) and not between
    mine.add({"n": 5})
    assert [artifact.data["n"] for artifact in mine] == [artifact.data["n"] for artifact in other] == [3, 4, 5]
    assert mine.outcome("q-3").attempts == 1


def test_evaluation_reads_a_file_and_writes_nothing(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db", dedup=True)
    store.add("x")
    store.record("q-0", 1.0)
    store.state_dict()  # from here on nothing is left to be moved from the log to the file
    before = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    view = store.frozen()
    with use_context(episode()):
        assert view.add("x") is None and view.add("y", parents=["q-0"]).source == "e0"
        view.set_weight("q-0", 3.0)
        view.record("q-0", 1.0)
        view.remove("q-0")
        assert view.path is None and [a.data for a in view] == ["y"] and view.ancestors("q-1") == ["q-0"]
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == before
    assert contents(store) == contents(reopened(store, dedup=True)) == contents(view)


# -- payloads that were changed ----------------------------------------------------------------------------------------
HARMFUL = json.dumps({"$object": {"of": "builtins:exec", "args": ["raise SystemExit"]}})
CHANGES = {
    "a digit": "UPDATE artifacts SET data = replace(data, '7', '9') WHERE place = 2",
    "another payload": "UPDATE artifacts SET data = (SELECT data FROM artifacts WHERE place = 1) WHERE place = 2",
    "another type": "UPDATE artifacts SET data = CAST(data AS BLOB) WHERE place = 2",
    "no text": "UPDATE artifacts SET data = CAST(x'22ff22' AS TEXT) WHERE place = 2",
    "meta": "UPDATE artifacts SET meta = '{\"of\": 6}' WHERE place = 2",
    "source": "UPDATE artifacts SET source = NULL WHERE place = 2",
    "run": "UPDATE artifacts SET run = 'other' WHERE place = 2",
    "parents": "UPDATE artifacts SET parents = '[]' WHERE place = 2",
    "checksum": "UPDATE artifacts SET digest = NULL WHERE place = 2",
    "a harmful object": f"UPDATE artifacts SET data = '{HARMFUL}' WHERE place = 2",
}


def filled(path):
    store = ArtifactStore("q", path=path)
    first = store.add({"sum": 6}, meta={"of": 5}).id
    store.add({"sum": 7}, meta={"of": 7}, source="r-1", parents=[first])
    store.add((1, {"sum": 8}), weight=2.0)
    store.close()
    return path


def altered(path, *statements):
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_payload_that_was_changed_is_named(tmp_path, change):
    path = filled(tmp_path / "q.db")
    altered(path, CHANGES[change])
    with pytest.raises(
        ValueError, match=r"path='.*q\.db': artifact 'q-1' \(row 2\) is damaged: its checksum does not fit"
    ):
        ArtifactStore("q", path=path)


@pytest.mark.parametrize("format", [1, 2, 3])
def test_a_file_of_an_earlier_format_is_refused(tmp_path, format):
    path = filled(tmp_path / "q.db")
    altered(path, f"PRAGMA user_version = {format}")
    with pytest.raises(ValueError, match=f"format {format}; this version reads format 4"):
        ArtifactStore("q", path=path)


def test_aliases_and_cycles_are_kept(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db")
    data = {"cells": [1], "$x": (1, {2})}
    data["self"], data["again"] = data, data["cells"]
    store.add(data)
    [artifact] = reopened(store)
    assert artifact.data["self"] is artifact.data and artifact.data["again"] is artifact.data["cells"]
    assert artifact.data["$x"] == (1, {2})


def test_a_new_store_is_its_owners(tmp_path):
    before = os.umask(0)
    try:
        store = ArtifactStore("puzzles", path=tmp_path / "store.db")
        store.add(1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    store.close()


# -- files that somebody made to do harm -------------------------------------------------------------------------------
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("CREATE TRIGGER t AFTER INSERT ON artifacts BEGIN DELETE FROM artifacts; END", "its tables are not those"),
        ("CREATE VIEW other AS SELECT 1", "its tables are not those"),
        (f"DROP TABLE changes; CREATE VIEW changes AS {ENDLESS} x AS revision, 'w' AS writer FROM c", "its tables are"),
        (f"DROP TABLE store; CREATE VIEW store AS {ENDLESS} 'q' AS name, 'f' AS file FROM c", "its tables are not"),
        ("ALTER TABLE known ADD COLUMN twice GENERATED ALWAYS AS (zeroblob(1 << 29))", "its tables are not those"),
        ("CREATE INDEX slow ON artifacts (hex(data))", "its tables are not those"),
        ("DELETE FROM store", "its row of the store is damaged"),
        ("INSERT INTO store SELECT * FROM store", "its row of the store is damaged"),
        ("UPDATE store SET revision = 'x'", "its row of the store is damaged"),
        ("UPDATE known SET weight = 'x'", "a value is of another type"),
        ("UPDATE known SET weight = NULL", "a value is of another type"),
        ("UPDATE known SET weight = 1e999", "a value is of another type"),
        ("UPDATE known SET attempts = 'x'", "a value is of another type"),
        ("UPDATE artifacts SET data = 5", "its checksum does not fit"),
        ("UPDATE artifacts SET meta = x'00'", "its checksum does not fit"),
        ("UPDATE artifacts SET digest = NULL", "its checksum does not fit"),
    ],
)
def test_tables_and_values_of_another_make_are_refused(tmp_path, change, message):
    store = ArtifactStore("q", path=tmp_path / "q.db")
    store.add({"x": 1})
    store.close()
    database = sqlite3.connect(tmp_path / "q.db")
    database.executescript(change)
    database.close()
    with pytest.raises(ValueError, match=message):
        ArtifactStore("q", path=tmp_path / "q.db").add({"x": 2})


def test_a_journal_that_names_another_file_deletes_nothing(tmp_path):
    """SQLite deletes the second file of a rollback journal, whatever file that is."""
    path, other = tmp_path / "q.db", tmp_path / "other"
    store = ArtifactStore("q", path=path)
    store.add({"x": 1})
    store.close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = DELETE")
    database.close()
    other.write_text("mine" * 999)
    mark, page, name = bytes.fromhex("d9d505f920a163d7"), 4096, str(other).encode()
    head = mark + struct.pack(">5I", 0, 1, path.stat().st_size // page, 512, page)
    tail = struct.pack(">I", 0x40000000 // page + 1) + name + struct.pack(">2I", len(name), sum(name)) + mark
    (tmp_path / "q.db-journal").write_bytes(head.ljust(512, b"\0") + tail)
    with pytest.raises(ValueError, match=r"its journal, .* names another file"):
        ArtifactStore("q", path=path).add({"x": 2})
    assert other.exists()
