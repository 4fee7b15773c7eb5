"""Group in group, by hand and against a float64 brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.credit import GiGPOCredit
from turnwise.types import Sample


def walk(make: Any, name: str, rewards: list[float], states: str, **fields: Any) -> list[Sample]:
    return [
        make(name, reward=reward, turn=turn, step_index=turn, info={"state": state}, **fields)
        for turn, (reward, state) in enumerate(zip(rewards, states, strict=True))
    ]


def test_worked_values(make: Any) -> None:
    """Both start in S; ``a`` goes on to X and wins, ``b`` comes back to S and loses. Returns with gamma 0.5:
    in S there are 0.5 (a), 0 and 0 (b); X was met once. Episodes: 1 and 0."""
    samples = walk(make, "a", [0.0, 1.0], "SX") + walk(make, "b", [0.0, 0.0], "SS")
    advantages = GiGPOCredit(gamma=0.5, omega=2.0, scale="none").compute_columns(samples)
    third = 0.5 / 3
    expected = [0.5 + 2 * (0.5 - third), 0.5, -0.5 - 2 * third, -0.5 - 2 * third]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_equals_brute_force(make: Any, reference: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for copy in range(10):
        size = int(rng.integers(1, 6))
        states = "".join(rng.choice(list("STUV"), size=size))
        samples += walk(make, f"t{copy}", rng.random(size).tolist(), states, group_id=f"q{copy % 2}")
    returns = {
        id(s): sum(
            0.9 ** (o.turn - s.turn) * o.reward for o in samples if o.rollout_id == s.rollout_id and o.turn >= s.turn
        )
        for s in samples
    }
    totals = {s.rollout_id: sum(o.reward for o in samples if o.rollout_id == s.rollout_id) for s in samples}
    episodes = reference(samples, lambda s: s.group_id, lambda s: s.rollout_id, lambda s: totals[s.rollout_id])
    steps = reference(samples, lambda s: (s.group_id, s.info["state"]), id, lambda s: returns[id(s)])
    advantages = GiGPOCredit(gamma=0.9, omega=0.5).compute_columns(samples)
    np.testing.assert_allclose(advantages, episodes + 0.5 * steps, rtol=1e-5, atol=1e-6, err_msg=f"seed {seed}")


def test_without_a_named_state_the_prompt_is_the_anchor(make: Any) -> None:
    def rows() -> list[Sample]:
        return [make("a", reward=1.0, prompt_token_ids=[1, 2]), make("b", reward=0.0, prompt_token_ids=[1, 2])]

    same = GiGPOCredit().compute_columns(rows())
    apart = rows()
    apart[1].prompt_token_ids = [1, 3]
    np.testing.assert_allclose(same, [2 * 0.5**0.5, -2 * 0.5**0.5], atol=1e-5)
    np.testing.assert_allclose(GiGPOCredit().compute_columns(apart), same / 2, rtol=1e-6)
    mine = GiGPOCredit(anchor=lambda sample: "everywhere").compute_columns(apart)
    np.testing.assert_array_equal(mine, same)


def test_questions_and_actors_do_not_share_anchors(make: Any) -> None:
    samples = [make("a", reward=1.0), make("b", reward=0.0, group_id="other"), make("c", "verifier", reward=5.0)]
    assert GiGPOCredit().compute_columns(samples).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("options", "name"), [({"gamma": -0.1}, "gamma=-0.1"), ({"omega": -1.0}, "omega=-1.0")])
def test_options_are_checked(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        GiGPOCredit(**options)
    with pytest.raises(TypeError, match="anchor='state': expected a callable"):
        GiGPOCredit(anchor="state")


def test_a_state_that_cannot_be_compared_is_named(make: Any) -> None:
    with pytest.raises(TypeError, match="list"):
        GiGPOCredit().compute_columns([make("a", info={"state": [1]}), make("b", info={"state": [1]})])
