"""The program that runs a command, ends it and watches what it uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple

import pytest

from turnwise.integrations.gateway.process import supervisor

NOTHING = supervisor.Held([])


def test_a_command_ends_after_its_seconds_whoever_is_left():
    options = {"grace": 1.0, "seconds": 0.2}
    run = [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(options), "sleep", "60"]
    assert subprocess.run(run, check=False, timeout=50).returncode == 128 + 9


def test_a_folder_is_measured_below_no_link(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "big").write_bytes(bytes(1 << 20))
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    above = supervisor.Folder(str(folder))
    (folder / "inner").rmdir()
    (folder / "inner").symlink_to(tmp_path / "other")  # between the search and the look into it
    with pytest.raises(OSError):
        supervisor.Folder("inner", above)
    assert supervisor.disk_beyond(str(folder), NOTHING, 1 << 19, 10) == ""
    assert "more disk than disk_gb=" in supervisor.disk_beyond(str(tmp_path), NOTHING, 1 << 19, 10)
    assert "more files than max_files=2" in supervisor.disk_beyond(str(tmp_path), NOTHING, 1 << 30, 2)


def test_a_full_file_system_ends_a_command(tmp_path, monkeypatch):
    system = namedtuple("System", "f_bavail f_blocks f_frsize f_files f_ffree")
    for free, blocks, ends in ((300_000, 10**9, False), (200_000, 10**9, True), (100, 2000, False), (99, 2000, True)):
        monkeypatch.setattr(os, "statvfs", lambda path, free=free, blocks=blocks: system(free, blocks, 4096, 0, 0))
        problem = supervisor.disk_beyond(str(tmp_path), NOTHING, 1 << 30, 10)
        assert ("almost none left" in problem) == ends, (free, blocks)
