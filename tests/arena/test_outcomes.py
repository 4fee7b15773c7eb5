"""Rewards and reward functions of an actor have one denominator, in training, in evaluation and in trees."""

from __future__ import annotations

from collections import Counter

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric, TreeSampler, parsing
from turnwise.inference import ScriptedClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.samples.pack import pack
from turnwise.samples.step_metrics import describe
from turnwise.train.eval.evaluate import evaluate
from turnwise.train.log.metrics import summarize
from turnwise.types import Actor, EpisodeRequest


def gain(extras):
    """Pay the buyer, and only for a trade."""
    return {"buyer": 8.0} if extras["said"] != [0, 0] else {}


def form(extras):
    return {"buyer": 1.0, "seller": 1.0}


def traded(extras):
    """Measure the pair."""
    return {"pair": float(extras["said"] != [0, 0])}


class Trade(MultiTurnEpisode):
    """A buyer and a seller say a number each."""

    episode_type, actors, max_turns = "trade", ("buyer", "seller"), 1
    rubric = Rubric([gain, form, traded], [1.0, 0.5, 0.0])

    def setup(self, state, arena, artifact):
        state.data["said"] = []

    def build_messages(self, state, arena, artifact):
        return [{"role": "user", "content": f"<{artifact} {state.current_actor}>"}]

    def env_response(self, state, arena, artifact):
        with parsing():
            state.data["said"].append(int(state.last_completion_text))

    def get_extras(self, state):
        return {"said": list(state.data["said"])}


GAMES = [("1", "2"), ("0", "0"), ("1", "no"), ("no",)]
"""A trade, none, an invalid action of the seller, and one of the buyer, before the seller acts."""


def arena_of(games, **options):
    tokenizer, asked = ByteTokenizer(), Counter()

    def says(request):
        text = tokenizer.decode(list(request.prompt_token_ids))
        question, actor = text[text.index("<") + 1 : text.index(">")].split()
        asked[question, actor] += 1
        said = games[int(question)][Trade.actors.index(actor)]
        return said[asked[question, actor] - 1] if isinstance(said, list) else said

    arena = Arena(ScriptedClient(says, tokenizer=tokenizer), tokenizer)
    for actor in Trade.actors:
        arena.add_actor(Actor(actor))
    arena.add_episode(Trade(**options))
    return arena, [EpisodeRequest("trade", number, group_id=number) for number in range(len(games))]


def numbers_of(arena, results, metric):
    numbers = describe(results, arena.reward_functions)
    return summarize(pack([], {}, numbers), results, metric, arena.episodes, rubrics=arena.reward_functions)


async def test_a_reward_is_the_weighted_sum_of_its_functions():
    arena, requests = arena_of(GAMES)
    results = await arena.generate_rollouts(requests)
    numbers = numbers_of(arena, results, "traded")
    assert (numbers["metric/gain/buyer"], numbers["metric/form/buyer"]) == (2.0, 0.5), "of four episodes"
    assert numbers["reward/buyer"] == 2.0 + 0.5 * 0.5
    assert numbers["metric/form/seller"] == pytest.approx(2 / 3) and numbers["reward/seller"] == pytest.approx(1 / 3)
    assert numbers["metric/traded/pair"] == 0.25 == numbers["success"], "a pair takes part in each episode"
    found = await evaluate(arena, requests, "traded")
    assert found.success == 0.25 and not found.gap
    means = {name if name.startswith("reward/") else f"metric/{name}": at.mean for name, at in found.estimates.items()}
    assert means == {name: value for name, value in numbers.items() if name.startswith(("reward/", "metric/"))}
    assert {"metric/gain/seller", "metric/traded/buyer", "metric/traded/seller"}.isdisjoint(numbers)


@pytest.mark.parametrize(("metric", "success"), [("form/seller", 0.0), ("traded", 0.0), ("unknown", None)])
async def test_success_is_0_where_no_episode_came_to_be_scored(metric, success):
    arena, requests = arena_of([("no",), ("no",)])
    results = await arena.generate_rollouts(requests)
    assert numbers_of(arena, results, metric).get("success") == success
    found = await evaluate(arena, requests, metric)
    assert (None if found.gap else found.success) == success


async def test_in_a_tree_each_end_counts():
    """One branch of the buyer trades; its other one is no action, and no seller acts there."""
    arena, requests = arena_of([(["1", "no"], "2")], sampler=TreeSampler(branches={"buyer": 2}, select="none"))
    (result,) = await arena.generate_rollouts(requests)
    assert [end["rewards"] for end in result.rollout.meta["ends"]] == [{"buyer": 8.5, "seller": 0.5}, {"buyer": 0.0}]
    numbers = describe([result], arena.reward_functions)
    assert (numbers["reward/buyer"], numbers["metric/gain/buyer"], numbers["metric/form/buyer"]) == (4.25, 4.0, 0.5)
    assert (numbers["reward/seller"], numbers["metric/form/seller"]) == (0.5, 1.0)
