from __future__ import annotations

import pytest

from turnwise.train.config.policies import PhaseConfig
from turnwise.train.config.schedule import policies_at, steps_in_training

PHASES = [PhaseConfig(train=["a"], steps=2), PhaseConfig(train=["b"], steps=1), PhaseConfig(train=["a", "b"], steps=1)]


def test_phases_follow_one_another_and_begin_anew():
    trained = ["".join(sorted(policies_at(step, PHASES, ["a", "b", "c"]))) for step in range(9)]
    assert trained == ["a", "a", "b", "ab", "a", "a", "b", "ab", "a"]
    assert policies_at(2, PHASES, ["a"]) == set()
    assert policies_at(7, [], ["a", "b"]) == {"a", "b"}


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 7, 12])
def test_the_steps_of_a_policy_are_counted(steps):
    for name in ("a", "b", "c"):
        counted = sum(name in policies_at(step, PHASES, [name]) for step in range(steps))
        assert steps_in_training(name, steps, PHASES) == counted
    assert steps_in_training("a", steps, []) == steps
