"""Text that is no action: the model's own failed answer. Everything else that goes wrong in a hook is a bug."""

from __future__ import annotations

import json

import pytest

from turnwise.arena import (
    Arena,
    Filters,
    InvalidActionError,
    MultiTurnEpisode,
    Rubric,
    SingleTurnEpisode,
    TreeSampler,
    parsing,
)
from turnwise.arena.episode import Episode
from turnwise.inference.scripted import ScriptedClient
from turnwise.samples.collect import collect_samples
from turnwise.samples.training_samples import training_samples
from turnwise.types import Actor, EpisodeRequest


def total(extras):
    return {"left": extras["total"], "right": extras["total"]}


class Count(MultiTurnEpisode):
    """Two add numbers for two rounds; what either earns at the end is the sum, which only a whole game has."""

    episode_type = "count"
    actors = ("left", "right")
    max_turns = 2
    rubric = Rubric([total])
    invalid_reward = -1.0

    def __init__(self, read=int, reward=None, by_step=False, **options):
        super().__init__(**options)
        self.read, self.reward, self.by_step = read, reward, by_step

    def setup(self, state, arena, artifact):
        state.data = {"numbers": []}

    def get_prompt(self, artifact):
        return "Say a number."

    def env_response(self, state, arena, artifact):
        state.data["numbers"].append(0)  # half done when the text turns out to be none
        with parsing(self.reward):
            number = self.read(state.last_completion_text)
        state.data["numbers"][-1] = number
        return f"{state.current_actor} added {number}."

    def step_reward(self, state, arena, artifact):
        return float(state.data["numbers"][-1]) if self.by_step else None

    def get_extras(self, state):
        assert 0 not in state.data["numbers"], "a half changed state is scored"
        return {"total": float(sum(state.data["numbers"]))}


async def play(episode, replies, actors=("left", "right"), **options):
    client = ScriptedClient(replies)
    arena = Arena(client, client.tokenizer, failure_threshold=1.0, **options)
    for actor in actors:
        arena.add_actor(Actor(actor))
    arena.add_episode(episode)
    (result,) = await arena.generate_rollouts([EpisodeRequest(episode.episode_type, "x")])
    return result


async def test_a_text_that_is_no_action_is_that_actors_failed_answer():
    result = await play(Count(), ["3", "4", "five", "never asked"])
    rollout = result.rollout
    assert rollout.error is None and rollout.meta["ended"] == "invalid_action" and rollout.extras == {}
    assert rollout.rewards == {"left": -1.0}
    assert rollout.metrics == {"total/left": 0.0, "total/right": 0.0}
    assert [step.completion for step in rollout.steps] == ["3", "4", "five"]
    assert "invalid literal for int" in rollout.steps[-1].info["invalid_action"]
    # The failed step trains with its reward, and so does what led its actor there; of the other nothing is known.
    assert [(sample.actor, sample.turn, sample.reward) for sample in collect_samples([result])] == [
        ("left", 0, -1.0),
        ("left", 1, -1.0),
    ]
    for step in rollout.steps:
        step.advantage = 1.0
    samples, drops = training_samples([result], Filters())
    assert len(samples) == 2 and drops == {("right", "unpaid"): 1}, "it did not fail"


async def test_the_reward_may_be_named_where_the_text_is_read():
    assert (await play(Count(reward=-7.0), ["four"])).rollout.rewards == {"left": -7.0}
    assert (await play(Count(), ["1", "2", "3", "4"])).rollout.rewards == {"left": 10.0, "right": 10.0}


@pytest.mark.parametrize("error", [NameError("x"), OSError("no disk"), AssertionError("x"), RuntimeError("x")])
async def test_a_bug_in_the_block_still_fails_the_episode(error):
    def read(text):
        raise error

    result = await play(Count(read), ["3"])
    assert type(error).__name__ in result.rollout.error and result.rollout.rewards == {}
    assert not collect_samples([result])


@pytest.mark.parametrize("text", ["[" * 100_000, "{} trailing", "", "3", '{"a": 1}'])
async def test_whatever_a_parser_raises_for_a_text(text):
    def read(said):
        return json.loads(said)["move"]["number"]

    result = await play(Count(read), [text])
    assert result.rollout.error is None and result.rollout.rewards == {"left": -1.0}


@pytest.mark.parametrize("select", ["best", "none"])
async def test_in_a_tree_it_ends_its_own_branch(select):
    """Left says "x" or "5", then right: under "best" the valid branch goes on, under "none" both are ends."""
    sampler = TreeSampler(branches={"left": 2}, select=select)
    replies = ["x", "5", "6", "7", "8", "9", "10"]
    result = await play(Count(by_step=select == "best", sampler=sampler, max_turns=1), replies)
    rollout = result.rollout
    assert rollout.error is None, rollout.error
    assert [step.info.get("invalid_action", "")[:10] for step in rollout.steps] == ["ValueError", "", ""]
    assert rollout.steps[0].reward == -1.0 and len(collect_samples([result])) == 3
    if select == "best":
        assert [step.selected for step in rollout.steps] == [False, True, True] and rollout.meta["ended"] == "max_turns"
    else:
        assert [end["ended"] for end in rollout.meta["ends"]] == ["invalid_action", "max_turns"]
        assert [end["rewards"] for end in rollout.meta["ends"]] == [{"left": -1.0}, {"left": 11.0, "right": 11.0}]


async def test_a_reward_function_gives_what_it_says():
    def correct(completion, artifact):
        with parsing(-0.5):
            number = int(completion)
        return float(number == 4)

    class Sum(SingleTurnEpisode):
        episode_type = "sum"
        rubric = Rubric([correct])

        def get_prompt(self, artifact):
            return "2 + 2 = ?"

    for said, reward in (("4", 1.0), ("5", 0.0), ("four", -0.5)):
        result = await play(Sum(), [said], actors=("solver",))
        assert result.rollout.error is None and result.rollout.rewards == {"solver": reward}
        assert result.rollout.metrics == {"correct/solver": reward}


async def test_a_rollout_of_ones_own():
    class Duel(Episode):
        episode_type = "duel"
        rubric = Rubric([total])

        async def rollout(self, arena, artifact, state=None):
            for actor in ("left", "right"):
                said = (await self.call_model(actor, "Say a number.", arena)).text
                if not said.isdigit():
                    raise InvalidActionError(f"no number in {said!r}", reward=-2.0)
                state.data[actor] = int(said)
            return state

        def get_extras(self, state):
            return {"total": float(state.data["left"] + state.data["right"])}

    result = await play(Duel(), ["3", "nothing"])
    assert result.rollout.error is None and result.rollout.rewards == {"right": -2.0}
    assert [(sample.actor, sample.reward) for sample in collect_samples([result])] == [("right", -2.0)]
    assert (await play(Duel(), ["3", "4"])).rollout.rewards == {"left": 7.0, "right": 7.0}


async def test_nobodys_text_is_no_action():
    class Early(Count):
        def setup(self, state, arena, artifact):
            raise InvalidActionError("too early")

    assert "InvalidActionError: too early" in (await play(Early(), ["3"])).rollout.error


async def test_group_functions_do_not_see_it():
    def most(rollouts):
        return [rollout.extras["total"] for rollout in rollouts]

    class Grouped(Count):
        actors = ("left",)
        max_turns = 1
        rubric = Rubric([most])

    client = ScriptedClient(["3", "x", "4"])
    arena = Arena(client, client.tokenizer)
    arena.add_actor(Actor("left"))
    arena.add_episode(Grouped())
    results = await arena.generate_rollouts([EpisodeRequest("count", "x", group_id="g") for _ in range(3)])
    assert sorted(result.rollout.rewards["left"] for result in results) == [-1.0, 3.0, 4.0]
