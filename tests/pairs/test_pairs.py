"""Every two settings of different features in one tiny run: what the package accepts trains, with all invariants.

:mod:`.features` is the table. `allpairspy` makes rows that hold every pair. Settings that the package refuses beside
others leave their row; each pair that is then in no row is tried alone, and is refused too or gets a row.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from pydantic import BaseModel

from turnwise.replay.replay import replay
from turnwise.run.build import train_from_config
from turnwise.run.checks import check_questions, resolve_config, task_of, tiny_model
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, Problems
from turnwise.train.validate import config_from_dict

from .features import ELSEWHERE, FEATURES, TASKS, config_of

PARTS = 12
"""Tests that share the rows, so that several processes can run them."""

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
FIRST = {name: next(iter(values)) for name, values in FEATURES.items()}
OF_TIME = re.compile(r"seconds|per_second|memory|/wait|busy|hit_rate|decoded_share|user_code")


@pytest.fixture(autouse=True)
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pair_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("pair_tasks", None)


# -- Rows --------------------------------------------------------------------------------------------------------------
def refusal(row: Row) -> str:
    """Why the package refuses the config of a row, as ``--dry-run`` does before it looks at models."""
    problems = Problems()
    try:
        config = config_from_dict(config_of(row))
        task = task_of(config)
        resolved, _ = resolve_config(config, task, problems)
        with problems.gathered():
            check_questions(resolved, task)
        problems.raise_any()
    except ConfigError as error:
        return str(error)
    return ""


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(sorted((FIRST | row).items()), 2))


def accepted(row: Row) -> Row:
    """The row without the settings that the package refuses: first those that an error names, then any."""
    while why := refusal(row):
        changed = [name for name in row if row[name] != FIRST[name]]
        named = [name for name in changed if any(_owns(key, why) for key in FEATURES[name][row[name]])]
        allowed = [name for name in named or changed if not refusal(row | {name: FIRST[name]})]
        name = (allowed or named or changed)[-1]
        row = row | {name: FIRST[name]}
    return row


def _owns(key: str, why: str) -> bool:
    return f"'{key}" in why or f"'{key.rpartition('.')[0]}'" in why or key in why


def cover() -> tuple[list[Row], set[Pair]]:
    """Return the rows that run, and the pairs that the package refuses."""
    names = list(FEATURES)
    made = [dict(zip(names, row, strict=True)) for row in AllPairs([list(FEATURES[name]) for name in names])]
    rows = [accepted(row) for row in made]
    every = {pair for row in made for pair in pairs_of(row)}
    left = every - {pair for row in rows for pair in pairs_of(row)}
    refused = {pair for pair in left if refusal(dict(pair))}
    left -= refused
    while left:
        row: Row = {}
        for pair in sorted(left):
            both = dict(pair)
            if all(row.get(name, value) == value for name, value in both.items()) and not refusal(row | both):
                row |= both
        left -= pairs_of(row)
        rows.append(row)
    return rows, refused


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> list[Row]:
    """All rows, which the first of several processes makes."""
    path = tmp_path_factory.getbasetemp().parent / f"pairs-{testrun_uid}.json"
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.stat().st_size:
            folder = tmp_path_factory.mktemp("modules")
            (folder / "pair_tasks.py").write_text(TASKS)
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(str(folder))
                file.write(json.dumps(cover()[0]))
            sys.modules.pop("pair_tasks", None)
        file.seek(0)
        found: list[Row] = json.loads(file.read())
    return found


# -- One run -----------------------------------------------------------------------------------------------------------
def broken(row: Row, folder: Path) -> str:
    """Run a row, kill and resume it, and return the first invariant that does not hold; empty if all do."""
    config = config_from_dict(config_of(row) | {"run_dir": str(folder)})
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run = train_from_config(config)
    except Exception as error:
        return f"accepted, and fails: {type(error).__name__}: {error}"
    for problem in [*_metrics(folder), *_frozen(run, config)]:
        return problem
    if config.log.record_for_replay and (different := replay(folder, "e0").divergence):
        return f"a replay differs: {different}"
    if config.loop.max_staleness and not config.loop.deterministic:
        return ""
    # A kill after the first checkpoint: what the second step wrote is there, but its checkpoint is not.
    whole = _written(folder)
    shutil.rmtree(folder / "checkpoints" / "step_00000002")
    for name in ("policies", "held_out.json", "report.html"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    try:
        train_from_config(config)
    except Exception as error:
        return f"fails when it resumes: {type(error).__name__}: {error}"
    again = _written(folder)
    different = [name for name in whole.keys() | again.keys() if whole.get(name) != again.get(name)]
    return f"a resumed run differs in {sorted(different)[:5]}" if different else ""


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _metrics(folder: Path) -> Iterator[str]:
    calls: dict[int, int] = {}
    for record in _lines(folder, "rollouts.jsonl"):
        calls[record["step"]] = calls.get(record["step"], 0) + _calls(record)
    sampled, trained = 0, [row for row in _lines(folder, "metrics.jsonl") if "samples" in row]
    if [row["step"] for row in trained] != [1, 2]:
        yield f"metrics of steps {[row['step'] for row in trained]}"
    for row in trained:
        wrong = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        if wrong:
            yield f"{wrong[0]} = {row[wrong[0]]}"
        of_actors = sum(value for key, value in row.items() if re.fullmatch(r"samples/[^/]+", key))
        dropped = sum(value for key, value in row.items() if re.fullmatch(r"dropped/[^/]+", key))
        if row["samples"] != of_actors:
            yield f"samples = {row['samples']}, and {of_actors} of actors"
        if row["samples"] + dropped != calls.get(row["step"], 0):
            yield f"{row['samples']} samples and {dropped} dropped, of {calls.get(row['step'], 0)} calls"
        sampled += row["sampled_tokens"]
        if row["total_sampled_tokens"] != sampled:
            yield f"total_sampled_tokens = {row['total_sampled_tokens']}, expected {sampled}"
    said = [(each["step"], each["warning"]) for each in _lines(folder, "warnings.jsonl")]
    if twice := [one for one in said if said.count(one) > 1]:
        yield f"warned of twice: {twice[0]}"


def _calls(record: dict[str, Any]) -> int:
    own = sum(step["actor_id"] is not None for step in record["steps"])
    return own + sum(map(_calls, record["children"]))


def _frozen(run: Any, config: TrainConfig) -> Iterator[str]:
    """A policy that does not train has the weights of the start."""
    start = [each.detach() for each in tiny_model(config, run.task)[1].parameters()]
    for name in ("ice", "big"):
        if (policy := run.trainer.policies.get(name)) is not None:
            for weight in policy.model.parameters():
                if not any(weight.shape == each.shape and torch.equal(weight.float().cpu(), each) for each in start):
                    yield f"weights of the frozen policy {name!r} changed"
                    return


def _written(folder: Path) -> dict[str, Any]:
    """What a run wrote that no clock changes: weights, optimizers, metrics by step, episodes."""
    found: dict[str, Any] = {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in [*folder.glob("policies/*/*.safetensors"), *folder.glob("checkpoints/step_00000002/*.safetensors")]
    }
    for row in _lines(folder, "metrics.jsonl"):
        found |= {f"{row['step']}: {key}": value for key, value in row.items() if not OF_TIME.search(key)}
    return found | {"rollouts": (folder / "rollouts.jsonl").read_bytes()}


def smallest(row: Row, folder: Path) -> Row:
    """The settings of a broken row that break it."""
    for name in reversed(row):
        fewer = {key: value for key, value in row.items() if key != name}
        if row[name] == FIRST[name] or (not refusal(fewer) and broken(fewer, folder)):
            row = fewer
    return row


# -- Tests -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.representative] if part % 4 == 1 else []) for part in range(PARTS)],
)
def test_every_two_settings_train_together(rows: list[Row], part: int, tmp_path: Path) -> None:
    failed = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows[part::PARTS]:
            if why := broken(row, tmp_path / "run"):
                failed.append(f"{smallest(row, tmp_path / 'run')}: {why}")
    assert not failed, "\n".join(failed)


def test_each_value_alone_is_accepted_beside_some_task() -> None:
    alone = {
        f"{name}.{value}": refusal({name: value})
        for name, values in FEATURES.items()
        for value in values
        if all(refusal({name: value, "task": task, **help}) for task in FEATURES["task"] for help in HELPS)
    }
    assert not alone


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"credit": "gdpo", "kl": "reward"},
            "'loss.kl.apply_to' = 'reward': has no effect, as advantages of the rule 'gdpo'",
        ),
        (
            {"credit": "constant", "kl": "reward"},
            "'loss.kl.apply_to' = 'reward': has no effect, as advantages of the rule",
        ),
        ({"credit": "constant", "reward": "mix"}, "'reward.alpha' = 0.5: has no effect, as advantages of the rule"),
        ({"teacher": "model", "policies": "frozen", "kl": "reward"}, "learn from their teachers alone"),
        (
            {"teacher": "top_k", "policies": "frozen", "baseline": "critic"},
            "'loss.critic': has no effect, as all actors",
        ),
        ({"teacher": "model", "policies": "frozen", "baseline": "token"}, "'loss.baseline': has no effect"),
        (
            {"task": "agent", "tree": "first"},
            "'rollout.tree.select' = 'unset': episode 'pair_tasks:agent' gives single",
        ),
        ({"policies": "adapters", "kl": "refresh"}, "the reference of the adapter 'policies.solver' is its base"),
        ({"baseline": "critic", "layout": "padded"}, "'update.sequence_layout' = 'padded': a value head"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(row: Row, words: str) -> None:
    assert words in refusal(row)


@pytest.mark.parametrize(
    "row", [{"teacher": "model", "kl": "reward"}, {"teacher": "reward", "policies": "frozen", "baseline": "critic"}]
)
def test_a_teacher_beside_an_actor_that_is_paid_is_accepted(row: Row) -> None:
    assert not refusal(row)


def test_an_agent_that_calls_an_actor_twice_replays(tmp_path: Path) -> None:
    assert not broken({"task": "agent"}, tmp_path / "run")


HELPS: list[Row] = [{}, {"tree": "first"}, {"masks": "rejection"}, {"teacher": "model"}]


def keys_of(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """The dotted keys of a section and of those in it; a table of sections counts as one with the name ``NAME``."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        is_table = str(getattr(field.annotation, "__origin__", "")) == "<class 'dict'>"
        key = f"{before}{name}" + (".NAME" if inner and is_table else "")
        yield from keys_of(inner, key + ".") if inner else [key]


def test_every_key_is_of_a_feature_or_says_why_not() -> None:
    """A new section or key needs a line in FEATURES, or one in ELSEWHERE."""
    config = config_of({})
    fragments = [config, *(each for values in FEATURES.values() for each in values.values())]
    set_here = {key for fragment in fragments for key in _dotted(fragment)}
    elsewhere = tuple(key for keys in ELSEWHERE.values() for key in keys)
    missing = [
        key
        for key in keys_of(TrainConfig)
        if not any(re.fullmatch(re.escape(key).replace("NAME", r"[^.]+") + r"(\..*)?", each) for each in set_here)
        and not any(key == each or key.startswith(each + ".") for each in elsewhere)
    ]
    assert not missing, f"no feature of tests/pairs/features.py sets {missing}"


def _dotted(values: dict[str, Any], before: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield before + key
        if isinstance(value, dict):
            yield from _dotted(value, f"{before}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _dotted(value[0], f"{before}{key}.")
