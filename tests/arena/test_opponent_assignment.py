"""Whose weights play for an actor in one episode, and that what they say never trains."""

from __future__ import annotations

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric, Stage
from turnwise.credit import RAECredit
from turnwise.inference import ScriptedClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import Actor, EpisodeRequest


class Duel(MultiTurnEpisode):
    """Left and right say a word each; a nested duel first where the artifact asks for one."""

    episode_type = "duel"
    actors = ("left", "right")
    max_turns = 1

    @property
    def rubric(self) -> Rubric:
        def payoff(rollout):
            return {"left": 1.0, "right": -1.0}

        return Rubric([payoff])

    async def setup(self, state, arena, artifact):
        if artifact == "nested":
            await arena.generate_rollouts([EpisodeRequest("duel", "inner")])

    def build_messages(self, state, arena, artifact):
        return [{"role": "user", "content": f"{artifact}"}]


@pytest.fixture
def arena():
    versions = {"own": 5, "past": 2}
    client = ScriptedClient(lambda request: request.policy, versions=versions)
    arena = Arena(client, ByteTokenizer(), credit=RAECredit())
    for actor in Duel.actors:
        arena.add_actor(Actor(actor, policy="own"))
    arena.add_episode(Duel())
    return arena


async def test_a_request_names_who_plays_and_that_one_never_trains(arena):
    arena.source = lambda: [EpisodeRequest("duel", "a", policies={"right": "past"}), EpisodeRequest("duel", "b")]
    batch = await arena.step()
    seated, plain = (result.rollout for result in arena.last_results)
    assert [(s.actor_id, s.policy, s.completion, s.trainable) for s in seated.steps] == [
        ("left", "own", "own", True), ("right", "past", "past", False),
    ]  # fmt: skip
    assert seated.steps[1].policy_versions == [(5, 2)] and seated.facts.policies == {"right": "past"}
    assert seated.facts.policy_versions == {"own": 5, "past": 2} and plain.facts.policies == {}
    assert all(step.policy == "own" and step.trainable for step in plain.steps)
    assert batch.policies == ["own"] and len(batch) == 3 and batch.dropped == {"not_trainable": 1}
    assert arena.credit.baseline("duel", "right") == pytest.approx(-0.05), "of the one game that it played itself"


async def test_it_holds_for_nested_episodes(arena):
    request = EpisodeRequest("duel", "nested", policies={"left": "past"})
    [result] = await arena.generate_rollouts([request])
    [child] = result.children
    for rollout in (result.rollout, child.rollout):
        assert [(step.policy, step.trainable) for step in rollout.steps] == [("past", False), ("own", True)]
    assert child.rollout.facts.policy_versions["past"] == 2


async def test_unknown_seats_and_policies_are_refused(arena):
    with pytest.raises(ValueError, match="no actor 'middle'"):
        await arena.generate_rollouts([EpisodeRequest("duel", "a", policies={"middle": "past"})])
    with pytest.raises(ValueError, match="never"):
        await arena.generate_rollouts([EpisodeRequest("duel", "a", policies={"left": "never"})])


async def test_the_seating_has_the_last_word_and_is_saved_with_the_arena(arena):
    class Seating(Stage):
        name = "seating"

        def __init__(self):
            self.count = 0

        async def draw(self, arena, requests):
            self.count += 1
            return [EpisodeRequest("duel", f"{request.artifact}{self.count}") for request in requests]

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    arena.source, seating = lambda: [EpisodeRequest("duel", "a")], arena.add_stage(Seating())
    await arena.step()
    assert arena.last_results[0].rollout.artifact == "a1"
    state = arena.state_dict()
    await arena.step()
    arena.load_state_dict(state)
    assert seating.count == 1
    await arena.evaluation().generate_rollouts(arena.source())
    assert seating.count == 1, "an evaluation is played as it was asked for"
