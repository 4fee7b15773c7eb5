"""What goes by two names, and what programs of other arenas leave out, works as well."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.arena import MultiTurnEpisode, Rubric, SingleTurnEpisode
from turnwise.credit import GRPOCredit
from turnwise.types import Actor, CreditAssigner, EpisodeRequest, EpisodeState, Sample

from .helpers import Guess, guess, nested


class ByResults(CreditAssigner):
    def compute(self, results):
        return {(r.rollout.id, n): 2.0 * r.rewards["solver"] for r in results for n in range(len(r.rollout.steps))}


class Duck:
    """No base class at all."""

    def compute(self, results):
        return ByResults.compute(self, results)


@pytest.mark.parametrize("rule", [ByResults, Duck])
def test_a_rule_with_compute_alone(make_arena, rule):
    arena = make_arena(lambda prompt, request: prompt.split("Guess ")[1][0], credit_assigner=rule())
    arena.add_episode(Guess())
    arena.source = lambda: [guess(digit) for digit in (3, 4)]
    assert asyncio.run(arena.step()).advantages.tolist() == [6.0, 8.0]
    arena.load_state_dict(arena.state_dict())


def test_a_rule_that_forgets_a_call_is_named(make_arena):
    class Forgets(CreditAssigner):
        def compute(self, results):
            return {}

    arena = make_arena(credit=Forgets())
    arena.add_episode(Guess())
    arena.source = lambda: [guess()]
    with pytest.raises(ValueError, match=r"Forgets.compute gave no advantage for .* \('e0', 0\)"):
        asyncio.run(arena.step())


def test_concurrency_of_a_step_and_of_one_call(make_arena):
    arena = make_arena(max_concurrency=8)
    arena.add_episode(Guess())
    arena.source = lambda: [guess(n) for n in range(12)]
    asyncio.run(arena.step(concurrency=3))
    assert (arena.client.peak, arena.budget.limit) == (3, 8)
    arena.client.peak = 0
    results = asyncio.run(arena.generate_rollouts([guess(n) for n in range(12)], concurrency=2))
    assert arena.client.peak == 2 and [result.rollout.artifact for result in results] == list(range(12))
    for call in (lambda: arena.step(concurrency=0), lambda: arena.generate_rollouts([guess()], concurrency=0)):
        with pytest.raises(ValueError, match="concurrency=0"):
            asyncio.run(call())


def test_rewards_and_texts_by_both_names(make_arena):
    [top] = asyncio.run(nested(make_arena).generate_rollouts([EpisodeRequest("propose", 1)]))
    assert top.rewards is top.rollout.rewards
    assert top.rollout.steps[0].completion_text == top.rollout.steps[0].completion


def test_who_answers_where_nobody_is_named(make_arena):
    class Anyone(SingleTurnEpisode):
        episode_type = "anyone"
        rubric = Rubric([lambda completion: 1.0])

        def get_prompt(self, artifact):
            return "?"

    def play(*actors):
        arena = make_arena(actors=actors)
        arena.add_episode(Anyone())
        return asyncio.run(arena.generate_rollouts([EpisodeRequest("anyone", 1)]))[0].rollout

    assert play("pupil").steps[0].actor_id == "pupil"
    assert play("pupil", "solver").steps[0].actor_id == "solver"
    assert play("Pupil", "Solver").steps[0].actor_id == "Solver"
    Anyone.get_initial_actor = lambda self: "teacher"
    assert play("pupil", "solver", "teacher").steps[0].actor_id == "teacher"
    del Anyone.get_initial_actor
    with pytest.raises(RuntimeError, match="the episode names no actor"):
        play("pupil", "teacher")
    with pytest.raises(RuntimeError, match="the episode names no actor"):
        play("solver", "Solver")


def test_a_game_without_actors_and_prompt_of_its_own(make_arena):
    """The arena's actors in the order in which they were added, and observations alone."""

    class Watch(MultiTurnEpisode):
        episode_type = "watch"
        max_turns = 2
        rubric = Rubric([lambda completion: 1.0])

        def get_initial_actor(self):
            return "b"

        def get_observation(self, state: EpisodeState, arena, artifact):
            return f"You are {state.current_actor}."

    arena = make_arena(actors=(Actor("a"), Actor("b"), Actor("c")))
    arena.add_episode(Watch())
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("watch", 1)]))
    assert [step.actor_id for step in result.rollout.steps] == list("bcabca")
    assert result.rollout.steps[0].prompt == [{"role": "user", "content": "You are b."}]


def test_positive_only_gives_what_is_below_the_mean_zero():
    samples = [
        Sample("q", "e", "a", 0, 0, None, f"r{n}", 0, "default", [1], [2], [0.0], [(1, 0)], reward, reward)
        for n, reward in enumerate((1.0, 0.0, 3.0, 0.0))
    ]
    plain = GRPOCredit(normalize=False).compute_columns(samples)
    assert plain.tolist() == [0.0, -1.0, 2.0, -1.0]
    clamped = GRPOCredit(normalize=False, positive_only=True).compute_columns(samples)
    assert clamped.tolist() == [0.0, 0.0, 2.0, 0.0]
