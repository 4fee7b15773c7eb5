"""Folders that an untrusted program has filled: what is read of them, and that they are removed whatever is in them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from turnwise.integrations.gateway.process import folder as folders
from turnwise.integrations.gateway.process.folder import _Removal, read_regular, regular_files, remove_tree

from .test_program import PROGRAM, play_program

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="agents as processes need a POSIX system")


def nest(top: Path, depth: int) -> None:
    """Make folders in each other, deeper than a path may be long."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(top)
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Path("answer.txt").write_text("deep")
    finally:
        os.fchdir(here)
        os.close(here)


@pytest.fixture
def top(tmp_path):
    """A folder that may hold what pytest itself can't remove."""
    top = tmp_path / "top"
    top.mkdir()
    yield top
    if top.exists():
        subprocess.run(["chmod", "-R", "u+rwx", top], check=True)
        subprocess.run(["rm", "-rf", top], check=True)


def fill(top: Path) -> None:
    nest(top, 1100)
    os.mkfifo(top / "pipe")
    (top / "link").symlink_to("/")
    (top / "gone").symlink_to("nowhere")
    (top / "locked" / "inner").mkdir(parents=True)
    (top / "locked" / "inner" / "file").write_text("x")
    (top / "locked").chmod(0)
    (top / "d" / "other" / "d").mkdir(parents=True)


def test_a_folder_is_removed_whatever_is_in_it(tmp_path, top):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    fill(top)
    (top / "out").symlink_to(outside)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remove_tree(top)
    assert not top.exists() and (outside / "kept").exists()


def test_removal_never_raises_and_says_what_is_left(tmp_path, monkeypatch):
    (tmp_path / "top" / "a").mkdir(parents=True)
    (tmp_path / "top" / "file").write_text("x")

    def refuses(*_, **__):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "unlink", refuses)
    with pytest.warns(UserWarning, match="top: is left behind: .*not permitted"):
        remove_tree(tmp_path / "top")
    with pytest.warns(UserWarning, match="none: is left behind"):
        remove_tree(tmp_path / "none")


def test_removal_changes_nothing_behind_a_link(tmp_path):
    (tmp_path / "other").mkdir(mode=0o755)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "other")  # it was a folder when it was found
    problems: list[str] = []
    top = os.open(tmp_path / "folder", os.O_RDONLY)
    _Removal(top, problems).enter("link")
    os.close(top)
    assert problems and (tmp_path / "other").stat().st_mode & 0o777 == 0o755


def test_files_are_found_without_recursion_links_and_pipes(top):
    fill(top)
    (top / "a.txt").write_text("a")
    (top / "sub" / "more").mkdir(parents=True)
    (top / "sub" / "more" / "b.txt").write_text("b" * 20)
    (top / "sub" / "c.txt").symlink_to("/etc/passwd")
    os.mkfifo(top / "sub" / "d.txt")
    found = dict(regular_files(top, ["**/*.txt", "", "pipe", "link/*"], 10))
    assert found == {"a.txt": b"a", "sub/more/b.txt": b"b" * 10}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: os.mkfifo(path), ValueError),
        (lambda path: path.symlink_to("/dev/zero"), OSError),
        (lambda path: path.mkdir(), (ValueError, OSError)),
        (lambda path: None, FileNotFoundError),
    ],
    ids=["pipe", "link", "folder", "nothing"],
)
def test_only_regular_files_are_read(tmp_path, make, error):
    path = tmp_path / "result.json"
    make(path)
    with pytest.raises(error):
        read_regular(path, 10)


def test_of_a_sparse_file_only_a_part_is_read(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(3 << 30)
    assert read_regular(tmp_path / "sparse", 100) == bytes(100)


DEEP = """
for _ in range(1100):
    os.mkdir("d")
    os.chdir("d")
"""


def test_what_a_program_leaves_fails_no_episode_and_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    rollout, [extras] = play_program(tmp_path, {"text": "x"}, PROGRAM + DEEP, collect=["**/answer.txt"])
    assert rollout.error is None and rollout.rewards == {"solver": 1.0}, rollout.error
    assert extras["files"] == {"answer.txt": "4"} and list((tmp_path / "tmp").iterdir()) == []

    def refuses(*_, **__):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(folders.os, "rmdir", refuses)
    with pytest.warns(UserWarning, match="is left behind"):
        rollout, _ = play_program(tmp_path, {"text": "x"})
    assert rollout.error is None and rollout.rewards == {"solver": 1.0}, rollout.error
