"""A step of self-play with the tiny model on each game: RAE, both seats in the batch, an evaluation from each seat."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from turnwise.credit import RAECredit
from turnwise.run.build import build_run
from turnwise.tasks.two_player import SEATS
from turnwise.train.validate import config_from_dict, load_config

pytestmark = pytest.mark.xdist_group("two_player_training")

GAMES = {"kuhn_poker": 90, "negotiation": 120, "tic_tac_toe": 60}
"""How many steps of a warm start it takes until both seats mostly say something legal."""


def run_of(game, folder):
    settings = {
        "task": game, "run_dir": str(folder), "steps": 1, "threads": 1, "health": {"start_questions": 0},
        "warm_start": {"steps": GAMES[game], "batch_size": 12, "warmup": 5, "lr": 1e-2},
        "rollout": {"prompts_per_step": 16, "check_private": True},
        "eval": {"num_prompts": 8},
    }  # fmt: skip
    return build_run(config_from_dict(settings))


def check_evaluation(run):
    baselines = run.arena.credit.state_dict()
    result = run.evaluate()
    assert result.episodes == 8 and result.failed == 0 and 0 <= result.low <= result.success <= result.high <= 1
    for metric in ("score", "legal", "readable"):
        assert {f"{metric}/{seat}" for seat in SEATS} <= set(result.metrics), "each seat has its own figure"
    assert result.success == pytest.approx((result.metrics["score/player0"] + result.metrics["score/player1"]) / 2)
    assert result == run.evaluate(), "greedy, with the opponent's luck from the requests"
    assert run.arena.credit.state_dict() == baselines


@pytest.fixture(
    scope="module",
    params=["kuhn_poker", *(pytest.param(g, marks=pytest.mark.slow) for g in GAMES if g != "kuhn_poker")],
)
def trained(request, narrow_model, tmp_path_factory):
    """A run of a step, its evaluation before it, its weights before it, and the batch and the episodes of the step."""
    run = run_of(request.param, tmp_path_factory.mktemp(request.param))
    check_evaluation(run)
    weights = dict(run.trainer.policies["default"].model.named_parameters())
    before = {name: values.detach().clone() for name, values in weights.items()}
    seen = []

    def assign_credit_and_pack(results):
        seen.append((type(run.arena).assign_credit_and_pack(run.arena, results), results))
        return seen[-1][0]

    run.arena.assign_credit_and_pack = assign_credit_and_pack
    assert run.train().step == 1 and len(seen) == 1
    assert max(float((values.detach() - before[name]).abs().max()) for name, values in weights.items()) > 0
    return run, *seen[0]


def test_both_seats_learn_by_rae(trained):
    run, batch, results = trained
    rewards = {actor: batch.rewards[batch.actor_index == index] for index, actor in enumerate(batch.actors)}
    assert run.arena.check_private and set(rewards) == set(SEATS), "both seats' samples are in the batch"
    assert {np.sign(value) for value in batch.rewards} >= {-1.0, 1.0}
    for result in results:
        assert result.rollout.error is None
        assert result.rollout.rewards["player0"] == -result.rollout.rewards["player1"], "zero sum"
    both = [result.rollout for result in results if {step.actor_id for step in result.rollout.steps} == set(SEATS)]
    assert any(rollout.rewards["player0"] for rollout in both), "some games were decided after both had acted"
    assert np.array_equal(batch.advantages, batch.rewards), "the baselines of the first batch are 0"
    # After the batch each seat has its own: a twentieth of its mean reward over the games in which it acted.
    assert isinstance(run.arena.credit, RAECredit)
    for seat in SEATS:
        spoke = [
            result.rollout.rewards[seat]
            for result in results
            if any(step.actor_id == seat for step in result.rollout.steps)
        ]
        assert run.arena.credit.baseline(run.task.name, seat) == pytest.approx(0.05 * np.mean(spoke), abs=1e-6)


@pytest.mark.slow
def test_self_play_makes_kuhn_poker_less_exploitable(tmp_path):
    """The start plays 30% of an equilibrium's moves, and sees its card; so it is below uniform play (0.458)."""
    changes = {
        "run_dir": str(tmp_path),
        "steps": 20,
        "threads": 1,
        "eval.exploitability_every": 20,
        "eval.num_prompts": 2,
    }
    run = build_run(load_config(Path(__file__).parents[3] / "examples" / "kuhn_poker.toml", changes))
    notes = []
    run.trainer.log.note = notes.append
    run.train()
    start, end = (float(found) for note in notes for found in re.findall(r"exploitability (\d\.\d+)", note))
    assert 0.2 < start < 0.42, start
    assert end < start - 0.06, (start, end)
