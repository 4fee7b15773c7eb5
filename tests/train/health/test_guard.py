"""The guard in short runs: windows, warnings with advice, and what a checkpoint keeps of it."""

from __future__ import annotations

import pytest

from turnwise.run.build import build_run
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.config.toml import ConfigError
from turnwise.train.health.signals import Sums
from turnwise.train.validate import config_from_dict

from ...trained import equal, kuhn, lines_of, notes_of, rows_of, weights_of

pytestmark = pytest.mark.usefixtures("narrow_model")

ALWAYS = 1e9
"""A threshold that entropy always falls below."""


@pytest.fixture
def make_run(tmp_path):
    def make(name="run", *, threshold=ALWAYS, window=2, signal="entropy", steps=4, **changes):
        health = {"start_questions": 0, "window": window, "signals": {signal: {"threshold": threshold}}}
        settings = {"steps": steps, "checkpoint": {"every": 1, "keep_last": 1}, "credit": {"rule": "rae"}, **changes}
        return build_run(config_from_dict(kuhn(tmp_path / name, health=health, **settings)))

    return make


def test_a_full_window_is_judged_and_warned_of_once(make_run):
    run = make_run(window=2)
    notes = notes_of(run.trainer)
    run.train()
    rows = rows_of(run.config.run_dir)
    assert [row["health/unhealthy"] for row in rows] == [0, 1, 1, 1], "once there are two steps; seat 1 never acts"
    assert "health/entropy/player0" not in rows[0]
    entropies = [row["health/entropy/player0"] for row in rows[1:]]
    assert all(2 < value < 8 for value in entropies), "an untrained model's, of a few hundred tokens"
    (warning,) = [note for note in notes if "unhealthy entropy of player0" in note]
    assert warning.startswith("step 2:") and warning.endswith("begin again with a lower update.lr (now 0.001)")
    # The window is a mean over its steps.
    run = make_run("other", window=3, steps=1)
    guard = run.trainer.callbacks["health"]
    guard._recent["entropy"] = {"x": [Sums(1, 1.0), Sums(2, 5.0), Sums(1, 2.0)], "y": [Sums(1, 1.0)]}
    metrics, unhealthy = guard._judge()
    assert metrics == {"health/entropy/x": 2.0} and set(unhealthy) == {("entropy", "x")}


def test_the_last_healthy_checkpoint_stays_and_the_warning_names_it(make_run):
    run = make_run(window=1, steps=4, threshold=0.0, league={"share": 0.25})
    guard, notes = run.trainer.callbacks["health"], notes_of(run.trainer)
    judge = guard.signals["entropy"].judge
    guard.signals["entropy"].judge = lambda window, first: (
        "ill" if run.trainer.progress.step > 2 else judge(window, first)
    )
    run.train()
    assert guard.healthy_step == 2
    assert [path.name[-1] for path in list_checkpoints(run.trainer.checkpoints)] == ["2", "4"]
    (warning,) = [note for note in notes if "unhealthy" in note]
    assert f"under {run.trainer.checkpoints} after step 2, the last healthy one, and resume with" in warning
    assert warning.endswith("a lower update.lr (now 0.001) or a larger league.share (now 0.25)")


def test_a_resumed_run_equals_one_left_alone(make_run):
    """Windows, warnings, the league's pool and its seats continue."""
    settings = {"league": {"every": 2, "size": 2, "share": 0.25}, "log": {"rollouts_per_step": 9}}
    whole = make_run("whole", steps=5, **settings)
    whole.train()
    for steps in (1, 3, 5):
        parts = make_run("parts", steps=steps, **settings)
        parts.train()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert lines_of(whole.config.run_dir, name) == lines_of(parts.config.run_dir, name)
    assert len(lines_of(parts.config.run_dir, "warnings.jsonl")) == len(
        lines_of(whole.config.run_dir, "warnings.jsonl")
    )
    assert equal(weights_of(whole.trainer), weights_of(parts.trainer))
    for name, callback in whole.trainer.callbacks.items():
        assert callback.state_dict() == parts.trainer.callbacks[name].state_dict(), name
    first, second = (run.trainer.callbacks["league"] for run in (whole, parts))
    assert first.seating.state_dict() == second.seating.state_dict()
    assert [member.step for member in first.pool.members] == [2, 4], "every 2 steps, and two stay"
    assert any("league" in row["meta"] for row in rows_of(whole.config.run_dir, "rollouts.jsonl"))


@pytest.mark.parametrize(
    ("signals", "message"),
    [
        ({"entrpy": {}}, "did you mean 'entropy'"),
        ({"entropy": {"actions": {}}}, "unknown config key 'health.signals.entropy.actions'; known: threshold"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(tmp_path, signals, message):
    with pytest.raises(ConfigError, match=message):
        build_run(config_from_dict(kuhn(tmp_path, health={"signals": signals})))


def test_a_signal_that_measures_nothing_says_so(make_run):
    run = make_run(signal="seat_skew", threshold=0.1, steps=1, league={"share": 1.0})
    notes = notes_of(run.trainer)
    run.train()
    assert "health: signal 'seat_skew' finds nothing to measure in this task" in notes, (
        "all games were against the past"
    )
