"""The status of a run, from its files alone."""

from __future__ import annotations

import json
import os
import socket

import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.report.status import duration, read_status
from turnwise.train.checkpoint.listing import EXPORTED, mark_exported
from turnwise.train.log.run_log import RunLog
from turnwise.train.run_lock import LOCK

from .hand_made import HOSTILE, cluster_run

START = 1_700_000_000.0


def at(path, time):
    os.utime(path, (time, time))


def holds(folder, pid, host=None):
    """Make ``pid`` the process that writes ``folder``."""
    told = {"pid": pid, "host": host or socket.gethostname(), "since": "2023-11-14 22:13:20 UTC"}
    (folder / LOCK).write_text(json.dumps(told))


def saved(folder, step, time):
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"step": step}))
    at(path / "manifest.json", time)


@pytest.fixture
def run_dir(tmp_path):
    """A run on a cluster, 5 seconds after its third step; another host's process writes it."""
    folder = tmp_path / "sudoku"
    folder.mkdir()
    (folder / "config.toml").write_text("steps = 5\n")
    cluster_run(folder, START)
    at(folder / "metrics.jsonl", START + 115)
    holds(folder, 77, "another-host")
    saved(folder, 1, START + 21)
    saved(folder, 3, START + 72)
    (folder / "logs").mkdir()
    (folder / "logs" / "engine-main-0.log").write_text("ready\n")
    at(folder / "logs" / "engine-main-0.log", START + 113.5)
    return folder


def test_a_run_on_a_cluster_by_hand(run_dir):
    status = read_status(run_dir, START + 120)
    assert (status.run, status.state, status.step, status.steps) == ("sudoku", "running", 3, 5)
    assert status.process == "process 77 on another-host, since 2023-11-14 22:13:20 UTC"
    assert status.step_age == 5.0
    assert status.seconds_per_step == 12.0, "the median of 12 and 38 to the next step, and 10 for the last one"
    assert status.parts == {"rollout": 8.0, "update": 3.0, "sync": 0.5, "rest": 3.0}
    assert (status.checkpoint, status.checkpoint_age) == (3, 48.0)
    assert (status.epoch, status.versions) == (6, {"default": (1, 3)})
    roles = {role.name: role for role in status.roles}
    assert list(roles) == ["engine-main-0", "engine-main-1", "rank-0", "worker-0"]
    engine = roles["engine-main-0"]
    assert (engine.state, engine.node, engine.restarts, engine.pid) == ("running", "n2", 1, 55)
    assert (engine.last_event, engine.event_age, engine.log_age) == ("restarted", 75.0, 6.5)
    assert (engine.address, engine.versions) == ("http://10.0.0.2:41231", {"default": 3})
    assert roles["engine-main-1"].state == "died" and roles["engine-main-1"].detail == HOSTILE
    assert roles["rank-0"].log_age is None
    assert status.warnings == [
        f"engine-main-1 died 15 s ago and did not restart ({HOSTILE.strip()})",
        "engine-main-1 serves version 1 of default, others 3",
    ]


def test_a_late_step_is_a_warning(run_dir):
    """Five times the usual 12 seconds are 60, which are also the least."""
    assert not any("no step" in text for text in read_status(run_dir, START + 115 + 60).warnings)
    told = read_status(run_dir, START + 115 + 61).warnings
    assert told[0] == "no step for 1 min 1 s, 5 x the usual 12 s"
    (run_dir / LOCK).write_text("")
    late = read_status(run_dir, START + 115 + 61)
    assert late.state == "stopped" and late.warnings == [], "a run that has ended is not late, nor are its engines"
    (run_dir / "warnings.jsonl").write_text(json.dumps({"step": 1, "warning": "w" * 500}) + "\n")
    assert f"step 1: {'w' * 199}… (the newest of 1 " in read_status(run_dir, START + 120).warnings[-1]


def test_exported_policies_tell_their_step(run_dir, capsys):
    for name, step in (("one", 2), ("two", 3)):
        (run_dir / "policies" / name).mkdir(parents=True)
        (run_dir / "policies" / name / EXPORTED).write_text(json.dumps({"step": step}))
    assert cli.main(["status", str(run_dir)]) == EXIT_OK
    assert "checkpoint step 3, " in (shown := capsys.readouterr().out) and "policies/  step 2\n" in shown
    mark_exported(run_dir, ["one", "two", "gone"], None)  # as an export begins, which may be killed
    assert read_status(run_dir).exported is None
    (run_dir / "policies" / "one" / EXPORTED).write_text("[]")
    assert cli.main(["status", str(run_dir)]) == EXIT_USAGE
    assert EXPORTED in capsys.readouterr().err


def test_a_process_that_was_killed_is_told(run_dir):
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    holds(run_dir, gone)
    status = read_status(run_dir, START + 1000)
    assert status.state == "killed" and f"process {gone} on " in status.warnings[0]
    assert not any("no step" in text for text in status.warnings)
    holds(run_dir, os.getpid())
    assert read_status(run_dir, START + 116).state == "running"


def test_an_embedded_run(made_run):
    status = read_status(made_run)
    assert (status.state, status.step, status.steps, status.roles) == ("stopped", 1, None, [])
    assert (status.seconds_per_step, status.checkpoint, status.warnings) == (None, None, [])
    log = RunLog(made_run, 3)
    for step, rollout in ((2, 4.0), (3, 6.0), (4, 5.0)):
        log.step(step, {"seconds_rollout": rollout, "seconds_update": 1.0})
    log.warn(4, "no sample trains")
    (made_run / "config.toml").write_text("steps = 4\n")
    status = read_status(made_run)
    assert (status.state, status.seconds_per_step, status.parts) == ("finished", 6.0, {"rollout": 5.0, "update": 1.0})
    assert status.warnings == ["step 4: no sample trains (the newest of 1 in warnings.jsonl)"]


def test_a_run_that_has_only_begun(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("steps = 7\n")
    status = read_status(tmp_path)
    assert (status.state, status.step, status.step_age) == ("not started", 0, None)
    holds(tmp_path, os.getpid())
    assert read_status(tmp_path).state == "running"
    assert cli.main(["status", str(tmp_path / "none")]) == EXIT_USAGE
    assert "no run folder, expected one with config.toml" in capsys.readouterr().err


def test_only_the_end_of_a_long_record_is_read(made_run):
    log = RunLog(made_run, 500)
    for step in range(2, 200):
        log.step(step, {"seconds_rollout": 1.0, "seconds_update": float(step > 150)})
    lines = (made_run / "metrics.jsonl").read_bytes()
    (made_run / "metrics.jsonl").write_bytes(b"never read\n" + lines + b'{"step": 200, "sec')
    status = read_status(made_run)
    assert (status.step, status.seconds_per_step) == (199, 2.0)
    (made_run / "metrics.jsonl").write_bytes(lines + b"a bad line\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, .*expected a JSON object with a step"):
        read_status(made_run)


def test_the_table_and_the_json(run_dir, capsys):
    (run_dir / "cluster" / "events.jsonl").open("a").write(
        json.dumps({"time": START, "event": "died", "role": "rank-9", "detail": "[bold]\x1b[31m red\nsecond"}) + "\n"
    )
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    assert cli.main(["status", str(run_dir)]) == EXIT_OK
    text = capsys.readouterr().out
    assert "sudoku: running, process 77 on another-host" in text and "step       3 of 5, " in text
    assert "a step: rollout 8.0 s, update 3.0 s, sync 0.50 s, rest 3.0 s" in text
    assert "checkpoint step 3, " in text and "served     default versions 1 to 3" in text
    [row] = [line.split() for line in text.splitlines() if line.strip().startswith("engine-main-0")]
    assert row[1:5] == ["n2", "running", "1", "restarted,"]
    assert "warning: engine-main-1 died" in text
    assert "[bold][31m red" in text and "\x1b" not in text and "second" not in text
    assert cli.main(["status", str(run_dir), "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["versions"], found["roles"][0]["restarts"]) == (3, {"default": [1, 3]}, 1)
    assert sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*")) == before, "it changes nothing"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.84, "0.84 s"), (4.21, "4.2 s"), (42.4, "42 s"), (60, "1 min"), (185, "3 min 5 s"), (3600, "1 h"),
     (7620, "2 h 7 min"), (90_000, "1 d 1 h")],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text
