"""Single-turn and free-form episodes."""

from __future__ import annotations

import asyncio

from turnwise.arena import Episode, Rubric, SingleTurnEpisode
from turnwise.types import EpisodeRequest, EpisodeState


def play(make_arena, episode, artifact="q", **options):
    arena = make_arena(actors=("solver", "left", "right"), failure_threshold=1.0, **options, episodes=[episode])
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest(episode.episode_type, artifact)]))
    return arena, result.rollout


class Duel(Episode):
    episode_type = "duel"

    @property
    def rubric(self):
        return Rubric([lambda extras: {"left": extras["left"], "right": -extras["left"]}])

    async def rollout(self, arena, artifact, state=None):
        await asyncio.gather(*(self.call_model(player, artifact, arena) for player in ("left", "right")))
        await self.call_model("left", "unrecorded", arena, record=False)
        return state

    def get_extras(self, state):
        return {"left": float(state.trajectory[0].completion), "said": state.last_completion_text}


def test_a_free_episode_records_its_calls_in_the_order_they_were_asked(make_arena):
    async def reply(prompt, request):
        calls.append(prompt)
        if len(calls) == 1:
            await asyncio.sleep(0.02)
            return "8"  # the first call is answered last
        return "3"

    calls = []
    arena, rollout = play(make_arena, Duel(), reply=reply)
    assert rollout.error is None and len(arena.client.requests) == 3
    assert [step.actor_id for step in rollout.steps] == ["left", "right"]
    assert rollout.rewards == {"left": 8.0, "right": -8.0}, "the state's trajectory has the same order"


def test_a_single_turn_episode(make_arena):
    class Echo(SingleTurnEpisode):
        episode_type = "echo"
        rubric = Rubric([lambda completion, artifact: float(completion == artifact)])

        async def get_prompt(self, artifact):
            return [{"role": "system", "content": "Echo."}, {"role": "user", "content": artifact}]

    _, rollout = play(make_arena, Echo(), "5", reply=lambda prompt, request: "5")
    assert rollout.rewards == {"solver": 1.0}
    assert [message["role"] for message in rollout.steps[0].prompt] == ["system", "user"]
    assert rollout.steps[0].policy_versions == [(2, 7)] and rollout.steps[0].completion == "5"


def test_a_rollout_returns_the_state_or_one_of_its_own(make_arena):
    class Forgets(Duel):
        async def rollout(self, arena, artifact, state=None):
            return None

    class Own(Duel):
        async def rollout(self, arena, artifact, state=None):
            return EpisodeState(data={"text": (await self.call_model("left", artifact, arena)).text})

        def get_extras(self, state):
            return {"left": float(state.data["text"])}

    _, rollout = play(make_arena, Forgets())
    assert "Forgets.rollout returned None, expected the EpisodeState" in rollout.error
    _, rollout = play(make_arena, Own(), reply=lambda prompt, request: "4")
    assert rollout.rewards == {"left": 4.0, "right": -4.0}
