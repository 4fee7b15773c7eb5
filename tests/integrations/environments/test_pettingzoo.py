"""PettingZoo: parallel moves, and the rewards of the package's own loop."""

from __future__ import annotations

import pytest

from turnwise.tasks import build_task

from .helpers import played, request_of, said

pytestmark = pytest.mark.needs("pettingzoo", "pygame")
TIC, FOUR, RPS = "pettingzoo:tictactoe_v3", "pettingzoo:connect_four_v3", "pettingzoo:rps_v2"


async def test_both_choose_before_either_is_shown():
    """In rock, paper, scissors the second prompt is the first one's; a round pays 1 and -1; 15 rounds truncate it."""
    task = build_task(RPS, {"parallel": True, "actions": ["rock", "paper", "scissors"]})
    (rollout,) = await played(task, [request_of(task)], said(*["[paper]", "[rock]"] * 15))
    assert [step.actor_id for step in rollout.steps] == ["player_0", "player_1"] * 15
    shown = [step.prompt[-1]["content"].splitlines()[0] for step in rollout.steps[:4]]
    assert shown == ["3", "3", "0", "1"], "nothing (3) before the first round, then what the other chose"
    assert rollout.rewards == {"player_0": 15.0, "player_1": -15.0}
    assert (rollout.extras["terminated"], rollout.extras["truncated"]) == (False, True)


@pytest.mark.parametrize("name", [TIC, FOUR, RPS])
async def test_rewards_are_those_of_the_packages_own_loop(name):
    task = build_task(name)
    for seed, rollout in enumerate(await played(task, [request_of(task, seed) for seed in range(10)])):
        env, earned = task.game.maker(), dict.fromkeys(task.game.actors, 0.0)
        env.reset(seed=seed)
        moves = iter(int(step.completion[1:-1]) for step in rollout.steps)
        for agent in env.agent_iter():
            _, reward, terminated, truncated, _ = env.last()
            earned[agent] += reward
            env.step(None if terminated or truncated else next(moves))
        assert rollout.rewards == earned and sum(earned.values()) == 0, f"seed {seed}"
