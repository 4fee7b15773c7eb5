from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest

from turnwise.samples.collect import collect_samples
from turnwise.types import GenerateResult, Rollout, RowColumn, Step, StepFacts


def step(actor: str | None = "solver", **fields: Any) -> Step:
    defaults: dict[str, Any] = {
        "turn": 0,
        "prompt": [],
        "completion": "4",
        "prompt_token_ids": [1, 17],
        "completion_token_ids": [20, 2],
        "completion_logprobs": [-0.1, -0.2],
        "policy_versions": [(2, 7)],
        "finish_reason": "stop",
    }
    return Step(actor, **(defaults | fields))


def result(name: str, steps: list[Step], rewards: dict[str, float], **fields: Any) -> GenerateResult:
    error = fields.pop("error", None)
    return GenerateResult(Rollout(name, "solve", "q", steps, rewards, error=error), **fields)


def test_every_field_comes_across() -> None:
    own = {"info": {"loss_mask": [1, 0]}, "facts": StepFacts(temperature=0.7)}
    given = step(turn=2, branch=3, tree_node=5, policy="p", reward=0.25, group=("g",), **own)
    [sample] = collect_samples([result("r", [given], {"solver": 1.0}, group_id="q-1", parent_id="top")])
    assert (sample.group_id, sample.episode_type, sample.actor) == ("q-1", "solve", "solver")
    assert (sample.turn, sample.branch, sample.tree_node, sample.parent_rollout_id) == (2, 3, 5, "top")
    assert (sample.rollout_id, sample.step_index, sample.policy, sample.group) == ("r", 0, "p", ("g",))
    assert (sample.prompt_token_ids, sample.completion_token_ids) == ([1, 17], [20, 2])
    assert (sample.rollout_logprobs, sample.policy_versions) == ([-0.1, -0.2], [(2, 7)])
    assert (sample.reward, sample.trajectory_reward) == (0.25, 1.0)
    assert (sample.temperature, sample.loss_mask) == (0.7, [1, 0])
    assert sample.info is given.info and sample.facts is given.facts and sample.step is given
    # The rollout's reward stands in for the steps.
    first, second = collect_samples([result("r", [step(), step(reward=0.5)], {"solver": 1.0})])
    assert (first.reward, second.reward, second.trajectory_reward) == (1.0, 0.5, 1.0)
    assert (first.has_step_reward, second.has_step_reward) == (False, True)
    [only_step] = collect_samples([result("r", [step(reward=0.5)], {})])
    assert (only_step.reward, only_step.trajectory_reward) == (0.5, 0.5)


def test_what_is_left_out_keeps_its_place_in_the_count() -> None:
    left_out = [step(None), step(trainable=False), step(finish_reason="abort"), step(completion_token_ids=[])]
    steps = [*left_out, step(finish_reason="length")]
    samples = collect_samples([result("r", steps, {"solver": 1.0})])
    assert [(sample.step_index, sample.finish_reason) for sample in samples] == [(4, "length")]
    # Children are asked for themselves.
    grandchild = result("c", [step()], {"solver": 1.0}, parent_id="b")
    failed = result("b", [step()], {}, children=[grandchild], error="Traceback")
    top = result("a", [step()], {}, children=[failed, result("d", [step()], {"solver": 0.0})], is_trainable=False)
    assert [sample.rollout_id for sample in collect_samples([top])] == ["c", "d"]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_missing_or_no_number(reward: float) -> None:
    for own, given in ((reward, 0.0), (0.0, reward)):
        with pytest.raises(ValueError, match=r"step 0 \(actor 'solver'\) of rollout 'r-9'.*finite"):
            collect_samples([result("r-9", [step(reward=own)], {"solver": given})])
    with pytest.raises(ValueError, match=r"'solver'.*no reward.*\['critic'\]"):
        collect_samples([result("r", [step()], {"critic": 1.0})])
    with pytest.raises(TypeError, match="must be real number, not str"):
        collect_samples([result("r", [step(reward="3")], {"solver": 1.0})])


def drawn_step(draw: random.Random) -> Step:
    return step(
        draw.choice(["solver", "solver", "critic", None]),
        reward=draw.choice([None, None, 0, -1.5, True, Fraction(1, 4)]),
        trainable=draw.random() < 0.9,
        finish_reason=draw.choice(["stop", "stop", "length", "abort", "".join(["ab", "ort"])]),
        completion_token_ids=draw.choice([[3], [3, 4], []]),
        info=draw.choice([{}, {"ends": (1,)}, {"ends": (0, 1)}]),
    )


def drawn_result(draw: random.Random, name: str, depth: int = 0) -> GenerateResult:
    children = [drawn_result(draw, f"{name}.{child}", depth + 1) for child in range(draw.randint(0, 3 - depth))]
    steps = [drawn_step(draw) for _ in range(draw.choice([0, 1, 3, 40]))]
    node = result(name, steps, {"solver": draw.random(), "critic": 2}, children=children)
    node.is_trainable = draw.random() < 0.9
    node.rollout.error = "Traceback" if draw.random() < 0.1 else None
    if draw.random() < 0.3:
        ends = {"solver": 7.0, "critic": 8.0}, {"solver": 9, "critic": 1}
        node.rollout.meta["ends"] = [{"rewards": rewards} for rewards in ends]
    else:
        for one in steps:
            one.info.pop("ends", None)
    return node


@pytest.mark.parametrize("seed", range(60))
def test_samples_are_the_trainable_calls(seed: int) -> None:
    draw = random.Random(seed)
    results = [drawn_result(draw, str(number)) for number in range(draw.choice([0, 1, 40]))]
    expected = []
    for top in results:
        for node in top.walk():
            for index, one in enumerate(node.rollout.steps):
                if node.rollout.error is not None or not node.is_trainable or one.actor_id is None:
                    continue
                if one.trainable and one.finish_reason != "abort" and one.completion_token_ids:
                    of_actor = node.rollout.rewards_of(one)[one.actor_id]
                    of_step = of_actor if one.reward is None else one.reward
                    expected.append((top, node.rollout.id, index, one.actor_id, float(of_step), float(of_actor)))
    samples = collect_samples(results)
    rows = [(s.root_result, s.rollout_id, s.step_index, s.actor, s.reward, s.trajectory_reward) for s in samples]
    assert rows == expected, f"seed {seed}"
    assert all(type(sample.reward) is type(sample.trajectory_reward) is float for sample in samples)


@pytest.mark.parametrize("seed", range(30))
def test_samples_that_are_used_again_are_as_new_ones(seed: int) -> None:
    draw = random.Random(seed)
    results = [drawn_result(draw, str(number)) for number in range(12)]
    earlier = collect_samples(results)
    for sample in earlier:  # as a stage and an override of assign_credit may leave them
        sample.reward, sample.trajectory_reward, sample.weight = -9.0, -9.0, 0.5
        sample.columns["x"] = RowColumn(1)
        sample.advantage = 7.0
    steps = [one for top in results for node in top.walk() for one in node.rollout.steps]
    for one in steps:
        one.advantage = draw.random()
        one.reward = draw.choice([one.reward, 2.5, None])
        if draw.random() < 0.2:
            one.info["loss_mask"], one.info["token_advantages"] = [1], [0.5]
    if steps and seed % 2:
        draw.choice(steps).trainable ^= True
    fresh, again = collect_samples(results), collect_samples(results, earlier)
    assert again == fresh and [s.columns.keys() for s in again] == [s.columns.keys() for s in fresh]
    pairs = zip(again, fresh, strict=True)
    assert all(a.step is b.step and a.root_result is b.root_result for a, b in pairs)
    assert seed % 2 or all(one is other for one, other in zip(again, earlier, strict=True))
