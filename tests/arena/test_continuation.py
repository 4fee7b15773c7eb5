"""Episodes that ask for others to be played after them: chains, of one level and one batch."""

from __future__ import annotations

import asyncio
import re

import pytest

from turnwise.arena import Episode, MultiTurnEpisode, Rubric, SingleTurnEpisode, private
from turnwise.credit import FromChildren, HierarchyCredit, LevelCredit
from turnwise.types import EpisodeRequest, ModelError

from .helpers import run
from .replaying import play, record


class Round(SingleTurnEpisode):
    """Writes a digit, its reward, and goes on until ``rounds`` are played; the artifact is ``(question, round)``."""

    episode_type = "round"
    rubric = Rubric([lambda completion: float(completion)])
    rounds = 3

    def get_prompt(self, artifact):
        return f"{artifact[0]}, round {artifact[1]}"

    def get_continuation(self, state, rollout):
        question, number = rollout.artifact
        assert rollout.rewards == {"solver": float(rollout.steps[0].completion)}, "it is scored by then"
        return [ask(question, number + 1)] if number + 1 < self.rounds else []


def ask(question, number=0, **options):
    return EpisodeRequest("round", (question, number), group_id=f"{question}/{number}", **options)


def rounds(make_arena, reply=None, episode=None, **options):
    arena = make_arena(reply, **options, episodes=[episode or Round()])
    return arena


def test_a_chain_is_played_in_order_and_stands_among_the_children_of_its_first(make_arena):
    arena = rounds(make_arena, max_concurrency=1)
    [result] = run(arena, ask("q"))
    ids = [node.rollout.id for node in result.walk()]
    assert ids == ["e0", "e0.0", "e0.0.0"]
    assert [node.rollout.meta.get("continues") for node in result.walk()] == [None, "e0", "e0.0"]
    assert [node.rollout.artifact for node in result.walk()] == [("q", 0), ("q", 1), ("q", 2)]
    assert {node.parent_id for node in result.walk()} == {None}, "one level"
    assert result.continuation == [ask("q", 1)] and result.children[-1].continuation == []
    assert len({node.rollout.steps[0].facts.seed for node in result.walk()}) == 3, "each has luck of its own"
    [evaluated] = asyncio.run(arena.evaluation().generate_rollouts([ask("q")]))
    assert [node.rollout.id for node in evaluated.walk()] == ids and arena.started == 1
    again = rounds(make_arena)
    assert [n.rollout.steps[0].facts.seed for n in run(again, ask("q"))[0].walk()] == [
        node.rollout.steps[0].facts.seed for node in result.walk()
    ]


def test_rounds_are_compared_with_the_same_round_of_other_attempts(make_arena):
    """Two attempts at one question: whichever began better, each round is judged by itself."""
    said = {("q", 0): ["1", "3"], ("q", 1): ["8", "2"], ("q", 2): ["5", "5"]}

    def reply(prompt, request):
        return said["q", int(prompt.partition("round ")[2][0])].pop(0)

    arena = rounds(make_arena, reply, credit=HierarchyCredit(normalize=False))
    arena.source = lambda: [ask("q"), ask("q")]
    batch = asyncio.run(arena.step())
    by_round = {}
    for top in arena.last_results:
        for node in top.walk():
            by_round.setdefault(node.rollout.artifact[1], []).append(node.rollout.steps[0].advantage)
    assert {number: sorted(found) for number, found in by_round.items()} == {0: [-1, 1], 1: [-3, 3], 2: [0, 0]}
    assert len(batch) == 4 and batch.dropped == {"equal_rewards": 2} and batch.metrics["episodes"] == 6


def test_a_round_that_fails_costs_itself_and_ends_its_chain(make_arena):
    def reply(prompt, request):
        return ModelError("gone") if "a, round 1" in prompt else "4"

    arena = rounds(make_arena, reply)
    arena.source = lambda: [ask("a"), ask("b")]
    batch = asyncio.run(arena.step())
    first, second = arena.last_results
    assert first.rollout.error is None and first.rollout.rewards == {"solver": 4.0}
    assert ["gone" in (node.rollout.error or "") for node in first.walk()] == [False, True]
    assert len(list(second.walk())) == 3 and batch.metrics["episodes/failed"] == 1 and len(batch) == 4


def test_an_episode_that_failed_is_not_continued_and_one_that_is_tried_again_once(make_arena):
    tries = iter(range(9))

    class Shaky(Round):
        def get_continuation(self, state, rollout):
            if next(tries) == 0:
                raise RuntimeError("no idea what next")
            return super().get_continuation(state, rollout)

    [failed] = run(rounds(make_arena, episode=Shaky(), failure_threshold=1.0), ask("q"))
    assert "no idea what next" in failed.rollout.error and not failed.children and not failed.continuation
    tries = iter(range(9))
    [result] = run(rounds(make_arena, episode=Shaky(), retries=1), ask("q"))
    assert result.rollout.facts.attempt == 1 and len(list(result.walk())) == 3


@pytest.mark.parametrize(
    ("following", "message"),
    [
        (["round"], r"Odd.get_continuation gave 'round': expected EpisodeRequests"),
        ([EpisodeRequest("rund", 1)], r"episode_type='rund': no such episode, expected one of \['round'\]"),
    ],
)
def test_what_can_not_be_played_next_fails_who_asked_for_it(make_arena, following, message):
    class Odd(Round):
        def get_continuation(self, state, rollout):
            return following

    [result] = run(rounds(make_arena, episode=Odd(), failure_threshold=1.0), ask("q"))
    assert re.search(message, result.rollout.error)
    assert not result.continuation and not result.children


def test_long_chains_cost_no_stack_and_several_at_once_are_possible(make_arena):
    class Long(Round):
        rounds = 1200

    [result] = run(rounds(make_arena, episode=Long()), ask("q"))
    assert len(list(result.walk())) == 1200

    class Fan(Round):
        def get_continuation(self, state, rollout):
            question, number = rollout.artifact
            return [ask(f"{question}{way}", number + 1) for way in "lr"] if number < 3 else None

    [result] = run(rounds(make_arena, episode=Fan()), ask("q"))
    assert len(list(result.walk())) == 2**4 - 1


def test_the_deadline_of_the_first_holds_for_all(make_arena):
    async def reply(prompt, request):
        if "round 2" in prompt:
            await asyncio.sleep(30)
        return "1"

    [result] = run(rounds(make_arena, reply, failure_threshold=1.0), ask("q", timeout=0.3))
    assert ["ran past its deadline" in (node.rollout.error or "") for node in result.walk()] == [False, False, True]


class Parent(Episode):
    """Spawns a chain, and is paid by its children."""

    episode_type = "parent"
    rubric = Rubric([lambda extras: {"lead": extras["children"]}])

    async def rollout(self, arena, artifact, state=None):
        await self.call_model("lead", "Go.", arena)
        await arena.generate_rollouts([ask("q", is_trainable=False), ask("r")])
        return state

    def get_extras(self, state):
        return {"children": float(len(state.child_results))}


def test_children_are_continued_at_their_own_level(make_arena):
    said = iter(["9", *"123456"])
    arena = rounds(make_arena, lambda prompt, request: next(said), actors=("lead", "solver"))
    arena.add_episode(Parent())
    edge = FromChildren(parent="parent", actor="lead", child="round", child_actor="solver", by="sum")
    arena.credit = LevelCredit(rule="episodic", edges=[edge])
    arena.filters = type(arena.filters)(drop_zero_advantage=False)
    arena.source = lambda: [EpisodeRequest("parent", None)]
    batch = asyncio.run(arena.step())
    [top] = arena.last_results
    assert len(top.children) == 2 and [len(child.children) for child in top.children] == [2, 2]
    assert top.rollout.extras == {"children": 2.0}
    nested = [node for node in top.walk() if node is not top]
    assert len(nested) == 6 and {node.parent_id for node in nested} == {top.rollout.id}
    paid = sum(child.rollout.rewards["solver"] for child in top.children)
    assert top.rollout.steps[0].advantage == paid, "what continues a child is no child"
    assert batch.dropped == {"not_trainable": 1} and len(batch) == 6, "each request says for itself whether it trains"


class Compared(Round):
    """Paid by place among all attempts at the round."""

    rubric = Rubric([lambda completion: float(completion), lambda rollouts: [10.0 * len(rollouts)] * len(rollouts)])

    def get_continuation(self, state, rollout):
        question, number = rollout.artifact
        return [ask(question, number + 1)] if number + 1 < self.rounds else []


def test_group_functions_see_the_same_round_of_all_attempts(make_arena):
    results = run(rounds(make_arena, lambda p, r: "1", episode=Compared()), ask("q"), ask("q"), ask("r"))
    rewards = [[node.rollout.rewards["solver"] for node in result.walk()] for result in results]
    assert rewards == [[21.0] * 3, [21.0] * 3, [11.0] * 3]


class Cards(MultiTurnEpisode):
    """Rounds of a game whose seats hold cards; what was private stays so in the next round."""

    episode_type = "cards"
    actors = ("ann", "bob")
    max_turns = 1
    rubric = Rubric([lambda extras: {"ann": extras["luck"], "bob": -extras["luck"]}])

    def get_prompt(self, artifact):
        return f"Round {artifact}."

    def get_observation(self, state, arena, artifact):
        state.data["luck"] = self.rng.random()
        actor = state.current_actor
        return private(f"{actor} holds the card {artifact}{actor[0]}.", to=actor)

    def get_extras(self, state):
        return {"luck": state.data["luck"]}

    async def get_continuation(self, state, rollout):
        return [EpisodeRequest("cards", rollout.artifact + 1)] if rollout.artifact < 2 else []


@pytest.mark.parametrize("episode", [Round, Compared, Cards])
def test_a_chain_is_replayed_bit_for_bit(make_arena, episode):
    def table():
        arena = rounds(make_arena, episode=episode(), actors=("solver", "ann", "bob"), check_private=True)
        return arena

    requests = [EpisodeRequest("cards", 0)] if episode is Cards else [ask("q"), ask("q")]
    rows = record(table(), requests)
    arena = table()
    # A replay asks no model.
    arena.client = type("Versions", (), {"version": lambda self, policy: 7})()
    result, divergence, _ = play(arena, rows[-1])
    assert divergence is None and len(list(result.walk())) == 3
    rows[-1]["children"][0]["rewards"] = {"solver": 99.0}
    _, divergence, _ = play(arena, rows[-1])
    assert divergence is not None
