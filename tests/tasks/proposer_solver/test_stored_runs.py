"""Runs whose solved problems stand in a file, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.arena import ArtifactStore
from turnwise.replay.replay import replay
from turnwise.run.build import build_run
from turnwise.run.checks import dry_run
from turnwise.tasks.proposer_solver.episodes import STORE
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict

NO_WARM_START = {"steps": 0}


def run_of(folder: Path, store: Path | None, **changes):
    options = {"attempts": 4, "numbers": 2, "largest": 4, "quality": 1.0}
    settings = {
        "task": "proposer_solver", "run_dir": str(folder), "steps": 4, "threads": 1,
        "health": {"start_questions": 0},
        "task_options": options if store is None else {**options, "store_path": str(store)},
        "warm_start": {"steps": 120, "batch_size": 24, "lr": 4e-3}, "update": {"lr": 1e-4}, "eval": {"num_prompts": 1},
        "rollout": {"prompts_per_step": 8, "group_size": 2}, "credit": {"rule": "hierarchy"},
        "checkpoint": {"every": 2}, "log": {"rollouts_per_step": 99, "progress": False},
    }  # fmt: skip
    return build_run(config_from_dict({**settings, **changes}))


def stored(run):
    return [(item.id, item.data, item.weight, item.source, item.meta) for item in run.arena.stores[STORE]]


def finished(run):
    """Its problems, once it has trained and its file is closed."""
    run.train()
    found = stored(run)
    run.arena.stores[STORE].close()
    return found


def examples(folder: Path, step: int) -> list[tuple[str, str]]:
    """What was shown to each proposer of a step, and what its artifact had."""
    rows = map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines())
    return [(row["extras"]["example"], row["artifact"]["example"]) for row in rows if row["step"] == step]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A whole run: its folder, its file, its problems."""
    folder = tmp_path_factory.mktemp("first")
    return folder, folder / "pool" / "solved.db", finished(run_of(folder / "run", folder / "pool" / "solved.db"))


@pytest.mark.slow
def test_the_next_run_begins_with_what_the_last_one_solved(first, tmp_path):
    folder, path, whole = first
    problems = {problem for _, problem, *_ in whole}
    shown = examples(folder / "run", 1)
    assert len(shown) == 16 and all(example == own for example, own in shown), "in an empty store there is nothing"
    second = run_of(tmp_path / "second", path, seed=1, steps=2)
    assert second.arena.stores[STORE].preexisting_ids == {id for id, *_ in whole}
    after = finished(second)
    runs = {item.id: item.run for item in ArtifactStore(STORE, path=path)}
    by_first, by_second = ({runs[id] for id, *_ in some} for some in (whole, after[len(whole) :]))
    assert [run.partition("@")[0] for run in (*by_first, *by_second)] == ["run", "second"], "one name each"
    assert after[: len(whole)] == whole and len(after) > len(whole) and len({id for id, *_ in after}) == len(after)
    shown = examples(tmp_path / "second", 1)
    assert any(example in problems and example != own for example, own in shown), "from its first step on"
    for row in map(json.loads, (tmp_path / "second" / "rollouts.jsonl").read_text().splitlines()):
        assert replay(tmp_path / "second", row["id"]).divergence is None


def test_without_a_path_each_run_begins_with_nothing(tmp_path):
    run = run_of(tmp_path / "run", None, warm_start=NO_WARM_START)
    assert run.arena.stores[STORE].path is None and not run.arena.stores[STORE].preexisting_ids


def test_a_dry_run_makes_no_file_and_others_are_refused(tmp_path):
    config = run_of(tmp_path / "run", None, warm_start=NO_WARM_START).config
    options = {**config.task_options, "store_path": str(tmp_path / "none.db")}
    assert "none.db" in dry_run(config.model_copy(update={"task_options": options}))
    assert not (tmp_path / "none.db").exists()
    ArtifactStore("questions", path=tmp_path / "other.db").close()
    with pytest.raises(ValueError, match="holds the store 'questions', not 'solved'"):
        run_of(tmp_path / "run", tmp_path / "other.db", warm_start=NO_WARM_START)
    with pytest.raises((ConfigError, ValueError), match="store_path=''"):
        config_from_dict({"task": "proposer_solver", "task_options": {"store_path": ""}})
        run_of(tmp_path / "run", Path(), task_options={"store_path": ""})
