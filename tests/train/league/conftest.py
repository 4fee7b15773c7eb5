"""Short runs of Kuhn poker with a league."""

from __future__ import annotations

import pytest

from turnwise.run.build import build_run
from turnwise.train.validate import config_from_dict


def settings_of(folder, **changes):
    return {
        "task": "kuhn_poker", "run_dir": str(folder), "steps": 3, "threads": 1, "task_options": {"max_tokens": 6},
        "health": {"start_questions": 0},
        "warm_start": {"steps": 50, "batch_size": 12, "warmup": 5, "lr": 1e-2},
        "rollout": {"prompts_per_step": 8, "check_private": True}, "update": {"lr": 1e-4},
        "checkpoint": {"every": 1}, "log": {"rollouts_per_step": 100},
        "league": {"share": 0.5, "every": 2, "size": 2, "opponents_per_step": 2}, **changes,
    }  # fmt: skip


@pytest.fixture
def settings(tmp_path, narrow_model):
    return lambda name="run", **changes: settings_of(tmp_path / name, **changes)


@pytest.fixture
def make_run(tmp_path, narrow_model):
    return lambda name="run", **changes: build_run(config_from_dict(settings_of(tmp_path / name, **changes)))
