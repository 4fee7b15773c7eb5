"""The league in the loop: who plays, who trains, what is counted, and that a resumed run has it all."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from turnwise.inference import TransformersClient
from turnwise.run.checks import dry_run
from turnwise.tasks.two_player import SEATS
from turnwise.train.config.toml import ConfigError
from turnwise.train.league.league import (
    MATCHMAKERS,
    LatestMatchmaker,
    League,
    PrioritizedMatchmaker,
    UniformMatchmaker,
    chances,
)
from turnwise.train.league.payoffs import GameResult
from turnwise.train.resume import resume_run
from turnwise.train.validate import config_from_dict
from turnwise.types import EpisodeRequest, ModelRequest, Sampling

from ...trained import equal, weights_of


def batches_of(run):
    """Train; each step's batch with the episodes behind it."""
    seen = []

    def assign_credit_and_pack(results):
        seen.append((type(run.arena).assign_credit_and_pack(run.arena, results), results))
        return seen[-1][0]

    run.arena.assign_credit_and_pack = assign_credit_and_pack
    run.train()
    return seen


def league_of(run) -> League:
    return run.trainer.callbacks["league"]


def marked(results):
    return [result for result in results if result.rollout.facts.league is not None]


def test_the_past_plays_with_the_weights_that_it_had_and_none_of_its_tokens_trains(make_run):
    """Log-probs of a member's tokens are those of its snapshot, bit by bit the weights of that step."""
    league = {"share": 1.0, "every": 1, "size": 8, "opponents_per_step": 3, "matchmaker": "uniform"}
    run = make_run(steps=4, league=league)
    history, record = {0: weights_of(run.trainer)}, run.trainer.record

    async def recorded(batch, metrics):
        await record(batch, metrics)
        history[run.trainer.progress.step] = weights_of(run.trainer)

    run.trainer.record = recorded
    model, checked = run.trainer.policies["default"].model, set()
    for batch, results in batches_of(run):
        assert len(marked(results)) == 8 == len(results)
        live, past = [], []
        for result in results:
            seat, member = result.rollout.facts.league["seat"], result.rollout.facts.league["member"]
            live += [step for step in result.rollout.steps if step.actor_id == seat]
            past += [(member, step) for step in result.rollout.steps if step.actor_id != seat]
        assert past and all(step.policy.startswith("default@past") and not step.trainable for _, step in past)
        assert all(step.advantage is None for _, step in past), "the credit rule never saw them"
        assert live and all(step.policy == "default" and step.trainable for step in live)
        assert batch.policies == ["default"] and batch.dropped["not_trainable"] == len(past)
        ends = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        trained = Counter(tuple(batch.token_ids[start:end].tolist()) for start, end in ends)
        assert trained <= Counter((*step.prompt_token_ids, *step.completion_token_ids) for step in live)
        for member, step in past:
            if member not in checked:
                checked.add(member)
                for name, tensor in run.trainer.policies["default"].weights():
                    tensor.copy_(history[member][name])
                client = TransformersClient(model, run.tokenizers)
                request = ModelRequest(step.prompt_token_ids, Sampling(max_tokens=6))
                [scored] = asyncio.run(client.score([request], [step.completion_token_ids]))
                assert np.allclose(scored, step.completion_logprobs, atol=1e-5), member
                assert step.policy_versions == [(len(step.completion_token_ids), member)]
    assert len(checked) >= 2 and not equal(history[0], history[4])


def test_matches_are_paired_and_seats_swapped(make_run):
    run = make_run(
        steps=1, rollout={"prompts_per_step": 12, "group_size": 2, "check_private": True}, league={"share": 0.5}
    )
    [(_, results)] = batches_of(run)
    assert len(results) == 24 and len(marked(results)) == 12 and not marked(results[:12])
    matches = defaultdict(list)
    for result in marked(results):
        matches[result.rollout.facts.league["match"]].append(result)
    assert len(matches) == 6
    for pair in matches.values():
        assert [result.rollout.facts.league["seat"] for result in pair] == list(SEATS)
        assert pair[0].rollout.artifact == pair[1].rollout.artifact and pair[0].group_id == pair[1].group_id
        assert pair[0].rollout.facts.league["member"] == pair[1].rollout.facts.league["member"]
    record = league_of(run).payoffs.between("live", "step 0")
    assert (record.matches, record.games) == (6, 12)
    payoffs = [result.rollout.rewards[result.rollout.facts.league["seat"]] for result in marked(results)]
    assert record.mean_payoff() == pytest.approx(np.mean(payoffs))
    assert record.wins == sum(payoff > 0 for payoff in payoffs)


def test_a_checkpoint_holds_the_pool_and_a_later_file_goes(make_run):
    first = make_run(steps=2)
    first.train()
    folder = first.config.run_dir
    stray = folder / "league" / "league-00000009-default.safetensors"
    stray.write_bytes(b"of a step after the checkpoint")
    lost = folder / "league" / "league-00000000-default.safetensors"
    kept = lost.read_bytes()
    lost.unlink()
    again = make_run(steps=2)
    resume_run(again.trainer)
    assert lost.read_bytes() == kept and not stray.exists()
    assert lost.stat().st_nlink > 2, "the checkpoints and the pool share one file"


def test_sampling_ahead_gives_each_batch_under_way_its_own_places(make_run):
    run = make_run(
        steps=5,
        loop={"max_staleness": 1, "deterministic": True},
        league={"share": 1.0, "every": 1, "opponents_per_step": 2},
    )
    used = [
        {step.policy for result in results for step in result.rollout.steps if not step.trainable}
        for _, results in batches_of(run)
    ]
    assert all(places <= {"default@past0", "default@past1"} for places in used[0::2])
    assert all(places <= {"default@past2", "default@past3"} for places in used[1::2])


def test_opponents_have_the_matchmakers_chances(make_run):
    league = league_of(make_run(warm_start={}, league={"share": 0.5, "size": 3, "options": {"power": 1.0}}))
    asyncio.run(league.on_start(league_trainer := Stub()))
    for step in (1, 2):
        league_trainer.policies["default"].version = step
        league.snapshot(step, league_trainer.learner)
    league.p_win = lambda: np.array([1.0, 0.75, 0.25])
    drawn = Counter(member.step for batch in range(2000) for member in league.draw(batch, 5))
    assert drawn[0] == 0 and drawn[2] / drawn[1] == pytest.approx(3.0, rel=0.15)
    assert [m.step for m in league.draw(7, 9)] == [m.step for m in league.draw(7, 9)]
    assert len({member.step for member in league.draw(0, 9)}) <= league.config.opponents_per_step


class Stub:
    """As much of a trainer as a pool asks for; its own learner."""

    def __init__(self):
        self.policies = {"default": type("P", (), {"version": 0, "weights": lambda self: [("w", torch.zeros(2))]})()}
        self.progress = type("S", (), {"step": 0})()
        self.learner = self

    def send(self, name, receive):
        return receive(self.policies[name].weights())


def test_the_live_policies_are_judged_by_their_latest_games(make_run):
    league = league_of(make_run(warm_start={}))
    asyncio.run(league.on_start(trainer := Stub()))
    assert league.p_win() == pytest.approx([0.5])
    win = league_game(1.0)
    league.payoffs.add("live", "step 0", [win, win])
    assert league.p_win() == pytest.approx([1.5 / 2])
    trainer.policies["default"].version = 1
    league.snapshot(1, trainer.learner)
    assert league.p_win() == pytest.approx([1.5 / 2, 0.5]), "what the newest member played still tells"
    league.payoffs.add("live", "step 0", [league_game(0.0)])
    assert league.p_win()[0] == pytest.approx(1.5 / 3)
    league.snapshot(2, trainer.learner)
    assert [member.step for member in league.pool.members] == [0, 1], "nothing trained since: no new member"


def league_game(share):
    return GameResult(share, 2 * share - 1, 1 - 2 * share)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "sudoku", "task_options": {}}, "task 'sudoku' has no seats"),
        ({"league": {"share": 0.1}}, "no question from each of 2 seats"),
        ({"league": {"share": 0.5, "matchmaker": "latets"}}, "did you mean 'latest'"),
        ({"league": {"share": 0.5, "options": {"powr": 1}}}, "league.options.powr"),
        ({"filter": {"dynamic_sampling_rounds": 1}, "credit": {"rule": "grpo"}}, "filter.dynamic_sampling_rounds = 0"),
        ({"rollout": {"client": "vllm", "prompts_per_step": 8}}, "policies.default is a whole model"),
        (
            {"rollout": {"client": "vllm", "prompts_per_step": 8, "server": {"url": "http://gpu1:8000"}}},
            "serve the live policies alone",
        ),
        (
            {"actors": {"player1": "rival"}, "policies": {"default": {}, "rival": {"trainable": False}}},
            "actor 'player1' plays with policy 'rival', which is frozen",
        ),
    ],
)
def test_what_can_not_be_is_told_before_anything_runs(settings, changes, told):
    with pytest.raises(ConfigError, match=told):
        dry_run(config_from_dict(settings(**changes)))


def test_without_a_share_there_is_no_league_and_no_seat_for_another(make_run):
    run = make_run(league={}, warm_start={})
    assert not run.trainer.callbacks and "opponent_assignment" not in run.arena.stages
    request = EpisodeRequest("kuhn_poker", {"cards": "KQ"}, policies={"player2": "default"})
    with pytest.raises(ValueError, match="no actor 'player2'"):
        asyncio.run(run.arena.generate_rollouts([request]))


P_WIN = np.array([0.9, 0.5, 0.1])


def test_each_matchmakers_chances():
    assert chances(UniformMatchmaker(), P_WIN) == pytest.approx([1 / 3] * 3)
    assert chances(LatestMatchmaker(k=2), P_WIN) == pytest.approx([0, 0.5, 0.5])
    assert chances(LatestMatchmaker(k=9), P_WIN) == pytest.approx([1 / 3] * 3)
    # PrioritizedMatchmaker is AlphaStar's weighting.
    weights = np.array([0.1**2, 0.5**2, 0.9**2])
    assert chances(PrioritizedMatchmaker(), P_WIN) == pytest.approx(weights / weights.sum())
    assert chances(PrioritizedMatchmaker(power=1.0), P_WIN) == pytest.approx(np.array([0.1, 0.5, 0.9]) / 1.5)
    assert chances(PrioritizedMatchmaker(), np.ones(4)) == pytest.approx([0.25] * 4), "all beaten: each as likely"
    assert set(MATCHMAKERS) == {"uniform", "latest", "prioritized"}


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="k=0"):
        LatestMatchmaker(k=0)
    with pytest.raises(ValueError, match="power=-1"):
        PrioritizedMatchmaker(power=-1)

    class Odd:
        def weights(self, p_win):
            return p_win - 1

    with pytest.raises(ValueError, match=r"Odd\.weights"):
        chances(Odd(), P_WIN)
