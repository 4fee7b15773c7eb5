"""The mix of rewards: its numbers, steps and rollouts alike, the difference, turns, and what an episode can't serve."""

from __future__ import annotations

import re

import pytest

from turnwise.arena import (
    Episode,
    InvalidActionError,
    MultiTurnEpisode,
    RewardMix,
    RewardParts,
    Rubric,
    SingleTurnEpisode,
    TreeSampler,
)
from turnwise.arena.rewards.mix import shape_turns
from turnwise.credit import DrMASCredit
from turnwise.types import EpisodeRequest, Rollout, Step, StepFacts

from .helpers import said


# --- numbers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mix", "parts", "difference", "reward"),
    [
        ({"alpha": 0.4}, (1.0, 0.5), 0.0, 0.9),
        ({"alpha": 0.4, "mode": "convex"}, (1.0, 0.5), 0.0, 0.7),
        ({}, (0.0, 0.75), 0.0, 0.75),
        ({"alpha": 3.0}, (1.0, 1.0), 0.0, 4.0),
        ({"invalid_cost": 0.25}, (1.0, 0.5, False), 0.0, 1.25),
        ({"difference": 2.0}, (0.0, 0.5), 0.25, 1.0),
        ({"difference": 2.0}, (0.0, 0.5), -0.25, 0.0),
        ({"threshold": 1.5}, (1.0, 0.5), 0.0, 1.0),
        ({"threshold": 1.5}, (1.0, 0.49), 0.0, 0.0),
        ({"threshold": 1.5, "difference": 1.0, "invalid_cost": 0.25}, (1.0, 0.5, False), -0.5, 0.25),
    ],
)
def test_mixes_by_hand(mix, parts, difference, reward):
    assert RewardMix(**mix).of(RewardParts(*parts), difference) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": 1.5, "mode": "convex"}, r"alpha=1.5.*\[0, 1\]"),
        ({"mode": "sum"}, "mode='sum'.*convex.*weighted_sum"),
        ({"difference": -0.5}, "difference=-0.5"),
        ({"invalid_cost": -1}, "invalid_cost=-1"),
        ({"turn_shaping": "linear"}, "turn_shaping='linear'.*discount.*none.*ramp"),
        ({"turn_shaping": "discount"}, r"gamma=None: expected a number in \(0, 1\]"),
        ({"turn_shaping": "discount", "gamma": 1.5}, "gamma=1.5"),
        ({"turn_shaping": "ramp", "gamma": 0.5}, "gamma=0.5: has no effect without"),
    ],
)
def test_wrong_fields_are_named(fields, named):
    with pytest.raises(ValueError, match=named):
        RewardMix(**fields)


def step(turn, reward, actor="a", **fields):
    return Step(actor, turn, [], "", [1], [2], [-0.1], [(1, 0)], "stop", reward=reward, **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"turn_shaping": "ramp"}, [2.0, 4.0, 6.0]),
        ({"turn_shaping": "discount", "gamma": 0.5}, [2.0, 4.0, 8.0]),
        ({"turn_shaping": "none"}, [8.0, 8.0, None]),
    ],
)
def test_turns_by_hand(fields, expected):
    """Three of four turns were played, each worth 8; the last call has the rollout's reward."""
    rollout = Rollout("r", "e", None, [step(0, 8.0), step(1, 8.0), step(2, None)], {"a": 8.0})
    for _ in range(2):  # the second time changes nothing
        shape_turns(rollout, RewardMix(**fields), 4)
    assert [one.reward for one in rollout.steps] == expected and rollout.rewards == {"a": 8.0}


def test_turns_leave_costs_and_judges_alone():
    """4 of the mix and -1 of costs: half of the former. An action that ended the episode, a judge and the lost stay."""
    mixed = step(0, 3.0, facts=StepFacts(unshaped_reward=-1.0))
    same = [step(0, -1.0, info={"invalid_action": "?"}), step(0, 5.0, None), step(0, 5.0, trainable=False)]
    shape_turns(Rollout("r", "e", None, [mixed, *same]), RewardMix(turn_shaping="ramp"), 2)
    assert [mixed.reward, *(one.reward for one in same)] == [1.0, -1.0, 5.0, 5.0]


def test_rewards_by_token_shrink_with_the_turn():
    one = step(0, 3.0, info={"token_rewards": [1.0, 2.0]})
    shape_turns(Rollout("r", "e", None, [one]), RewardMix(turn_shaping="ramp"), 4)
    assert one.reward == 0.75 and one.info["token_rewards"] == [0.25, 0.5]


# --- an episode's steps and its rubric --------------------------------------------------------------------------------
def right(extras):
    return {actor: extras["right"] for actor in ("writer", "editor")}


def short(extras):
    return extras["short"]


def readable(extras):
    return extras["readable"]


class Draft(MultiTurnEpisode):
    """A writer and an editor write a digit; 7 is right, the team's value is how close it is. Below 5 is short."""

    episode_type = "draft"
    actors = ("writer", "editor")
    max_turns = 2
    rubric = Rubric([right, short, readable], [1.0, 1.0, 0.0], own=[short], valid=[readable])

    def setup(self, state, arena, artifact):
        state.data.update(digit=0, short={}, readable={})

    def get_prompt(self, artifact):
        return "A digit?"

    def env_response(self, state, arena, artifact):
        said, actor = state.last_completion_text, state.current_actor
        if said == "!":
            raise InvalidActionError("no digit")
        state.data["readable"][actor] = float(said.isdigit())
        state.data["digit"] = int(said) if said.isdigit() else state.data["digit"]
        state.data["short"][actor] = float(state.data["digit"] < 5)

    def reward_parts(self, state, arena, artifact):
        data, actor = state.data, state.current_actor
        return RewardParts(float(data["digit"] == 7), data["short"][actor], data["readable"][actor])

    def team_value(self, state, arena, artifact):
        return 1 - abs(state.data["digit"] - 7) / 7

    def get_extras(self, state):
        return {**state.data, "right": float(state.data["digit"] == 7)}


async def played(make_arena, replies, episode=None, **settings):
    arena = make_arena(said(*replies), actors=("writer", "editor"), **settings, episodes=[episode or Draft()])
    [result] = await arena.generate_rollouts([EpisodeRequest("draft", None)])
    assert result.rollout.error is None, result.rollout.error
    return arena, result


@pytest.mark.parametrize(
    ("reward", "steps", "rollout"),
    [
        (None, [1.0, 1.0, 1.0, 1.0], {"writer": 0.0, "editor": 1.0}),
        ({"alpha": 0.4}, [1.0, 0.4, 0.4, 1.0], {"writer": 0.0, "editor": 1.0}),
        ({"alpha": 0.4, "mode": "convex"}, [0.6, 0.4, 0.4, 0.6], {"writer": 0.0, "editor": 0.6}),
        ({"alpha": 2.0, "threshold": 1.5}, [0.0, 1.0, 1.0, 0.0], {"writer": 0.0, "editor": 0.0}),
    ],
)
async def test_steps_and_rollouts_mix_alike(make_arena, reward, steps, rollout):
    _, result = await played(make_arena, ["4", "7", "7", "3"], reward=reward)
    assert [one.reward for one in result.rollout.steps] == pytest.approx(steps)
    # The last digit is wrong; the writer's last one was not short, the editor's was.
    assert result.rollout.rewards == pytest.approx(rollout)


async def test_a_difference_pays_the_editor_that_mends_and_costs_the_one_that_breaks(make_arena):
    """The digits 5 7 7 0 are worth 5/7 1 1 0: the writer gains 5/7 and 0, the editor 2/7 and -1, before weight 0.7."""
    arena, result = await played(make_arena, ["5", "7", "7", "0"], reward={"alpha": 0.0, "difference": 0.7})
    assert [one.facts.team_difference for one in result.rollout.steps] == pytest.approx([5 / 7, 2 / 7, 0, -1])
    assert [one.reward for one in result.rollout.steps] == pytest.approx([0.5, 0.2, 0.0, 1.0 - 0.7])
    assert result.rollout.rewards == pytest.approx({"writer": 0.5, "editor": 1.0 + 0.2 - 0.7})
    arena.assign_credit([result])
    metrics = arena.build_training_batch([result]).metrics
    assert metrics["team_difference/editor"] == pytest.approx((2 / 7 - 1) / 2)


async def test_costs_of_what_can_not_be_read(make_arena):
    _, result = await played(make_arena, ["?", "7", "7", "7"], reward={"invalid_cost": 0.25})
    assert [one.reward for one in result.rollout.steps] == [1.0 - 0.25, 1.0, 1.0, 1.0]
    assert result.rollout.rewards == {"writer": 1.0, "editor": 1.0}, "the share of the writer's last completion"
    _, result = await played(make_arena, ["4", "!"], reward={"invalid_cost": 0.25})
    assert [one.reward for one in result.rollout.steps] == [1.0, -0.25]


async def test_an_actor_that_never_acted_pays_no_cost(make_arena):
    def neither(extras):
        return {"writer": 0.0, "editor": 0.0}

    class Alone(Draft):
        actors = ("writer",)
        rubric = Rubric([right, neither], [1.0, 0.0], valid=[neither])

    _, result = await played(make_arena, ["7", "7"], Alone(), reward={"invalid_cost": 0.25})
    assert result.rollout.rewards == {"writer": 0.75, "editor": 1.0}


async def test_turns_are_shaped_before_credit(make_arena):
    """With alpha 2, 7 earns 2 and 4 earns 1, half of it in turn 1 of 2. An actor's mean over both games is 9/8."""
    settings = {"reward": {"alpha": 2.0, "turn_shaping": "ramp"}, "credit": DrMASCredit(scale="none")}
    arena, good = await played(make_arena, ["7", "7", "7", "7"], **settings)
    _, bad = await played(make_arena, ["4", "4", "4", "4"], **settings)
    bad.rollout.id = "other"
    assert {one.reward for one in good.rollout.steps} == {2.0} and {one.reward for one in bad.rollout.steps} == {1.0}
    arena.assign_credit([good, bad])
    arena.shape_rewards([good, bad])
    assert [one.reward for one in good.rollout.steps] == [1.0, 1.0, 2.0, 2.0]
    assert [one.reward for one in bad.rollout.steps] == [0.5, 0.5, 1.0, 1.0]
    assert [one.advantage for one in good.rollout.steps] == pytest.approx([-0.125, -0.125, 0.875, 0.875])


async def test_turn_shaping_leaves_differences_and_costs_alone(make_arena):
    """5, then 7, then no digit: own parts 0 0 0 0, outcomes 0 1 1 1; the first turn's outcome counts half."""
    reward = {"alpha": 2.0, "difference": 0.7, "invalid_cost": 0.25, "turn_shaping": "discount", "gamma": 0.5}
    arena, result = await played(make_arena, ["5", "7", "?", "7"], reward=reward)
    assert [one.reward for one in result.rollout.steps] == pytest.approx([0.5, 2.2, 1.75, 2.0])
    arena.shape_rewards([result])
    assert [one.reward for one in result.rollout.steps] == pytest.approx([0.5, 1.2, 1.75, 2.0])


async def test_a_tree_selects_by_the_mix(make_arena):
    """Two branches, 7 and 4: the outcome selects 7, the own part alone selects 4."""
    for alpha, best in ((2.0, "7"), (0.0, "4")):
        episode = Draft(sampler=TreeSampler(2, "best"), max_turns=1)
        _, result = await played(make_arena, ["7", "4"] * 2, episode, reward={"alpha": alpha})
        assert [one.completion for one in result.rollout.steps if one.selected] == [best] * 2


# --- a plain user's episode -------------------------------------------------------------------------------------------
class Plain(Draft):
    """The same game, with a reward for each action and a rubric that knows no parts."""

    rubric = Rubric([right])
    reward_parts = MultiTurnEpisode.reward_parts
    team_value = MultiTurnEpisode.team_value

    def step_reward(self, state, arena, artifact):
        return state.data["digit"] / 10


async def test_a_step_reward_and_a_rubric_stay_as_they_are(make_arena):
    for settings in ({}, {"reward": {"invalid_cost": 0.5}}):
        _, result = await played(make_arena, ["5", "7", "6", "7"], Plain(), **settings)
        assert [one.reward for one in result.rollout.steps] == [0.5, 0.7, 0.6, 0.7]
        assert result.rollout.rewards == {"writer": 1.0, "editor": 1.0}
    _, result = await played(make_arena, ["5", "7", "6", "7"], Plain(), reward={"threshold": 0.6})
    assert [one.reward for one in result.rollout.steps] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"alpha": 0.4}, r"alpha: episode 'draft' has one outcome and no own part: expected reward_parts"),
        ({"mode": "convex"}, "mode: episode 'draft' has one outcome"),
        ({"difference": 1.0}, "difference: episode 'draft' has no team_value"),
        ({"beta": 1.0}, "unknown 'beta'"),
    ],
)
async def test_a_key_that_has_no_meaning_is_refused(make_arena, reward, message):
    with pytest.raises(ValueError, match=message):
        await played(make_arena, ["7"] * 4, Plain(), reward=reward)


def test_what_each_kind_of_episode_serves():
    class Ask(SingleTurnEpisode):
        rubric = Rubric([lambda completion: 1.0])

        def get_prompt(self, artifact):
            return "?"

    class Own(Episode):
        rubric = Rubric([lambda rollouts: [1.0] * len(rollouts), short, readable], own=[short], valid=[readable])

        async def rollout(self, arena, artifact, state=None):
            return state

    turns = {"turn_shaping", "gamma"}
    assert set(Draft().unserved_rewards()) == set()
    assert set(Plain().unserved_rewards()) == {"alpha", "mode", "difference"}
    assert set(Ask().unserved_rewards()) == {"alpha", "mode", "difference", "invalid_cost", *turns}
    assert set(Own().unserved_rewards()) == {"difference", "threshold", *turns}


def wrong(value):
    return type("Wrong", (Draft,), {"reward_parts": lambda self, state, arena, artifact: value})()


class ByToken(Draft):
    reward_parts = MultiTurnEpisode.reward_parts

    def step_reward(self, state, arena, artifact):
        return [1.0] * len(state.trajectory[-1].completion_token_ids)


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (wrong(0.5), r"Wrong.reward_parts for actor 'writer': got 0.5, expected RewardParts\(team, own, valid\)"),
        (wrong((float("nan"), 0.0)), "Wrong.reward_parts for actor 'writer': the reward is nan"),
        (wrong(([1.0], 0.0)), "Wrong.reward_parts for actor 'writer': got .*expected a number"),
        (ByToken(), "ByToken.step_reward for actor 'writer': got rewards by token, expected a number"),
    ],
)
async def test_wrong_parts_are_named(make_arena, episode, message):
    arena = make_arena(said("7"), actors=("writer", "editor"), reward={"difference": 1.0}, failure_threshold=1.0)
    arena.add_episode(episode)
    [result] = await arena.generate_rollouts([EpisodeRequest("draft", None)])
    assert re.search(message, result.rollout.error)


def test_parts_of_a_rubric_are_its_own_functions():
    for name in ("own", "valid"):
        with pytest.raises(ValueError, match=rf"{name}=.*expected some of the rubric's functions \['right'\]"):
            Rubric([right], **{name: [short]})
