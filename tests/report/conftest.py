"""A real short run to report on, and a run folder with a single hand-made episode."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ..trained import Trained
from .hand_made import hand_made


@pytest.fixture
def made_run(tmp_path) -> Path:
    """A run folder with one hand-made episode, and without a config."""
    hand_made(tmp_path / "made", 1)
    return tmp_path / "made"


# Made once, before any file's browser: Playwright's event loop lasts as long as the browser, and allows no second.
@pytest.fixture(scope="session")
def real_run(tmp_path_factory, team: Trained) -> Path:
    """The files of the team's run, and then the hand-made episode."""
    folder = tmp_path_factory.mktemp("runs") / "sudoku"
    shutil.copytree(team.folder, folder, ignore=shutil.ignore_patterns("checkpoints", "policies"))
    hand_made(folder, 4)
    return folder
