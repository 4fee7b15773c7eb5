"""The guard in short runs: windows, warnings, each action, and what a checkpoint keeps of it."""

from __future__ import annotations

import pytest

from turnwise.run.build import build_run
from turnwise.train.checkpoint.checkpoint import checkpoint_at, list_checkpoints
from turnwise.train.config.toml import ConfigError
from turnwise.train.health import Sums
from turnwise.train.league.league import MARK
from turnwise.train.validate import config_from_dict

from ...trained import equal, kuhn, lines_of, notes_of, rows_of, weights_of

pytestmark = pytest.mark.usefixtures("narrow_model")

ALWAYS = 1e9
"""A threshold that entropy always falls below."""


def settings_of(folder, **changes):
    checkpoint = {"every": 1, "keep_last": 1}
    return kuhn(folder, **{"steps": 4, "checkpoint": checkpoint, "credit": {"rule": "rae"}, **changes})


@pytest.fixture
def make_run(tmp_path):
    def make(name="run", *, actions=None, threshold=ALWAYS, window=2, signal="entropy", **changes):
        signals = {signal: {"threshold": threshold, "actions": actions or {}}}
        health = {"start_questions": 0, "window": window, "signals": signals}
        return build_run(config_from_dict(settings_of(tmp_path / name, health=health, **changes)))

    return make


def test_a_full_window_is_judged_and_the_first_warning_told(make_run):
    run = make_run(window=2)
    notes = notes_of(run.trainer)
    run.train()
    rows = rows_of(run.config.run_dir)
    assert [row["health/unhealthy"] for row in rows] == [0, 1, 1, 1], "once there are two steps; seat 1 never acts"
    assert "health/entropy/player0" not in rows[0]
    entropies = [row["health/entropy/player0"] for row in rows[1:]]
    assert all(2 < value < 8 for value in entropies), "an untrained model's, of a few hundred tokens"
    warnings = [note for note in notes if "unhealthy entropy of player0" in note]
    assert len(warnings) == 1 and warnings[0].startswith("step 2:")
    # The window is a mean over its steps.
    run = make_run("other", window=3, steps=1)
    guard = run.trainer.callbacks["health"]
    guard._recent["entropy"] = {"x": [Sums(1, 1.0), Sums(2, 5.0), Sums(1, 2.0)], "y": [Sums(1, 1.0)]}
    metrics, ill = guard._judged()
    assert metrics == {"health/entropy/x": 2.0} and set(ill) == {("entropy", "x")}


def test_roll_back(make_run):
    """Ill from the window's first judgement on: weights go back to the start, steps and questions go on."""
    run = make_run(actions={"restore_checkpoint": {}}, window=2, steps=2)
    start, notes = weights_of(run.trainer), notes_of(run.trainer)
    run.train()
    policy = run.trainer.policies["default"]
    assert equal(weights_of(run.trainer), start)
    assert not policy.optimizer.state_dict()["state"] and run.trainer.progress.step == 2
    assert policy.version == 3 == run.arena.client.version("default"), "published as a version of its own"
    assert run.arena.credit.state_dict()["baselines"] == []
    assert any("restore_checkpoint: weights and optimizers are those of step 0" in note for note in notes)
    steps = [path.name for path in list_checkpoints(run.trainer.checkpoints)]
    assert steps == [checkpoint_at(run.trainer.checkpoints, step).name for step in (0, 2)], "the healthy one stays"


def test_it_goes_back_to_the_last_healthy_checkpoint(make_run):
    run = make_run(actions={"restore_checkpoint": {}}, window=1, steps=4, threshold=0.0)
    guard, kept = run.trainer.callbacks["health"], {}
    judge = guard.signals["entropy"].judge

    def ill_at_the_end(window, first):
        return "ill" if run.trainer.progress.step == 4 else judge(window, first)

    guard.signals["entropy"].judge = ill_at_the_end
    record = run.trainer.record

    async def recorded(batch, metrics):
        await record(batch, metrics)
        kept[run.trainer.progress.step] = weights_of(run.trainer)

    run.trainer.record = recorded
    run.train()
    assert guard.healthy_step == 3
    assert equal(kept[4], kept[3]) and not equal(kept[3], kept[2])


@pytest.mark.parametrize(
    ("actions", "scale", "shares"),
    [
        ({"lower_learning_rate": {"factor": 0.25}}, 1 / 16, [0.25] * 5),
        ({"restore_checkpoint": {}, "lower_learning_rate": {}}, 0.25, [0.25] * 5),
        ({"increase_league_share": {"by": 0.25, "most": 0.625}}, 1.0, [0.25, 0.25, 0.5, 0.5, 0.625]),
    ],
)
def test_a_resumed_run_equals_one_left_alone(make_run, actions, scale, shares):
    """Steps 2 and 4 complete a window, which is judged and acted upon; windows begin anew in between."""
    league = {"every": 2, "size": 2, "share": 0.25}
    settings = {"actions": actions, "window": 2, "league": league, "log": {"rollouts_per_step": 9}}
    whole = make_run("whole", steps=5, **settings)
    whole.train()
    for steps in (1, 3, 5):
        parts = make_run("parts", steps=steps, **settings)
        parts.train()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert lines_of(whole.config.run_dir, name) == lines_of(parts.config.run_dir, name)
    assert equal(weights_of(whole.trainer), weights_of(parts.trainer))
    for name, callback in whole.trainer.callbacks.items():
        assert callback.state_dict() == parts.trainer.callbacks[name].state_dict(), name
    mine, theirs = (run.trainer.callbacks["league"] for run in (whole, parts))
    assert mine.seating.state_dict() == theirs.seating.state_dict()
    assert [member.step for member in mine.pool.members] == [2, 4], "every 2 steps, and two stay"
    assert any(MARK in row["meta"] for row in rows_of(whole.config.run_dir, "rollouts.jsonl"))
    for policy in (run.trainer.policies["default"] for run in (whole, parts)):
        assert policy.rate_scale == scale
        assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(scale * 1e-3)
    assert [row["league/share"] for row in rows_of(whole.config.run_dir)] == shares


@pytest.mark.parametrize(
    ("health", "checkpoint", "told"),
    [
        ({"signals": {"entrpy": {}}}, 1, "did you mean 'entropy'"),
        ({"signals": {"entropy": {"actions": {"pray": {}}}}}, 1, "'pray'"),
        (
            {"signals": {"entropy": {"actions": {"lower_learning_rate": {"factor": 2}}}}},
            1,
            r"expected a number in \(0, 1\)",
        ),
        ({"signals": {"entropy": {"actions": {"lower_learning_rate": {"by": 2}}}}}, 1, "lower_learning_rate.by"),
        ({"signals": {"entropy": {"actions": {"restore_checkpoint": {}}}}}, 0, "needs checkpoint.every > 0"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path, health, checkpoint, told):
    with pytest.raises(ConfigError, match=told):
        build_run(config_from_dict(settings_of(tmp_path, health=health, checkpoint={"every": checkpoint})))


def test_a_signal_that_measures_nothing_says_so(make_run):
    run = make_run(signal="seat_skew", threshold=0.1, steps=1, league={"share": 1.0})
    notes = notes_of(run.trainer)
    run.train()
    assert "health: signal 'seat_skew' finds nothing to measure in this task" in notes, (
        "all games were against the past"
    )
