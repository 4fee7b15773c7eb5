"""One process writes a run folder, and none buries what another one left."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import socket

import pytest

from turnwise.cli import main as cli
from turnwise.run import build as run_module
from turnwise.run.build import train_from_config
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.run_folder import RECORDS
from turnwise.train.run_lock import LOCK, RunLock, check_not_running

from ..trained import notes_of


def holder_of(folder):
    """The id of a process that holds the folder until it is killed."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        RunLock(folder).__enter__()
        os.write(tell, b"held")
        signal.pause()
    assert os.read(told, 4) == b"held"
    return pid


def left_by(folder, **holder):
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps({"pid": 7, "host": socket.gethostname(), "since": "noon", **holder}))


def test_the_second_process_is_told_of_the_first_and_a_killed_one_holds_nothing(tmp_path):
    first = holder_of(tmp_path)
    told = rf"run_dir=.*: expected .* but process {first} on host .*, since 20\d\d-.* UTC, does\. Wait"
    with pytest.raises(ValueError, match=told), RunLock(tmp_path):
        pass
    with pytest.raises(ValueError, match=f"process {first}"):
        check_not_running(tmp_path.parent)
    with pytest.raises(ValueError, match=f"process {first}"):
        train_from_config(TrainConfig(run_dir=tmp_path))
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    with RunLock(tmp_path) as lock:
        assert lock.note is None and f'"pid": {os.getpid()}' in (tmp_path / LOCK).read_text()
    assert (tmp_path / LOCK).read_text() == ""


async def test_a_second_trainer_of_one_process_is_refused_and_changes_nothing(make_trainer):
    first, second = make_trainer(steps=2, checkpoint={"every": 1}), make_trainer(steps=2)
    update, refused = first.update, []

    def watched(batch):
        before = {path: path.read_bytes() for path in first.config.run_dir.rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match=f"process {os.getpid()}"):
            second.lock.__enter__()
        assert before == {path: path.read_bytes() for path in first.config.run_dir.rglob("*") if path.is_file()}
        refused.append(batch)
        return update(batch)

    first.update = watched
    await first.run()
    assert len(refused) == 2
    assert (await second.run()).step == 2, "the lock went with the first"


async def test_what_the_lock_can_not_rule_out_is_said(make_trainer, monkeypatch):
    elsewhere = make_trainer("elsewhere", steps=0)
    left_by(elsewhere.config.run_dir, host="other")
    notes = notes_of(elsewhere)
    await elsewhere.run()
    assert any("process 7 on host 'other', since noon, wrote" in note for note in notes)

    def unable(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unable)
    unlocked = make_trainer("unlocked", steps=0)
    left_by(unlocked.config.run_dir, pid=os.getpid())
    notes = notes_of(unlocked)
    await unlocked.run()
    (note,) = (note for note in notes if "can't be locked" in note)
    assert "(No locks available)" in note and f"process {os.getpid()} on host" in note


def test_a_child_that_outlives_its_run_is_not_taken_for_it(tmp_path):
    with RunLock(tmp_path):
        left_by(tmp_path, pid=2**22 + 1)
        with pytest.raises(ValueError, match=r"a process that process 4194305 on host .* started before it ended does"):
            RunLock(tmp_path).__enter__()
    # The lock counts and is let go on failure.
    lock = RunLock(tmp_path)
    with pytest.raises(KeyError), lock, lock:
        raise KeyError
    with RunLock(tmp_path):
        pass


async def test_records_without_a_checkpoint_are_refused_and_stay(make_trainer, tmp_path, monkeypatch):
    """They were wiped: a run whose checkpoints were moved away began again over its own log."""
    monkeypatch.setattr(run_module, "load_models", lambda *_, **__: pytest.fail("models were loaded"))
    folder = tmp_path / "run"
    folder.mkdir()
    for kept, resume in itertools.product(RECORDS, (True, False)):
        (folder / kept).write_text("{}\n")
        told = rf"{kept} hold the records of a run, and .* has no checkpoint to resume from\. Choose"
        with pytest.raises(ConfigError, match=told):
            await make_trainer("run", steps=2, resume=resume).run()
        with pytest.raises(ConfigError, match=told):
            train_from_config(TrainConfig(run_dir=folder, resume=resume))
        assert (folder / kept).read_text() == "{}\n"
        (folder / kept).unlink()
    assert (await make_trainer("run", steps=1).run()).step == 1


async def test_a_run_that_goes_on_says_what_it_ignores_and_whose_it_is(make_trainer, capsys):
    """``eval`` said that the policy doesn't fit the checkpoint of a program with an arena of its own."""
    trainer = make_trainer(steps=1)
    await trainer.run()
    shutil.copytree(trainer.checkpoints / "step_00000001", trainer.checkpoints / "step_00000009.bak")
    second = make_trainer(steps=2)
    notes = notes_of(second)
    assert (await second.run()).step == 2
    assert any("step_00000009.bak is ignored: its name is not 'step_' and eight digits" in note for note in notes)
    assert (trainer.checkpoints / "step_00000009.bak" / "manifest.json").is_file()
    for command in ("eval", "replay", "tournament"):
        assert await asyncio.to_thread(cli.main, [command, str(trainer.config.run_dir)]) == 2
        told = capsys.readouterr().err
        assert "is of type 'letters', which task 'sudoku' of" in told and "its own arena ran it. Make it" in told
