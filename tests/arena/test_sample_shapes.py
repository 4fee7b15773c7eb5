"""Whole programs in the shape that samples of self-play arenas have: nothing but the import line is turnwise's."""

from __future__ import annotations

import asyncio

import pytest

from turnwise import Actor, Arena, Episode, EpisodeRequest, Rubric, SingleTurnEpisode
from turnwise.credit import GRPOCredit
from turnwise.inference import ScriptedClient
from turnwise.types import Artifact

# -- a maker of words, spellers of them, and a curriculum --------------------------------------------------------------


def spelled(rollout, arena):
    return {"Speller": 1.0 if rollout.steps[0].completion_text == "-".join(rollout.artifact) else 0.0}


def in_between(result, _arena):
    return {"Maker": 1.0 - abs(0.5 - result.extras["pass_rate"])}


class SpellEpisode(SingleTurnEpisode):
    @property
    def episode_type(self):
        return "spell"

    @property
    def rubric(self):
        return Rubric(funcs=[spelled], weights=[1.0])

    def get_initial_actor(self):
        return "Speller"

    def get_prompt(self, artifact):
        return f"Spell {artifact}."


class MakeEpisode(Episode):
    def __init__(self, attempts):
        self.attempts = attempts

    @property
    def episode_type(self):
        return "make"

    @property
    def rubric(self):
        return Rubric([in_between])

    async def rollout(self, arena, artifact, state=None):
        response = await self.call_model(actor_id="Maker", prompt=f"A word like {artifact}.", arena=arena)
        state.data["word"] = response.text
        requests = [EpisodeRequest("spell", response.text, is_trainable=False) for _ in range(self.attempts)]
        results = await arena.generate_rollouts(requests)
        state.child_results.extend(results)
        return state

    def get_extras(self, state):
        wins = sum(1 for r in state.child_results if r.rewards.get("Speller", 0) > 0)
        return {"pass_rate": wins / len(state.child_results), "word": state.data.get("word")}


class WordArena(Arena):
    def __init__(self, client, credit_assigner=None, batch_size=2):
        super().__init__(client, credit_assigner)
        self.batch_size = batch_size

    def get_batch(self):
        samples = self.stores["words"].sample(k=self.batch_size)
        return [EpisodeRequest("make", s.data, group_id="makers") for s in samples]

    def on_train_start(self):
        for number, word in enumerate(("oak", "elm")):
            self.stores["words"].add(Artifact(id=f"w{number}", data=word))

    async def on_train_end(self):
        await super().on_train_end()
        self.left = (self.stores["words"].count(), self.stores["words"].sample_one().data)


class SpellerAndMaker:
    """Knows how to spell ash, and fir every second time."""

    def __init__(self):
        self.tries = 0

    def __call__(self, request):
        said = request.messages[-1]["content"]
        if said.startswith("A word"):
            return "ash" if "oak" in said else "fir"
        self.tries += said == "Spell fir."
        return "a-s-h" if said == "Spell ash." else "f-i-r" if self.tries % 2 else "no idea"


async def train_words(arena):
    async with arena.training():
        return await arena.step(concurrency=4)


def words(credit):
    arena = WordArena(ScriptedClient(SpellerAndMaker()), credit)
    arena.add_actor(Actor(id="Maker", system_prompt="You make words.", max_tokens=16))
    arena.add_actor(Actor(id="Speller", system_prompt="You spell.", max_tokens=None))
    arena.add_episode("make", MakeEpisode(attempts=4))
    arena.add_episode("spell", SpellEpisode())
    arena.add_store("words")
    return arena


@pytest.mark.filterwarnings("error")
def test_a_nested_program_with_hooks_stores_and_a_credit_rule_in_second_place():
    """All four spell one word, two of four the other: the makers earn 0.5 and 1, a quarter below and above the mean."""
    arena = words(GRPOCredit(normalize=False))
    batch = asyncio.run(train_words(arena))
    assert arena.credit_assigner.normalize is False
    assert {r.rollout.extras["word"]: r.rewards["Maker"] for r in arena.last_results} == {"ash": 0.5, "fir": 1.0}
    assert sorted(batch.advantages.tolist()) == [-0.25, 0.25]
    assert batch.actors == ["Maker"] and batch.dropped == {"not_trainable": 8}
    assert arena.left[0] == 2 and arena.left[1] in ("oak", "elm")


# -- a game of two -----------------------------------------------------------------------------------------------------
