"""What spoils a run without failing it is told once, with its cause, wherever a user may look."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.arena import Filters
from turnwise.run.build import build_run
from turnwise.train.health.watch import CAUSES, PATIENCE
from turnwise.train.log.lines import read_metrics
from turnwise.train.validate import config_from_dict

pytestmark = pytest.mark.usefixtures("narrow_model")


def warnings_of(trainer):
    return [(row["step"], row["warning"]) for row in read_metrics(trainer.config.run_dir, "warnings.jsonl")]


def pay(trainer, worth):
    """Let each step of ``trainer``'s game earn ``worth(state)``."""
    trainer.arena.episodes["letters"].step_reward = lambda state, arena, artifact: worth(state)


async def test_a_run_of_tied_groups_says_so_once_and_everywhere(make_trainer, capsys):
    trainer = make_trainer(steps=3)
    pay(trainer, lambda state: 0.0)
    await trainer.run()
    rows = read_metrics(trainer.config.run_dir)
    calls = 3 * 2 * 4
    assert [(row["samples"], row["dropped/equal_rewards"]) for row in rows] == [(0, calls)] * 3
    assert [(row["samples/first"], row["samples/second"]) for row in rows] == [(0, 0)] * 3
    told = (
        f"no sample trains: {calls} calls were dropped, {calls} equal_rewards. equal_rewards: the call earned the same"
    )
    warning, *diagnosed = warnings_of(trainer)
    assert warning[0] == 1 and warning[1].startswith(told) and "pay for partial success" in warning[1]
    told = [(step, text.partition(" and ")[0]) for step, text in diagnosed]
    assert told == [(3, f"actor {actor!r}: 100% of its groups tie") for actor in ("first", "second")]
    assert capsys.readouterr().out.replace("\n", " ").count("no sample trains") == 1


FLAT, SMALL = "its gradient is 0; are all advantages 0?", "is update.lr too small for its dtype?"


@pytest.mark.parametrize(("lr", "why"), [(3e-3, FLAT), (1e-60, SMALL)])
async def test_an_update_without_a_gradient_is_told_from_one_that_is_too_small(make_trainer, lr, why):
    trainer = make_trainer(steps=2, update={"lr": lr})
    trainer.arena.filters = Filters(drop_zero_advantage=False)
    if lr > 1e-9:
        pay(trainer, lambda state: 0.0)
    await trainer.run()
    flat = "no sample has an advantage, so none trains on its reward: 24 equal_rewards"
    told = warnings_of(trainer)
    assert told[-1] == (1, f"policy 'default': an update changed no weight; {why}")
    assert [text.startswith(flat) for _, text in told[:-1]] == [True] * (lr > 1e-9)


async def test_the_reader_of_a_relay_never_trains(make_trainer):
    """Both act on one text, and only the second's steps are paid: the first's branches always tie."""
    trainer = make_trainer(steps=PATIENCE + 1)
    pay(trainer, lambda state: state.data["share"] if state.current_actor == "second" else 0.0)
    await trainer.run()
    rows = read_metrics(trainer.config.run_dir)
    assert all(row["samples/first"] == 0 and row["dropped/equal_rewards"] >= 12 for row in rows)
    assert any(row["samples/second"] for row in rows)
    ((step, warning),) = [row for row in warnings_of(trainer) if "no sample of actor" in row[1]]
    assert step == PATIENCE and "actor 'first' trained in the last 5 steps" in warning
    assert f"{12 * PATIENCE} calls were dropped, {12 * PATIENCE} equal_rewards" in warning
    assert "rollout.tree.select = 'none'" in warning


async def test_whoever_trains_now_and_then_is_not_warned_of(make_trainer):
    trainer = make_trainer(steps=PATIENCE + 2)
    pay(trainer, lambda state: state.data["share"] if trainer.progress.step == 2 else 0.0)
    await trainer.run()
    assert sum(row["samples/first"] for row in read_metrics(trainer.config.run_dir)) > 0
    assert not any("no sample of actor" in warning for _, warning in warnings_of(trainer))


async def test_frozen_seats_and_other_phases_are_no_matter(make_two_policies):
    """The rival's policy is frozen, so that none of its samples trains is as it should be. Then the learner's tie."""
    trainer = make_two_policies("run", PATIENCE + 1)
    pay(trainer, lambda state: state.data["share"] if state.current_actor == "first" else 0.0)
    await trainer.run()
    rows = read_metrics(trainer.config.run_dir)
    assert all("samples/second" not in row and row["dropped/not_trainable"] == 12 for row in rows)
    assert not any("'second'" in warning for _, warning in warnings_of(trainer))
    other = make_two_policies("tied", 1)
    pay(other, lambda state: state.data["share"] if state.current_actor == "second" else 0.0)
    await other.run()
    ((_, warning),) = warnings_of(other)
    assert warning.startswith("no sample trains: 12 calls were dropped"), (
        "the rival's rows are in the batch all the same"
    )


def test_most_samples_lost_is_told_once_per_cause(make_trainer, random_batch):
    """Except for questions that others stand in for, and for ties, which a diagnosis tells."""
    trainer, batch, told = make_trainer(), random_batch(0, 9), []
    replaced = {"not_trainable", "over_quota", "resample", "equal_rewards"}
    for cause in sorted(replaced | CAUSES.keys()):
        for lost in (9, 10, 30):
            batch.drops = {("first", cause): lost - 3, ("second", cause): 3}
            trainer.watch.samples(batch, {"default"})
            if lost == 10 and cause not in replaced:
                told.append(f"10 of 19 samples were dropped, 10 {cause}. {cause}: the call {CAUSES[cause]}")
            assert [text for _, text in warnings_of(trainer)] == told
    assert len(told) > 9
    trainer.watch.samples(batch, {})
    assert [text for _, text in warnings_of(trainer)] == [*told, "no sample trains: no actor that trains acted"]


@pytest.mark.parametrize(("minibatches", "advice"), [(4, "lower update.lr"), (1, "there was one update")])
async def test_ratios_that_explode_name_policy_value_and_rate(make_trainer, minibatches, advice):
    """At 0.3 a few updates make tokens hundreds of times as likely; with a single one the samples must be stale."""
    update = {"lr": 0.3, "num_minibatches": minibatches, "ppo_epochs": minibatches, "max_nonfinite_updates": 99}
    trainer = make_trainer(steps=2, update=update)
    if minibatches == 1:
        trainer.watch.updates(trainer.policies["default"], {"ratio_max": 20.0, "updates": 1})
        assert warnings_of(trainer) == [], "the bound itself is within"
        trainer.watch.updates(trainer.policies["default"], {"ratio_max": 20.5, "updates": 1})
    else:
        await trainer.run()
    (warning,) = [text for _, text in warnings_of(trainer) if "ratio_max" in text]
    assert (
        warning.startswith("policy 'default': a token is ") and "at learning rate 0.3" in warning and advice in warning
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_a_move_that_was_cut_off_loses_and_trains_as_lost(tmp_path, seed):
    """An untrained model is cut off in nearly every move, and an unreadable move loses the game. It once trained on
    none of them, so that being cut off cost nothing."""
    run = build_run(
        config_from_dict(
            {
                "task": "kuhn_poker", "run_dir": str(tmp_path), "threads": 1, "seed": seed,
                "task_options": {"max_tokens": 4}, "rollout": {"prompts_per_step": 8}, "log": {"progress": False},
            }
        )
    )  # fmt: skip
    batch = asyncio.run(run.arena.step())
    steps = [step for result in run.arena.last_results for step in result.rollout.steps]
    cut = [step for step in steps if step.finish_reason == "length"]
    assert len(cut) > len(steps) / 2 and len(batch) == len(steps) and batch.dropped == {}
    assert all(step.advantage < 0 for step in cut)
