"""A step of self-play with the tiny model on each game: RAE, both seats in the batch, an evaluation from each seat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from turnwise.credit import RAECredit
from turnwise.run.build import build_run
from turnwise.run.checks import dry_run
from turnwise.tasks.two_player import SEATS, sample_policy, score_policy
from turnwise.train.config.toml import ConfigError
from turnwise.train.validate import config_from_dict, load_config

pytestmark = pytest.mark.usefixtures("narrow_model")

GAMES = {"kuhn_poker": 60, "negotiation": 120, "tic_tac_toe": 60}
"""How many steps of a warm start it takes until both seats mostly say something legal."""


def run_of(game, folder, **changes):
    settings = {
        "task": game, "run_dir": str(folder), "steps": 1, "threads": 1, "health": {"start_questions": 0},
        "warm_start": {"steps": GAMES[game], "batch_size": 12, "warmup": 5, "lr": 1e-2},
        "rollout": {"prompts_per_step": 16, "check_private": True},
        "eval": {"num_prompts": 8},
    }  # fmt: skip
    return build_run(config_from_dict({**settings, **changes}))


def train(run):
    """One step, and the batch that it trained on with the episodes behind it."""
    seen = []

    def assign_credit_and_pack(results):
        seen.append((type(run.arena).assign_credit_and_pack(run.arena, results), results))
        return seen[-1][0]

    run.arena.assign_credit_and_pack = assign_credit_and_pack
    progress = run.train()
    assert progress.step == 1 and len(seen) == 1
    return seen[0]


@pytest.mark.parametrize("game", ["kuhn_poker", "tic_tac_toe", pytest.param("negotiation", marks=pytest.mark.slow)])
def test_one_step_of_self_play_and_an_evaluation_from_each_seat(game, tmp_path):
    run = run_of(game, tmp_path)
    assert run.arena.check_private
    check_evaluation(run)
    weights = dict(run.trainer.policies["default"].model.named_parameters())
    before = {name: values.detach().clone() for name, values in weights.items()}
    batch, results = train(run)
    rewards = {actor: batch.rewards[batch.actor_index == index] for index, actor in enumerate(batch.actors)}
    assert set(rewards) == set(SEATS), "both seats' samples are in the batch"
    assert {np.sign(value) for value in batch.rewards} >= {-1.0, 1.0}
    for result in results:
        assert result.rollout.error is None
        assert result.rollout.rewards["player0"] == -result.rollout.rewards["player1"], "zero sum"
    both = [result.rollout for result in results if {step.actor_id for step in result.rollout.steps} == set(SEATS)]
    assert any(rollout.rewards["player0"] for rollout in both), "some games were decided after both had acted"
    assert np.array_equal(batch.advantages, batch.rewards), "the baselines of the first batch are 0"
    check_baselines(run.arena.credit, game, results)
    assert max(float((values.detach() - before[name]).abs().max()) for name, values in weights.items()) > 0


def check_baselines(credit, game, results):
    """After the batch each seat has its own: a twentieth of its mean reward over the games in which it acted."""
    assert isinstance(credit, RAECredit)
    for seat in SEATS:
        spoke = [
            result.rollout.rewards[seat]
            for result in results
            if any(step.actor_id == seat for step in result.rollout.steps)
        ]
        assert credit.baseline(game, seat) == pytest.approx(0.05 * np.mean(spoke), abs=1e-6)


def check_evaluation(run):
    baselines = run.arena.credit.state_dict()
    result = run.evaluate()
    assert result.episodes == 8 and result.failed == 0 and 0 <= result.low <= result.success <= result.high <= 1
    for metric in ("score", "legal", "readable"):
        assert {f"{metric}/{seat}" for seat in SEATS} <= set(result.metrics), "each seat has its own figure"
    assert result.success == pytest.approx((result.metrics["score/player0"] + result.metrics["score/player1"]) / 2)
    assert result == run.evaluate(), "greedy, with the opponent's luck from the requests"
    assert run.arena.credit.state_dict() == baselines


def test_a_tree_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"'rollout.branches' = 4: task 'kuhn_poker' is played to its end"):
        run_of("kuhn_poker", tmp_path, rollout={"branches": 4})


def test_the_tiny_models_exploitability_is_known_two_ways(tmp_path):
    run = run_of("kuhn_poker", tmp_path, warm_start={"steps": 150, "batch_size": 12, "warmup": 5, "lr": 1e-2})

    async def asked():
        scored = await score_policy(run.arena, run.task)
        return scored, await sample_policy(run.arena, run.task, samples=60)

    scored, sampled = asyncio.run(asked())
    noise = 5 * np.sqrt(0.25 / 60)
    # Sampling reads what scoring counts as another text, so the legal columns may only gain.
    assert np.all(sampled.table[:, :2] - scored.table[:, :2] < noise + scored.other[:, None])
    assert np.all(sampled.table[:, :2] - scored.table[:, :2] > -noise)
    assert scored.other.mean() < 0.5, "after the warm start it mostly answers in the plain form"
    assert 0 < run.task.solve(scored.table).exploitability < 3


def test_the_example_is_a_run_of_each_game_that_it_names():
    example = Path(__file__).parents[3] / "examples" / "kuhn_poker.toml"
    for game in ("kuhn_poker", "tic_tac_toe"):
        told = dry_run(load_config(example, {"task": game}))
        assert 'rule = "rae"' in told and "actor 'player1' plays with policy 'default'" in told
