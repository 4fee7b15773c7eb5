"""A rule for each task of a run: each computes as alone, keeps its own state and names its own causes."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.credit import GRPOCredit, RAECredit
from turnwise.credit.by_task import CreditByTask
from turnwise.samples.collect import collect_samples
from turnwise.types import GenerateResult, Rollout, Step


def played(kind, number, rewards):
    steps = [
        Step(
            actor_id=actor, turn=0, prompt=[], completion="", prompt_token_ids=[1], completion_token_ids=[2],
            completion_logprobs=[-0.1], policy="default", policy_versions=[(1, 0)], finish_reason="stop",
        )
        for actor in rewards
    ]  # fmt: skip
    return GenerateResult(Rollout(f"{kind}{number}", kind, "q", steps=steps, rewards=rewards), group_id="q")


def test_each_task_is_computed_by_its_own_rule():
    """GRPO of (1, 0, 0, 1) with mean 1/2 and deviation sqrt(1/3); RAE of (1, -1) with decay 0.5: the baseline moves to
    half of the reward, of which the reward's half is left."""
    math = [played("math", i, {"solver": reward}) for i, reward in enumerate((1.0, 0.0, 0.0, 1.0))]
    game = [played("game", 0, {"solver": 1.0, "other": -1.0})]
    mixed = [math[0], game[0], *math[1:]]
    rule = CreditByTask({"m": GRPOCredit(), "g": RAECredit(decay=0.5)}, {"math": "m", "game": "g"})
    samples = collect_samples(mixed)
    got = dict(
        zip([(s.episode_type, s.rollout_id, s.actor) for s in samples], rule.compute_columns(samples), strict=True)
    )
    a = 0.5 / (1 / 3) ** 0.5
    for i, sign in enumerate((1, -1, -1, 1)):
        assert got["math", f"math{i}", "solver"] == pytest.approx(sign * a, abs=1e-5)
    alone = RAECredit(decay=0.5)
    want = alone.compute(game)
    assert got["game", "game0", "solver"] == pytest.approx(want["game0", 0])
    assert got["game", "game0", "other"] == pytest.approx(want["game0", 1])
    # The state is that of the rules, and is restored.
    assert rule.state_dict() == {"g": {"rule": "RAECredit", "state": alone.state_dict()}}
    fresh = CreditByTask({"m": GRPOCredit(), "g": RAECredit(decay=0.5)}, {"math": "m", "game": "g"})
    fresh.load_state_dict(rule.state_dict())
    assert np.array_equal(fresh.compute_columns(samples), rule.compute_columns(samples))


def test_the_same_question_in_two_tasks_is_two_groups_and_causes_are_the_rules_own():
    a = [played("a", i, {"solver": reward}) for i, reward in enumerate((1.0, 1.0))]
    b = [played("b", i, {"solver": reward}) for i, reward in enumerate((0.0, 1.0))]
    rule = CreditByTask({"a": GRPOCredit(), "b": GRPOCredit()}, {"a": "a", "b": "b"})
    samples = collect_samples([*a, *b])
    advantages = rule.compute_columns(samples)
    assert advantages[:2].tolist() == [0.0, 0.0] and advantages[2] == pytest.approx(-advantages[3]) != 0
    assert rule.zero_causes(samples, [0, 1]) == ["equal_rewards", "equal_rewards"]
    keys = [rule.key_of(sample) for sample in samples]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    table = rule.compute([*a, *b])
    assert [table[s.rollout_id, 0] for s in samples] == advantages.tolist()
