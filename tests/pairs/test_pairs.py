"""Every two settings of different features in one tiny run: what the package accepts trains, with all invariants.

:mod:`.features` is the table. `allpairspy` makes rows that hold every pair. Settings that the package refuses beside
others leave their row; each pair that is then in no row is tried alone, and is refused too or gets a row. Rows on two
ranks, and those that are killed, run in processes of their own (:mod:`.processes`).
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from turnwise.arena.stages.registry import STAGES
from turnwise.arena.stages.registry import classes as stage_classes
from turnwise.replay.replay import replay
from turnwise.run.build import train_from_config
from turnwise.run.checks import task_of
from turnwise.run.parts import build_stages
from turnwise.train.terms.registry import TERMS, terms_on
from turnwise.train.terms.registry import classes as term_classes
from turnwise.train.validate import config_from_dict

from ..config_keys import choices_of, keys_of
from .features import FEATURES, config_of, default_of, is_elsewhere, keys_in, set_by
from .invariants import differences, frozen, of_training, quiet, sums, written
from .processes import killed
from .rows import FIRST, Row, accepted, alone, covering, drawn, of_pairs_that_left, refusal

pytestmark = pytest.mark.usefixtures("narrow_model")

PARTS = 24
"""Tests that share the rows, so that several processes can run them."""


# -- One process -------------------------------------------------------------------------------------------------------
def broken(row: Row, folder: Path) -> str:
    """Run a row, resume it as if killed, and return the first invariant that does not hold; empty if all do."""
    config = config_from_dict(config_of(row) | {"run_dir": str(folder)})
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run = train_from_config(config)
    except Exception as error:
        return f"accepted, and fails: {type(error).__name__}: {error}"
    for problem in [*sums(folder), *frozen(run, config)]:
        return problem
    if config.log.record_for_replay and (different := replay(folder, "e0").divergence):
        return f"a replay differs: {different}"
    if config.loop.max_staleness and not config.loop.deterministic:
        return ""
    # A kill after the first checkpoint: what the second step wrote is there, but its checkpoint is not.
    whole = written(folder)
    killed(folder)
    try:
        train_from_config(config)
    except Exception as error:
        return f"fails when it resumes: {type(error).__name__}: {error}"
    return "".join(differences(whole, written(folder), "a resumed run"))


def smallest(row: Row, folder: Path) -> Row:
    """The settings of a broken row that break it."""
    for name in reversed(row):
        fewer = {key: value for key, value in row.items() if key != name}
        if row[name] == FIRST[name] or (not refusal(fewer) and broken(fewer, folder)):
            row = fewer
    return row


# -- Tests -------------------------------------------------------------------------------------------------------------
def parts(number: int, in_ci: int) -> list[object]:
    """Numbers of parts, of which every ``in_ci``-th runs in CI too."""
    return [pytest.param(n, marks=[pytest.mark.representative] if n % in_ci == 1 else []) for n in range(number)]


def all_broken(rows: Sequence[Row], folder: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(row, why) for row in rows if (why := broken(row, folder))]
        return [f"{smallest(row, folder)}: {why}" for row, why in found]


@pytest.mark.slow
@pytest.mark.parametrize("part", parts(PARTS, 6))
def test_every_two_settings_train_together(part: int, tmp_path: Path) -> None:
    rows = [accepted(row) for row in covering()[part::PARTS]]
    assert not (failed := all_broken(rows, tmp_path / "run")), "\n".join(failed)


@pytest.mark.slow
def test_pairs_that_left_their_rows_train_together(tmp_path: Path) -> None:
    """A row of many settings loses some that the package refuses, and with them pairs that it accepts."""
    assert not (failed := all_broken(of_pairs_that_left(), tmp_path / "run")), "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_an_evaluation_changes_nothing_of_the_training(part: int, tmp_path: Path) -> None:
    """Nor do records, signals, and checkpoints in between."""
    failed, watched, unwatched = [], tmp_path / "watched", tmp_path / "unwatched"
    rows = [accepted(row) for row in covering() if row["validation"] != FIRST["validation"]][part::16]
    for row in rows:
        if row["loop"] == "clock":
            continue
        for folder, config in ((watched, config_of(row)), (unwatched, quiet(config_of(row)))):
            shutil.rmtree(folder, ignore_errors=True)
            train_from_config(config_from_dict(config | {"run_dir": str(folder)})).close()
        failed += [f"{row}: {different}" for different in of_training(watched, unwatched)]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_settings_train_together(part: int, tmp_path: Path) -> None:
    """Three and more settings that no row of pairs holds, other ones each time. A failure names its seed."""
    seed = int(os.environ.get("PAIRS_SEED", random.SystemRandom().randrange(10**9)))
    failed = all_broken(drawn(seed, 24), tmp_path / "run")
    assert not failed, f"PAIRS_SEED={seed}\n" + "\n".join(failed)


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
            "'rollout.tree.select' = 'first': episode 'pair_tasks:agent' gives single",
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


@cache
def values_alone() -> dict[str, Row | None]:
    """A row with each value, as few other values beside it as the package accepts; ``None`` if it accepts none."""
    pairs = [(name, value) for name, each in FEATURES.items() for value in each]
    return {f"{name} = {value}": (alone(name, value) or (None,))[0] for name, value in pairs}


def test_each_value_is_accepted_beside_some_task() -> None:
    """A key that joins by itself (``by_keys``) may need a value that means something: then it needs a line too."""
    assert not [name for name, row in values_alone().items() if row is None]


def test_every_key_and_choice_is_of_a_feature_or_says_why_not() -> None:
    """A new section, key or choice of a key needs a line in FEATURES, or one in ELSEWHERE."""
    fragments = [config_of({}), *(each for values in FEATURES.values() for each in values.values())]
    chosen = {f"{key} = {value}" for fragment in fragments for key, value in set_by(fragment).items()}
    missing = keys_of().keys() - keys_in(FEATURES | {"base": {"base": config_of({})}})
    for key, kind in keys_of().items():
        missing |= {f"{key} = {choice}" for choice in choices_of(kind) if choice != default_of(key)} - chosen
    missing = {each for each in missing if not is_elsewhere(each) and not is_elsewhere(each.partition(" = ")[0])}
    assert not missing, f"no feature of tests/pairs/features.py sets {sorted(missing)}"


def test_every_term_and_stage_is_on_in_some_row() -> None:
    """A new one needs a feature that turns it on, unless a key does so that joins by itself."""
    configs = [config_from_dict(config_of(row)) for row in values_alone().values() if row is not None]
    terms = {term.name for config in configs for term in terms_on(config.loss)}
    terms |= {"teaching" for config in configs if config.distill.top_k}
    assert terms == {term.name for term in term_classes(TERMS)}
    stages = {stage.name for config in configs for stage in build_stages(config, task_of(config))}
    stages |= {stage.name for stage in stage_classes(STAGES) if stage.always}
    assert stages == {stage.name for stage in stage_classes(STAGES)}
