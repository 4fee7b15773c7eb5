"""Every metric that a run writes is in the registry of names, of which docs/metrics.md is made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import turnwise
from turnwise.run.build import build_run
from turnwise.train.log.lines import read_metrics
from turnwise.train.log.names import GROUPS, metric_of, metrics, with_policy
from turnwise.train.validate import config_from_dict

from ..trained import SMALL

PACKAGE = Path(turnwise.__file__).parent
TABLES = Path(__file__).with_name("health") / "tables"
TEAM = {"task": "sudoku", "task_options": {"blanks": [1, 1]}, **SMALL, "warm_start": {"steps": 0}}
RUNS = {
    "critic": {**TEAM, "loss": {"critic": {"lr": 1e-4}}, "credit": {}},
    "kl": {**TEAM, "loss": {"kl": {"coef": 0.1}, "masks": {"off_policy": 0.1, "top_entropy": 0.5}}},
    "observations": {**TEAM, "loss": {"observation_coef": 0.1, "entropy_target": 0.1}},
    "curriculum": {**TEAM, "curriculum": {"sampling": "learnability", "pool": 8}, "credit": {"rule": "grpo"},
                   "rollout": {"prompts_per_step": 2, "group_size": 2}},
    "two models": {**TEAM, "policy_sharing": "model_per_actor", "reward": {"overlong_buffer": 2},
                   "credit": {"rule": "at_grpo"}},
    "playouts": {**TEAM, "rollout": {"prompts_per_step": 2, "branches": 2, "tree": {"playouts": 1}},
                 "credit": {"rule": "vine"}},
}  # fmt: skip


def unknown(names):
    return sorted({name for name in names if name != "step" and metric_of(name) is None})


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("narrow_model")
def test_tiny_runs_have_no_metric_that_is_not_on_the_page(name, tmp_path):
    config = config_from_dict({**RUNS[name], "run_dir": str(tmp_path / "run"), "steps": 1})
    run = build_run(config)
    run.train()
    run.close()
    (row,) = [row for row in read_metrics(config.run_dir) if row["step"]]
    assert unknown(row) == [] and len(row) > 40


def test_finished_runs_have_no_metric_that_is_not_on_the_page(team, games):
    """A tree that selects, validations, a league."""
    rows = [row for each in (team, games) for row in read_metrics(each.folder)]
    tables = [json.loads(line) for path in TABLES.glob("*.jsonl") for line in path.read_text().splitlines()[1:]]
    rows += [with_policy(row, "default") for row in tables]  # most of them once had no policy in their names
    assert unknown(name for row in rows for name in row) == []
    assert metric_of("made/up") is None and metric_of("truncated/solver").unit == "share"


def test_every_name_of_the_registry_is_in_the_code():
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "names.py")
    parts = {part for group in GROUPS for each in group.metrics for part in re.split(r"<\w+>|/", each.name) if part}
    assert sorted(part for part in parts if part not in code) == []


def test_names_are_listed_once_and_have_a_unit_or_none():
    names = [each.name for _, each in metrics()]
    assert len(set(names)) == len(names) > 100 and all(each.meaning and each.over for _, each in metrics())
