"""What an arena is made of: in any order, by both names, and with defaults."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric, SingleTurnEpisode
from turnwise.credit import GRPOCredit, RAECredit
from turnwise.inference import ScriptedClient
from turnwise.types import Actor, CreditAssigner, EpisodeRequest, EpisodeState

from .conftest import CharTokenizer, FakeClient
from .helpers import Guess, guess, nested


class Columns:
    """A rule with the inner form alone."""

    def compute_columns(self, samples):
        raise NotImplementedError


@pytest.mark.parametrize("rule", [GRPOCredit(), Columns()])
def test_tokenizer_and_credit_stand_after_the_client_in_any_order(rule):
    own, client = CharTokenizer(), ScriptedClient(["1"])
    for arena in (
        Arena(client, own, rule),
        Arena(client, rule, own),
        Arena(client, rule, tokenizer=own),
        Arena(client, own, credit=rule),
        Arena(client, own, credit_assigner=rule),
        Arena(client=client, tokenizer=own, credit=rule),
    ):
        assert (arena.client, arena.tokenizer, arena.credit) == (client, own, rule)
    for arena in (Arena(client, rule), Arena(client, None, rule), Arena(client, credit_assigner=rule)):
        assert arena.tokenizer is client.tokenizer and arena.credit is rule
    for arena in (Arena(client), Arena(client, None), Arena(client, own)):
        assert arena.credit is None and arena.tokenizer is not None


def test_the_credit_rule_goes_by_both_names():
    first, second = GRPOCredit(), RAECredit()
    arena = Arena(ScriptedClient(["1"]), first)
    assert arena.credit_assigner is first
    arena.credit_assigner = second
    assert arena.credit is second and arena.credit_assigner is second
    arena.credit = None
    assert arena.credit_assigner is None and arena.evaluation().credit_assigner is None


def test_what_is_neither_or_given_twice_is_refused():
    rule, client = GRPOCredit(), ScriptedClient(["1"])
    for twice in (
        lambda: Arena(client, rule, credit=rule),
        lambda: Arena(client, rule, credit_assigner=rule),
        lambda: Arena(client, rule, RAECredit()),
        lambda: Arena(client, credit=rule, credit_assigner=rule),
    ):
        with pytest.raises(ValueError, match="credit and credit_assigner are one setting"):
            twice()
    with pytest.raises(ValueError, match=r"tokenizer: got .* expected one"):
        Arena(client, CharTokenizer(), tokenizer=CharTokenizer())
    with pytest.raises(
        TypeError, match=r"tokenizer=<class .*GRPOCredit'>: expected the model's tokenizer, or a credit"
    ):
        Arena(client, GRPOCredit)
    with pytest.raises(TypeError, match="tokenizer=8: expected the model's tokenizer, or a credit rule"):
        Arena(client, 8)
    with pytest.raises(TypeError, match=r"credit='grpo': expected a credit rule, an object with compute\(results\)"):
        Arena(client, credit="grpo")
    with pytest.raises(TypeError, match="Arena got 4 positional arguments"):
        Arena(client, rule, None, CharTokenizer())
    with pytest.raises(ValueError, match="tokenizer=None: FakeClient brings none"):
        Arena(FakeClient(), rule)


# -- what goes by two names, and what programs of other arenas leave out ----------------------------------------------
class ByResults(CreditAssigner):
    def compute(self, results):
        return {(r.rollout.id, n): 2.0 * r.rewards["solver"] for r in results for n in range(len(r.rollout.steps))}


class Duck:
    """No base class at all."""

    def compute(self, results):
        return ByResults.compute(self, results)


@pytest.mark.parametrize("rule", [ByResults, Duck])
def test_a_rule_with_compute_alone(make_arena, rule):
    arena = make_arena(lambda prompt, request: prompt.split("Guess ")[1][0], credit_assigner=rule(), episodes=[Guess()])
    arena.source = lambda: [guess(digit) for digit in (3, 4)]
    assert asyncio.run(arena.step()).advantages.tolist() == [6.0, 8.0]
    arena.load_state_dict(arena.state_dict())


def test_a_rule_that_forgets_a_call_is_named(make_arena):
    class Forgets(CreditAssigner):
        def compute(self, results):
            return {}

    arena = make_arena(credit=Forgets(), episodes=[Guess()], source=lambda: [guess()])
    with pytest.raises(ValueError, match=r"Forgets.compute gave no advantage for .* \('e0', 0\)"):
        asyncio.run(arena.step())


def test_concurrency_of_a_step_and_of_one_call(make_arena):
    arena = make_arena(max_concurrency=8, episodes=[Guess()], source=lambda: [guess(n) for n in range(12)])
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
        arena = make_arena(actors=actors, episodes=[Anyone()])
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

    arena = make_arena(actors=(Actor("a"), Actor("b"), Actor("c")), episodes=[Watch()])
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("watch", 1)]))
    assert [step.actor_id for step in result.rollout.steps] == list("bcabca")
    assert result.rollout.steps[0].prompt == [{"role": "user", "content": "You are b."}]
