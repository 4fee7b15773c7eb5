from __future__ import annotations

import math
from typing import Any

import pytest

from turnwise.samples import collect_samples
from turnwise.types import GenerateResult, Rollout, Step


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
    given = step(
        turn=2,
        branch=3,
        parent=5,
        policy="p",
        reward=0.25,
        group=("g",),
        info={"temperature": 0.7, "loss_mask": [1, 0]},
    )
    [sample] = collect_samples([result("r", [given], {"solver": 1.0}, uid="q-1", parent_id="top")])
    assert (sample.uid, sample.episode_type, sample.actor) == ("q-1", "solve", "solver")
    assert (sample.turn, sample.branch, sample.parent, sample.parent_node) == (2, 3, 5, "top")
    assert (sample.trajectory, sample.step_index, sample.policy, sample.group) == ("r", 0, "p", ("g",))
    assert (sample.prompt_token_ids, sample.completion_token_ids) == ([1, 17], [20, 2])
    assert (sample.rollout_logprobs, sample.policy_versions) == ([-0.1, -0.2], [(2, 7)])
    assert (sample.reward, sample.trajectory_reward) == (0.25, 1.0)
    assert (sample.temperature, sample.loss_mask) == (0.7, [1, 0])
    assert sample.info is given.info


def test_the_rollouts_reward_stands_in_for_the_steps() -> None:
    first, second = collect_samples([result("r", [step(), step(reward=0.5)], {"solver": 1.0})])
    assert (first.reward, second.reward, second.trajectory_reward) == (1.0, 0.5, 1.0)
    assert (first.scored, second.scored) == (False, True)
    [only_step] = collect_samples([result("r", [step(reward=0.5)], {})])
    assert (only_step.reward, only_step.trajectory_reward) == (0.5, 0.5)


def test_what_is_left_out_keeps_its_place_in_the_count() -> None:
    steps = [
        step(None),
        step(trainable=False),
        step(finish_reason="abort"),
        step(completion_token_ids=[]),
        step(finish_reason="length"),
    ]
    samples = collect_samples([result("r", steps, {"solver": 1.0})])
    assert [(sample.step_index, sample.finish_reason) for sample in samples] == [(4, "length")]


def test_children_are_asked_for_themselves() -> None:
    grandchild = result("c", [step()], {"solver": 1.0}, parent_id="b")
    failed = result("b", [step()], {}, children=[grandchild], error="Traceback")
    top = result("a", [step()], {}, children=[failed, result("d", [step()], {"solver": 0.0})], is_trainable=False)
    assert [sample.trajectory for sample in collect_samples([top])] == ["c", "d"]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["step", "rollout"])
def test_a_reward_that_is_no_number(reward: float, where: str) -> None:
    bad = result(
        "r-9", [step(reward=reward if where == "step" else 0.0)], {"solver": reward if where == "rollout" else 0.0}
    )
    with pytest.raises(ValueError, match=r"step 0 \(actor 'solver'\) of rollout 'r-9'.*finite"):
        collect_samples([bad])


def test_a_missing_reward() -> None:
    with pytest.raises(ValueError, match=r"'solver'.*no reward.*\['critic'\]"):
        collect_samples([result("r", [step()], {"critic": 1.0})])
