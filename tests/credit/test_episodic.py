from __future__ import annotations

from typing import Any

from turnwise.credit import EpisodicCredit


def test_the_rollouts_reward_as_it_is(make: Any) -> None:
    samples = [make("a", reward=9.0, trajectory_reward=1.5), make("a", trajectory_reward=1.5), make("b", reward=-2.0)]
    assert EpisodicCredit().compute_columns(samples).tolist() == [1.5, 1.5, -2.0]
