"""Rewards: weights, metrics, what a function may ask for, and what happens when it fails."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from turnwise.arena import RewardMix, Rubric, SingleTurnEpisode
from turnwise.types import EpisodeRequest, EpisodeState, Rollout, Step


def rollout(*actors, **fields):
    steps = [Step(actor, 0, [], f"text of {actor}", [], [], [], [], "stop") for actor in actors]
    return Rollout("r", "e", {"answer": 4}, steps=steps, **fields)


def score(rubric, trace=None, **options):
    return asyncio.run(rubric.score(trace or rollout("a", "b"), **options))


def test_rewards_are_the_weighted_sum_and_metrics_are_unweighted_and_named_apart():
    """``short`` twice with weights 1/4 and 0; a plain number goes to each that acted, and not to judges."""

    def right(artifact):
        return {"a": np.float32(1.0), "b": np.array(0.5)}

    async def short(completion):
        return {"a": 2.0}

    def length(completion):
        return len(completion)

    result = score(
        Rubric([right, short, short, lambda: True, length], [1.0, 0.25, 0, 1, 0]), rollout("b", None, "a", "b")
    )
    assert result.rewards == {"a": 2.5, "b": 1.5}
    own = {"right/a": 1.0, "right/b": 0.5, "short/a": 2.0, "short_2/a": 2.0, "length/a": 9.0, "length/b": 9.0}
    assert result.metrics == {**own, "lambda/a": 1.0, "lambda/b": 1.0}


class Place:
    """An arena whose rewards are not mixed."""

    def mix_of(self, episode_type):
        return RewardMix()


PLACE = Place()


def test_functions_name_what_they_want():
    seen = {}

    def everything(rollout, arena, artifact, extras, completion, state, scale=2.0):
        seen.update(locals())
        return 0

    def rest(**available):
        seen["rest"] = sorted(available)
        return 0

    trace, state = rollout("a", extras={"x": 1}), EpisodeState()
    score(Rubric([everything, rest]), trace, arena=PLACE, state=state)
    assert seen["rollout"] is trace and seen["state"] is state and seen["arena"] == PLACE
    assert (seen["artifact"], seen["extras"], seen["completion"]) == ({"answer": 4}, {"x": 1}, "text of a")
    assert seen["scale"] == 2.0
    assert seen["rest"] == ["arena", "artifact", "completion", "extras", "rollout", "state", "thought"]
    with pytest.raises(TypeError, match="reward function 'bad' asks for 'rolout'"):

        def bad(rolout):
            return 0

        Rubric([bad])


def test_two_arguments_with_names_of_their_own_are_the_rollout_and_the_arena():
    def by_place(trace, place):
        return float(trace.artifact["answer"] == 4 and place == PLACE)

    def ignores(rollout, _arena):
        return float(rollout.artifact["answer"])

    def turned(_, arena, weight=3.0):
        return weight * (arena == PLACE)

    rubric = Rubric([by_place, ignores, turned, lambda r, a: 10.0 * (r.artifact["answer"] == 4)])
    assert score(rubric, rollout("a"), arena=PLACE).rewards == {"a": 18.0}
    for slip in (lambda rollout, area: 0, lambda extra, artifact: 0, lambda one: 0, lambda one, two, three: 0):
        with pytest.raises(TypeError, match="expected names of"):
            Rubric([slip])


def test_functions_run_concurrently():
    gate = asyncio.Barrier(3)

    async def meet():
        await gate.wait()
        return 1.0

    assert score(Rubric([meet, meet, meet])).rewards["a"] == 3.0


@pytest.mark.parametrize("on_error", ["raise", "zero", "drop", "retry"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.inf])
def test_a_reward_that_is_not_finite_is_an_error_under_every_handler(value, on_error):
    def broken():
        return {"b": value}

    with pytest.raises(ValueError, match=r"reward function 'broken', actor 'b': the reward is -?(nan|inf)"):
        score(Rubric([broken], on_error=on_error))
    with pytest.raises(ValueError, match=r"weighted rewards up to 'lambda_2', actor 'a': the reward is inf"):
        score(Rubric([lambda: {"a": 1e308}, lambda: {"a": 1e308}], on_error=on_error))


@pytest.mark.parametrize("value", [None, "1.0", {1, 2}, {"a": None}])
def test_what_is_no_number_is_an_error(value):
    with pytest.raises(TypeError, match=r"reward function 'lambda'.*expected a number"):
        score(Rubric([lambda: value]))


def fails(times):
    calls = []

    def flaky():
        calls.append(1)
        if len(calls) <= times:
            raise OSError("judge is down")
        return 1.0

    return flaky, calls


def test_on_error():
    flaky, _ = fails(99)
    with pytest.raises(OSError, match="judge is down"):
        score(Rubric([flaky], on_error="raise"))
    result = score(Rubric([flaky, lambda: 0.5], on_error="zero"))
    assert result.rewards == {"a": 0.5, "b": 0.5} and result.metrics["flaky/a"] == 0.0
    dropped = score(Rubric([flaky, lambda: 0.5], on_error="drop"))
    assert dropped.dropped == "OSError: judge is down" and dropped.rewards == {}
    flaky, calls = fails(2)
    assert score(Rubric([flaky], on_error="retry")).rewards["a"] == 1.0 and len(calls) == 3
    flaky, calls = fails(3)
    with pytest.raises(OSError):
        score(Rubric([flaky], on_error="retry"))
    assert len(calls) == 3


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_timeout_bounds_each_function(kind):
    async def waits():
        await asyncio.sleep(30)

    def sleeps():
        time.sleep(0.4)

    start = time.perf_counter()

    async def main():
        with pytest.raises(TimeoutError):
            await Rubric([waits if kind == "async" else sleeps, lambda: 1.0], timeout=0.05).score(rollout("a"))
        return time.perf_counter() - start

    assert asyncio.run(main()) < 0.35


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1.0]}, "expected one for each of the 2 functions"),
        ({"weights": [1.0, float("nan")]}, "expected finite numbers"),
        ({"on_error": "ignore"}, "on_error='ignore': expected one of"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Rubric([lambda: 1, lambda: 2], **options)
    with pytest.raises(TypeError, match=r"funcs=<function .*: expected a list of reward functions"):
        Rubric(lambda completion: 1.0)


class Asked(SingleTurnEpisode):
    episode_type = "asked"

    def __init__(self, *funcs, **options):
        self.rubric = Rubric(list(funcs), **options)

    def get_prompt(self, artifact):
        return artifact


def play(make_arena, episode, *artifacts, **options):
    arena = make_arena(**options, episodes=[episode])
    return arena, asyncio.run(arena.generate_rollouts([EpisodeRequest("asked", artifact) for artifact in artifacts]))


def test_a_nan_reward_or_none_fails_the_episode_and_is_never_a_row(make_arena):
    def sometimes(artifact):
        return {"bad": float("nan"), "nobody": {"somebody else": 1.0}}.get(artifact, 1.0)

    arena, results = play(make_arena, Asked(sometimes), "good", "bad", "fine", "nobody")
    assert [result.rollout.error is None for result in results] == [True, False, True, False]
    assert "actor 'solver' of episode 'asked' acted and has no reward" in results[3].rollout.error
    assert "ValueError: reward function 'sometimes': the reward is nan, expected a finite number" in (
        results[1].rollout.error
    )
    assert results[1].rollout.rewards == results[3].rollout.rewards == {}
    batch = arena.assign_credit_and_pack(results)
    assert batch.rewards.tolist() == [1.0, 1.0] and batch.dropped == {"failed": 2}


def test_judges_in_rewards_are_logged_seeded_and_never_train(make_arena):
    async def slow(arena):
        await asyncio.sleep(0.01)
        return float((await arena.call_model(None, "Judge slowly", temperature=0.0)).text)

    async def quick(arena):
        return float((await arena.call_model(None, "Judge quickly")).text)

    def judged(*funcs):
        arena, [result] = play(make_arena, Asked(*funcs), "q")
        assert len(arena.assign_credit_and_pack([result])) == 1
        return result.rollout

    rollout = judged(slow, quick)
    assert [step.actor_id for step in rollout.steps] == ["solver", None, None]
    assert "slowly" in str(rollout.steps[1].prompt), "recorded in the order of the functions, not of the clock"
    assert rollout.steps[1].facts.temperature == 0.0
    assert [s.facts.seed for s in judged(quick, slow).steps] == [s.facts.seed for s in rollout.steps]
