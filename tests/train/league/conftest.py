"""Short runs of Kuhn poker with a league."""

from __future__ import annotations

import pytest

from turnwise.run.build import build_run
from turnwise.train.validate import config_from_dict

from ...trained import kuhn


def settings_of(folder, **changes):
    settings = {
        "task_options": {"max_tokens": 6}, "warm_start": {"steps": 50, "batch_size": 12, "warmup": 5, "lr": 1e-2},
        "rollout": {"prompts_per_step": 8, "check_private": True}, "update": {"lr": 1e-4}, "checkpoint": {"every": 1},
        "league": {"share": 0.5, "every": 2, "size": 2, "opponents_per_step": 2},
    }  # fmt: skip
    return kuhn(folder, **{**settings, **changes})


@pytest.fixture
def settings(tmp_path, narrow_model):
    return lambda name="run", **changes: settings_of(tmp_path / name, **changes)


@pytest.fixture
def make_run(tmp_path, narrow_model):
    return lambda name="run", **changes: build_run(config_from_dict(settings_of(tmp_path / name, **changes)))
