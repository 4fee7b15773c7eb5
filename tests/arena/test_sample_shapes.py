"""Whole programs in the shape that samples of self-play arenas have: nothing but the import line is turnwise's."""

from __future__ import annotations

import asyncio

import pytest

from turnwise import Actor, Arena, Episode, EpisodeRequest, MultiTurnEpisode, RAECredit, Rubric, SingleTurnEpisode
from turnwise.credit import GRPOCredit, HierarchyCredit
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


class Step(WordArena):
    """The main path written out, in place of ``step``."""

    async def step(self, concurrency=8):
        requests = self.get_batch()
        for request in requests:
            request.meta["policy_version"] = self.client.version("default")
        results = await self.generate_rollouts(requests, concurrency)
        if self.credit_assigner:
            self.assign_credit(results)
        self.last_results = results
        return self.build_training_batch(results)


def test_a_step_of_ones_own_outside_of_the_trainer():
    arena = words(HierarchyCredit(normalize=False))
    arena.__class__ = Step
    asyncio.run(train_words(arena))
    assert sorted(r.rollout.steps[0].advantage for r in arena.last_results) == [-0.25, 0.25]


# -- a game of two -----------------------------------------------------------------------------------------------------


class HigherEpisode(MultiTurnEpisode):
    """Each names a number; the higher one wins, and what each may name at most is a secret."""

    @property
    def episode_type(self):
        return "higher"

    @property
    def rubric(self):
        return Rubric(funcs=[self.outcome])

    def get_initial_actor(self):
        return "Player0"

    def get_observation(self, state, arena, artifact):
        limits = state.data.setdefault("limits", {"Player0": 5, "Player1": 7})
        return f"You may say up to {limits[state.current_actor]}."

    def env_response(self, state, arena, artifact):
        state.data[state.current_actor] = int(state.last_completion_text)
        return f"{state.current_actor} has spoken."

    def is_done(self, state, arena, artifact):
        return state.turn >= self.max_turns or "Player1" in state.data

    def get_extras(self, state):
        return {"said": [state.data["Player0"], state.data["Player1"]]}

    def outcome(self, rollout, arena):
        first, second = rollout.extras["said"]
        won = float((first > second) - (first < second))
        return {"Player0": won, "Player1": -won}


class GameArena(Arena):
    def get_batch(self):
        return [EpisodeRequest("higher", "a round") for _ in range(4)]


def play(credit):
    said = iter(["5", "2", "1", "3", "4", "6", "5", "1"])
    arena = GameArena(ScriptedClient(lambda request: next(said)), credit)
    arena.add_actor(Actor(id="Player0", system_prompt="You go first."))
    arena.add_actor(Actor(id="Player1", system_prompt="You go second."))
    arena.add_episode("higher", HigherEpisode())
    batch = asyncio.run(arena.step(concurrency=1))
    return arena, batch


def test_a_zero_sum_game_is_won_by_seat():
    """Player0 wins twice and loses twice. What it won is above its mean; RAE's first baseline is 0."""
    for credit in (HierarchyCredit(normalize=False), RAECredit(0.9)):
        arena, batch = play(credit)
        won = {row.rewards["Player0"] for row in arena.last_results}
        assert won == {1.0, -1.0} and batch.metrics["ended/max_turns"] == 0.0
        assert batch.advantages.tolist() == batch.rewards.tolist() and len(batch) == 8
        told = [m["content"] for row in arena.last_results for s in row.rollout.steps for m in s.prompt]
        assert sum("up to 7" in text for text in told) == 4, "the observation never reaches the other"


def test_grpo_of_whole_trajectories_says_that_it_learns_nothing_from_it():
    with pytest.warns(UserWarning, match="GRPOCredit: the actors of each trajectory share one value"):
        _, batch = play(GRPOCredit())
    assert len(batch) == 0 and batch.dropped == {"equal_rewards": 8}
