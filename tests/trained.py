"""Two small finished runs for all tests that only read one, and what runs are compared by.

``team`` is sudoku in trees of two actors, ``games`` is Kuhn poker with a league. Each is made once per test session,
whatever the number of workers. A test that changes a folder takes a copy of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SMALL: dict[str, Any] = {
    "steps": 2,
    "threads": 1,
    "health": {"start_questions": 0},  # these models know nothing yet
    "warm_start": {"steps": 3, "batch_size": 8},
    "rollout": {"prompts_per_step": 2, "branches": 2},
    # A model that was hardly taught ties every group: rules that compare would train nothing.
    "credit": {"rule": "constant"},
    "update": {"lr": 1e-3},
    "eval": {"num_prompts": 3},
    "checkpoint": {"every": 1, "keep_last": 2},
}
"""Settings for short runs of a test's own."""

TEAM: dict[str, Any] = {
    "steps": 3,
    "task_options": {"blanks": [1, 1]},
    "warm_start": {"steps": 60, "batch_size": 16, "lr": 4e-3},
    "rollout": {"prompts_per_step": 2, "branches": 4, "tree": {"select": "best"}},
    "update": {"lr": 1e-3},
    "eval": {"every": 1, "num_prompts": 6},
    "checkpoint": {"every": 1, "keep_last": 3, "keep_best": True},
}
GAMES: dict[str, Any] = {
    "task": "kuhn_poker",
    "steps": 4,
    "task_options": {"max_tokens": 6},
    "warm_start": {"steps": 60, "batch_size": 16, "warmup": 5, "lr": 1e-2},
    "rollout": {"prompts_per_step": 6},
    "update": {"lr": 1e-4},
    "eval": {"num_prompts": 6},
    "checkpoint": {"every": 2},
    "league": {"share": 0.34, "every": 1, "size": 2},
}
# A rule with a state that gives each call an advantage of its own, and a record of all episodes.
BOTH: dict[str, Any] = {
    "threads": 1,
    "health": {"start_questions": 0},
    "credit": {"rule": "rae"},
    "log": {"rollouts_per_step": 1000, "progress": False},
}


def kuhn(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a short run of Kuhn poker, without a warm start."""
    settings = {
        "task": "kuhn_poker",
        "run_dir": str(folder),
        "steps": 3,
        "threads": 1,
        "task_options": {"max_tokens": 4},
    }
    settings |= {"rollout": {"prompts_per_step": 4}, "update": {"lr": 1e-3}, "health": {"start_questions": 0}}
    return {**settings, **changes}


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder and config, and what the process that trained it had at the end."""

    folder: Path
    config: Any  # TrainConfig
    evaluation: Any  # Evaluation
    weights: dict[str, Any]
    best_step: int | None


def made_once(factory: pytest.TempPathFactory, name: str, settings: dict[str, Any]) -> Trained:
    """Train the run ``name``, or wait until another worker has."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained" / name
    folder.parent.mkdir(exist_ok=True)
    facts = folder.with_suffix(".pickle")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not facts.exists():
            from turnwise.run.build import train_from_config
            from turnwise.train.validate import config_from_dict

            run = train_from_config(config_from_dict({**BOTH, **settings, "run_dir": str(folder)}))
            weights, best = weights_of(run.trainer), run.trainer.progress.best_step
            facts.write_bytes(pickle.dumps(Trained(folder, run.config, run.evaluate(), weights, best)))
            run.close()
    return pickle.loads(facts.read_bytes())


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory, narrow: Callable[[], AbstractContextManager[None]]) -> Trained:
    with narrow():
        return made_once(tmp_path_factory, "team", TEAM)


@pytest.fixture(scope="session")
def games(tmp_path_factory: pytest.TempPathFactory, narrow: Callable[[], AbstractContextManager[None]]) -> Trained:
    with narrow():
        return made_once(tmp_path_factory, "games", GAMES)


# ---- comparing -------------------------------------------------------------------------------------------------------
def rows_of(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / name).read_text(encoding="utf-8").splitlines()]


def lines_of(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """What a run wrote to a file, without timings."""
    timed = re.compile(r"(hook_)?seconds[_/]|user_code/|.*_seconds?$|.*inference/")  # an actor may be the "second"
    return [{key: value for key, value in row.items() if not timed.match(key)} for row in rows_of(run_dir, name)]


def weights_of(trainer: Any, policy: str = "default") -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in trainer.policies[policy].weights()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if both have the same tensors, bit for bit."""
    import torch

    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def notes_of(trainer: Any) -> list[str]:
    """The list of what ``trainer`` tells from now on."""
    notes: list[str] = []
    trainer.log.note = notes.append
    return notes


def save_tiny(folder, texts="0123456789 grid", **sizes):
    """A small model on disk with a tokenizer that is the same for equal ``texts``."""
    from turnwise.tasks.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer([texts] * 3, vocab_size=270)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 1024, **sizes}
    build_model(tokenizer, **sizes).save_pretrained(folder)
    return str(folder)
