"""A real short run to report on, and a run folder with a single hand-made episode."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.run.build import train_from_config
from turnwise.train.validate import config_from_dict

from .hand_made import hand_made


@pytest.fixture
def made_run(tmp_path) -> Path:
    """A run folder with one hand-made episode, and without a config."""
    hand_made(tmp_path / "made", 1)
    return tmp_path / "made"


# Made once, before any file's browser: Playwright's event loop lasts as long as the browser, and allows no second.
@pytest.fixture(scope="session")
def real_run(tmp_path_factory, narrow) -> Path:
    """The folder of a real run: the tiny model on sudoku trees, three steps, and then the hand-made episode."""
    folder = tmp_path_factory.mktemp("runs") / "sudoku"
    settings = {
        "run_dir": str(folder),
        "steps": 3,
        "threads": 1,
        "health": {"start_questions": 0},
        "warm_start": {"steps": 40, "batch_size": 16, "lr": 4e-3},
        "rollout": {"prompts_per_step": 3, "branches": 4, "max_tokens": 24, "tree": {"select": "best"}},
        "update": {"lr": 1e-4},
        # After so few demonstrations all branches may be equally bad. The steps must still have an update to show.
        "filter": {"drop_zero_advantage": False},
        "eval": {"every": 1, "num_prompts": 3},
    }
    with narrow():
        train_from_config(config_from_dict(settings))
    hand_made(folder, 4)
    return folder
