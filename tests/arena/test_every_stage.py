"""What all stages have in common: their order, their state, and what two of them make of one reward."""

from __future__ import annotations

import asyncio
import itertools
import json

import numpy as np
import pytest

from turnwise.arena import Distillation, MultiTurnEpisode, OverlongPenalty, Rubric, Stage
from turnwise.arena.stages.registry import STAGES, classes
from turnwise.arena.stages.stages import Stages
from turnwise.types import EpisodeRequest, Sampling

from .conftest import FakeClient
from .helpers import Guess


def stage(name, **attributes):
    return type(name, (Stage,), {"name": name, **attributes})()


# ---- the list --------------------------------------------------------------------------------------------------------
def test_stages_run_in_the_order_that_they_ask_for():
    given = [stage("c", after=("a", "b")), stage("b"), stage("a", before=("b",))]
    for order in itertools.permutations(given):
        names = [each.name for each in Stages(order)]
        assert names.index("a") < names.index("b") < names.index("c")
    with pytest.raises(ValueError, match=r"stages \['x', 'y'\]: each has to run after another"):
        Stages([stage("x", after=("y",)), stage("y", after=("x",))])
    with pytest.raises(TypeError, match=r"expected a turnwise\.arena\.Stage"):
        Stages([object()])


def test_a_stage_replaces_the_one_of_its_name_and_has_its_place(make_arena):
    arena = make_arena(stages=[OverlongPenalty(4)])
    names = [each.name for each in arena.stages]
    arena.add_stage(OverlongPenalty(9))
    assert [each.name for each in arena.stages] == names and arena.stages["overlong"].buffer == 9
    with pytest.raises(KeyError, match="no stage 'other', expected one of"):
        arena.stages["other"]


def test_the_stages_of_a_trainer_leave_with_the_next_one():
    stages = Stages([stage("own")])
    stages.bring([stage("kl"), stage("league")])
    stages.bring([stage("marks")])
    assert [each.name for each in stages] == ["own", "marks"]


def test_the_registry_has_one_name_for_each_and_an_order_that_suits_all():
    found = classes(STAGES)
    names = [kind.name for kind in found]
    assert len(set(names)) == len(names)
    for place, kind in enumerate(found):
        assert not set(kind.after) & set(names[place:]) and not set(kind.before) & set(names[:place]), kind
        assert (kind.changes is None) == (kind.effect is None), kind


def test_states_are_saved_by_name_and_an_evaluation_has_none_of_them(make_arena):
    class Counting(Stage):
        name = "counting"
        count = 0

        def packed(self, arena, results):
            self.count += len(results)
            return {"counted": self.count}

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    arena = make_arena(episodes=[Guess()], stages=[Counting()])
    arena.source = lambda: [EpisodeRequest("guess", "a digit")]
    assert [asyncio.run(arena.step()).metrics["counted"] for _ in range(2)] == [1, 2]
    state = json.loads(json.dumps(arena.state_dict()))
    assert state["stages"] == {"counting": {"count": 2}}
    asyncio.run(arena.evaluation().generate_rollouts(arena.source()))
    other = make_arena(episodes=[Guess()], stages=[Counting()])
    other.load_state_dict(state)
    assert other.stages["counting"].count == arena.stages["counting"].count == 2
    assert "counting" not in arena.evaluation().stages


# ---- two of them on one reward ---------------------------------------------------------------------------------------
class Steps(MultiTurnEpisode):
    """Two turns, each of which earns 8."""

    episode_type = "steps"
    actors = ("solver",)
    max_turns = 2
    rubric = Rubric([lambda: 8.0])

    def get_prompt(self, artifact):
        return "Go"

    def env_response(self, state, arena, artifact):
        return None

    def step_reward(self, state, arena, artifact):
        return 8.0


class Rewards:
    """The advantage of a call is its reward."""

    def compute_columns(self, samples):
        return np.array([sample.reward for sample in samples], np.float32)


class Scoring(FakeClient):
    """A teacher that finds each token ``e`` times as likely as the sampler did."""

    async def score(self, requests, completions):
        return [[0.5] * len(ids) for ids in completions]


class Taken(Stage):
    """Takes 1 from each reward before credit, as a KL in the reward does."""

    name, changes, effect = "kl", "rewards", "adds"

    def collected(self, arena, samples):
        for sample in samples:
            sample.reward -= 1.0
            sample.trajectory_reward -= 1.0


class Halved(Stage):
    """Halves each advantage."""

    name, changes, effect = "halved", "advantages", "scales"
    after = ("distillation",)

    def credited(self, arena, results, samples, notes):
        for top in results:
            for step in top.rollout.steps:
                step.advantage /= 2


KINDS = {
    "turn_shaping": (None, lambda reward: reward / 2),  # the first of two turns
    "overlong": (OverlongPenalty(4, 2.0), lambda reward: reward - 1.0),  # 2 of 4 tokens of the buffer
    "kl": (Taken(), lambda reward: reward - 1.0),
    "distillation": (Distillation(teachers={"solver": "big"}), lambda reward: 0.0),
    "halved": (Halved(), lambda reward: reward / 2),
}
"""Stages that change a reward or an advantage, in their order, and what each makes of the first turn's."""


def test_the_table_has_every_stage_that_changes_something():
    assert {kind.name for kind in classes(STAGES) if kind.changes} <= KINDS.keys()


def test_a_batch_that_is_credited_again_has_each_change_once(make_arena):
    arena = make_arena(episodes=[Steps()], credit=Rewards(), stages=[Taken(), Distillation(teachers={"solver": "big"})])
    arena.client = Scoring(lambda *_: "abc")
    results = asyncio.run(arena.generate_rollouts([EpisodeRequest("steps", "x")]))
    for _ in range(2):
        arena.assign_credit(results)
        for step in results[0].rollout.steps:
            assert step.facts.ledger == [["reward", "kl", 8.0, 7.0], ["advantage", "distillation", 7.0, 0.0]]


@pytest.mark.parametrize("pair", list(itertools.combinations(KINDS, 2)), ids=" and ".join)
@pytest.mark.parametrize("turned", [False, True], ids=["as listed", "added the other way round"])
def test_two_stages_change_a_reward_one_after_the_other(make_arena, pair, turned):
    added = [KINDS[name][0] for name in (pair[::-1] if turned else pair) if KINDS[name][0] is not None]
    arena = make_arena(
        episodes=[Steps()],
        credit=Rewards(),
        sampling=Sampling(max_tokens=6),
        stages=added,
        reward={"turn_shaping": "ramp" if "turn_shaping" in pair else "none"},
    )
    arena.client = Scoring(lambda *_: "abc")  # four tokens with the stop token
    arena.source = lambda: [EpisodeRequest("steps", "x")]
    batch = asyncio.run(arena.step())
    assert arena.last_results[0].rollout.error is None, arena.last_results[0].rollout.error
    value, chain = 8.0, []
    for name in pair:
        before, value = value, KINDS[name][1](value)
        chain += [(name, before, value)] * (before != value)
    step = arena.last_results[0].rollout.steps[0]
    assert step.advantage == value == batch.advantages[0]
    noted = [(name, before, after) for _, name, before, after in step.facts.ledger or ()]
    assert noted == chain


def test_two_stages_that_replace_the_advantages_are_refused(make_arena):
    taught = Distillation(teachers={"solver": "big"})
    other = stage("other", changes="advantages", effect="replaces")
    with pytest.raises(ValueError, match=r"\['distillation', 'other'\]: expected one that replaces"):
        make_arena(stages=[taught, other])
