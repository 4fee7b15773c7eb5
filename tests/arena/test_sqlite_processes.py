"""Stores in files that several processes write to, one of which may be killed at any time."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading

import pytest

from turnwise.arena import ArtifactStore

from .test_sqlite import contents, reopened, through_json

# -- kills -------------------------------------------------------------------------------------------------------------
WRITER = """
    import sys
    from contextlib import nullcontext
    from turnwise.arena import ArtifactStore

    shared = len(sys.argv) > 3
    store = ArtifactStore("q", path=sys.argv[1], max_size=50, dedup=True, shared=shared)
    who = sys.argv[2]
    for number in range(100_000):
        with store.transaction() if shared else nullcontext():  # the other may add 50 in between
            added = store.add({"by": who, "n": number}, weight=number)
            store.record(added.id, 1.0)
        print(added.id, flush=True)
"""


def start(*arguments):
    command = [sys.executable, "-P", "-c", textwrap.dedent(WRITER), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_sigkill_in_the_middle_of_writes_loses_nothing_that_was_told(tmp_path):
    path, told = tmp_path / "q.db", []
    rng = random.Random(7)
    for life in range(3):
        process = start(path, life)
        for _ in range(rng.randint(1, 200)):
            told.append((life, process.stdout.readline().strip()))
        process.send_signal(signal.SIGKILL)
        told += [(life, line.strip()) for line in process.stdout if line.endswith("\n")]
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        with sqlite3.connect(path) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        database.close()
        store = ArtifactStore("q", path=path, max_size=50, dedup=True)
        assert store.count() == min(50, store._contents.added)
        mine = [(a.data["by"], a.data["n"]) for a in store if a.data["by"] == str(life)]
        assert mine == [(str(life), n) for n in range(mine[0][1], mine[-1][1] + 1)], "no gap, and none twice"
        last = told[-1][1]
        # What was being written at the kill is there or not, but not half: an added one has its weight.
        assert [a.id for a in store][-2:].count(last) == 1 and store.outcome(last).attempts == 1
        assert all(a.weight == a.data["n"] for a in store)
        store.close()
    assert len({id for _, id in told}) == len(told)


def test_a_resumed_run_knows_what_was_there_before_it_first_began(tmp_path):
    first = ArtifactStore("q", path=tmp_path / "q.db")
    assert first.preexisting_ids == frozenset()
    for word in "xyz":
        first.add(word)
    assert first.preexisting_ids == frozenset(), "what a run adds itself is not"
    first.remove("q-1")
    run = reopened(first)
    assert run.preexisting_ids == run.frozen().preexisting_ids == {"q-0", "q-2"}
    run.add("of the run")
    state = through_json(run.state_dict())
    run.add("undone")
    resumed = reopened(run)
    assert resumed.preexisting_ids == {"q-0", "q-2", "q-3", "q-4"}, "until it is told whose run it is"
    resumed.load_state_dict(state)
    assert resumed.preexisting_ids == {"q-0", "q-2"} and [a.id for a in resumed] == ["q-0", "q-2", "q-3"]
    resumed.prune_revisions_before(state)
    again = reopened(resumed)
    again.load_state_dict(through_json(resumed_state := again.state_dict() | {"begun": state["begun"]}))
    assert again.preexisting_ids == {"q-0", "q-2"} and resumed_state["begun"] < resumed_state["revision"]
    del state["begun"]  # as versions before saved it
    again.load_state_dict(state)
    assert again.preexisting_ids == frozenset() and ArtifactStore("memory").preexisting_ids == frozenset()


# -- more than one process ---------------------------------------------------------------------------------------------
def test_a_second_writer_is_refused_and_readers_are_not(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db")
    store.add("x")
    other = ArtifactStore("q", path=tmp_path / "q.db")
    for write in (lambda: other.add("y"), other.state_dict, lambda: other.record("q-0", 1.0)):
        with pytest.raises(OSError, match=r"another run writes to this file.*shared=True"):
            write()
    assert [a.data for a in other] == ["x"]
    store.add("z")
    assert [a.data for a in other] == ["x", "z"] and other.get("q-1").data == "z"
    store.close()
    assert other.add("y").id == "q-2"


def test_processes_that_share_a_file_see_each_other(tmp_path):
    a, b = (ArtifactStore("q", path=tmp_path / "q.db", shared=True, dedup=True, max_size=3) for _ in range(2))
    assert a.add("x").id == "q-0" and b.add("y").id == "q-1"
    assert a.add("y") is None and b.add("x") is None
    b.set_weight("q-0", 5.0)
    b.record("q-0", 1.0)
    assert a.get("q-0").weight == 5.0 and a.outcome("q-0").attempts == 1
    b.remove("q-0")
    assert "q-0" not in a and a.add("x").id == "q-2"
    for word in "uvw":
        b.add(word)
    assert [item.data for item in a] == ["u", "v", "w"]
    assert contents(a) == contents(b)


def test_two_processes_write_at_once_and_nothing_is_lost(tmp_path):
    path = tmp_path / "q.db"
    processes = [start(path, who, "shared") for who in "ab"]
    told = {who: [] for who in "ab"}

    def listen(who, process):
        for _ in range(150):
            told[who].append(process.stdout.readline().strip())

    listeners = [threading.Thread(target=listen, args=pair) for pair in zip("ab", processes, strict=True)]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join()
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
    ids = [id for who in "ab" for id in told[who]]
    assert len(set(ids)) == len(ids) == 300
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = {id: json.loads(data) for id, data in database.execute("SELECT id, data FROM artifacts")}
    database.close()
    for who in "ab":
        assert [rows[id] for id in told[who]] == [{"by": who, "n": n} for n in range(150)]


def test_going_back_leaves_what_others_did_and_says_so(tmp_path):
    mine, theirs = (ArtifactStore("q", path=tmp_path / "q.db", shared=True) for _ in range(2))
    mine.add("before")
    state = mine.state_dict()
    mine.add("mine")
    theirs.add("theirs")
    mine.close()
    resumed = ArtifactStore("q", path=tmp_path / "q.db", shared=True)
    with pytest.warns(UserWarning, match="1 changes by other runs since the checkpoint stay"):
        resumed.load_state_dict(state)
    assert [a.data for a in resumed] == ["before", "theirs"] == [a.data for a in theirs]
    assert resumed.add("again").id == "q-3", "no id twice"


def test_without_sharing_what_others_did_is_never_undone(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db")
    store.add("x")
    state = store.state_dict()
    store.close()
    other = ArtifactStore("q", path=tmp_path / "q.db")
    other.add("theirs")
    other.close()
    store = ArtifactStore("q", path=tmp_path / "q.db")
    with pytest.raises(ValueError, match="1 changes by other runs came after it and would be lost"):
        store.load_state_dict(state)
    assert [a.data for a in store] == ["x", "theirs"]


def test_a_run_that_is_resumed_twice_at_once_stops_the_first(tmp_path):
    store = ArtifactStore("q", path=tmp_path / "q.db", shared=True)
    store.add("x")
    state = store.state_dict()
    store.add("y")
    second = ArtifactStore("q", path=tmp_path / "q.db", shared=True)
    second.load_state_dict(state)
    with pytest.raises(RuntimeError, match="another process resumed this run, and took back what this one wrote"):
        store.add("z")
    assert [a.data for a in second] == ["x"]


def test_a_forked_process_must_open_the_store_again(tmp_path, monkeypatch):
    store = ArtifactStore("q", path=tmp_path / "q.db")
    store.add("x")
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="opened in another process: open the store again"):
        store.add("y")


def test_processes_that_open_a_new_file_at_once_wait_for_each_other(tmp_path):
    """SQLite's own waiting does not cover the switch to a write-ahead log."""
    program = """
        import sys
        from turnwise.arena import ArtifactStore

        print(flush=True)
        for number in range(40):
            sys.stdin.readline()
            store = ArtifactStore("q", path=f"{sys.argv[1]}/{number}.db", shared=True)
            store.add({"n": number})
            store.close()
            print(number, flush=True)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(program), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    openers = [subprocess.Popen(command, **pipes) for _ in range(4)]
    assert [opener.stdout.readline() for opener in openers] == ["\n"] * 4
    for number in range(40):
        for opener in openers:
            opener.stdin.write("\n")
            opener.stdin.flush()
        assert [opener.stdout.readline() for opener in openers] == [f"{number}\n"] * 4
    assert [opener.wait() for opener in openers] == [0] * 4
    for opener in openers:
        opener.stdin.close()
        opener.stdout.close()
