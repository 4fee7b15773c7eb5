"""Soft overlong punishment: its numbers, what it touches, and that it is taken once."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.arena import OverlongPenalty, Rubric, SingleTurnEpisode
from turnwise.types import GenerateResult, Rollout, RolloutFacts, Sampling, Step, StepFacts

from .helpers import Baseline, guess


@pytest.mark.parametrize(
    ("penalty", "limit", "values"),
    [
        (OverlongPenalty(100, 0.5), 500, {0: 0, 400: 0, 401: 0.005, 450: 0.25, 499: 0.495, 500: 0.5, 600: 0.5}),
        # A buffer of the whole limit grows from the first token.
        (OverlongPenalty(8), 8, {4: 0.5}),
        (OverlongPenalty(16), 8, {4: 0.75}),
    ],
)
def test_worked_values(penalty, limit, values):
    assert {tokens: penalty.of(tokens, limit) for tokens in values} == pytest.approx(values)


@pytest.mark.parametrize(("options", "name"), [((0,), "buffer=0"), ((4, -1.0), "penalty=-1.0")])
def test_options_are_checked(options, name):
    with pytest.raises(ValueError, match=name):
        OverlongPenalty(*options)


def step(tokens, reward=None, actor="a", **changes):
    sampled = [5] * tokens, [-1.0] * tokens, [(tokens, 0)], "stop"
    return Step(actor, 0, [], "", [1], *sampled, reward=reward, facts=StepFacts(max_tokens=10), **changes)


@pytest.mark.parametrize("own", [0, None])
def test_of_several_ends_each_loses_what_its_steps_lost(own):
    """Both ends share the first step (0.5 lost), the second of them has one of 10 tokens (1.0 lost) of its own."""
    steps = [step(8), step(6), step(10)]
    for one, ends in zip(steps, ([0, 1], [0], [1]), strict=True):
        one.info["ends"] = ends
    meta = {"ends": [{"rewards": {"a": 4.0}, "metrics": {}, "dropped": None} for _ in range(2)]}
    rollout = Rollout("r", "e", "q", steps, {"a": 4.0}, meta=meta, facts=RolloutFacts(own_end=own))
    for _ in range(2):
        OverlongPenalty(4).rewarded(None, [GenerateResult(rollout)])
    assert [end["rewards"] for end in meta["ends"]] == [{"a": 3.5}, {"a": 2.5}]
    assert rollout.rewards == {"a": 3.5 if own == 0 else 3.0}
    assert [rollout.rewards_of(one)["a"] for one in steps[1:]] == [3.5, 2.5]


def test_own_rewards_and_the_actors_reward_are_lowered_once():
    steps = [step(8, 1.0), step(9), step(10, 1.0, selected=False), step(10, 1.0, "b"), step(10, None, None)]
    child = GenerateResult(Rollout("c", "e", "q", [step(10)], {"a": 3.0}))
    failed = GenerateResult(Rollout("f", "e", "q", [step(10, 1.0)], error="Traceback"))
    top = GenerateResult(Rollout("r", "e", "q", steps, {"a": 2.0}), children=[child, failed])
    for _ in range(2):
        OverlongPenalty(4).rewarded(None, [top])
    assert [s.reward for s in steps] == [0.5, None, 0.0, 0.0, None]
    assert top.rollout.rewards == {"a": 0.75}, "less 0.5 and 0.75; what lost in the tree takes nothing"
    assert child.rollout.rewards == {"a": 2.0} and failed.rollout.steps[0].reward == 1.0
    assert steps[0].facts.raw_reward == 1.0 and top.rollout.facts.raw_rewards == {"a": 2.0}


class Talk(SingleTurnEpisode):
    episode_type = "guess"
    rubric = Rubric([lambda completion: 1.0])

    def get_prompt(self, artifact):
        return "Talk"


def test_the_arena_takes_it_before_credit_and_says_so(make_arena):
    """Completions of 2 and 6 tokens with the stop token, under a limit of 6 with a buffer of 2."""
    replies = iter(["1", "12345"])
    arena = make_arena(
        lambda *call: next(replies),
        credit=Baseline(),
        sampling=Sampling(max_tokens=6),
        stages=[OverlongPenalty(2, 0.5)],
    )
    arena.add_episode(Talk())
    arena.source = lambda: [guess(), guess()]
    batch = asyncio.run(arena.step())
    assert sorted(batch.advantages.tolist()) == [0.5, 1.0] == sorted(batch.rewards.tolist())
    metrics = batch.metrics
    assert (metrics["reward/solver"], metrics["raw_reward/solver"], metrics["overlong_penalty/solver"]) == (
        0.75,
        1,
        0.25,
    )
