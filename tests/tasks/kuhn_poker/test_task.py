"""The task: episodes against the exact value of the policies that play them."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from turnwise.tasks.kuhn_poker import DEALS, KuhnOptions, KuhnPokerTask, equilibrium, solve, table_player


def task(**options):
    return KuhnPokerTask(KuhnOptions(**options))


async def mean_payoff(table, policy, games, **options):
    """Of seat 0 in self-play by ``policy``, over equally many games of each deal, and the standard error."""
    requests = task(**options).requests(0, games, 1)
    results = await table(task(**options), table_player(policy, Random(0))).play(requests)
    won = np.array([result.rollout.rewards["player0"] for result in results])
    assert all(sum(result.rollout.rewards.values()) == 0 for result in results)
    return won.mean(), won.std() / np.sqrt(games)


@pytest.mark.parametrize("policy", [equilibrium(), np.tile([0.3, 0.5, 0.2], (12, 1))], ids=["equilibrium", "erring"])
async def test_episodes_pay_what_the_tree_says(table, policy):
    mean, error = await mean_payoff(table, policy, 900, invalid_cost=2.5)
    assert mean == pytest.approx(solve(policy, 2.5).value, abs=4 * error)


async def test_the_oracle_wins_what_the_tree_says_against_the_random_player(table):
    expected = solve_against(equilibrium(), np.full((12, 2), 0.5))
    results = await table(task(), task().oracle()).play(task().eval_requests("eval", 600))
    won = np.array([result.rollout.rewards[result.rollout.artifact["model"]] for result in results])
    assert won.mean() == pytest.approx(expected, abs=4 * won.std() / np.sqrt(len(won)))
    assert expected > 0.1


def solve_against(policy, opponent):
    """The exact average payoff of ``policy`` over both seats against ``opponent``."""
    first, second = np.array(policy), np.array(policy)
    first[6:], second[:6] = opponent[6:], opponent[:6]
    return (solve(first).value - solve(second).value) / 2


def test_every_six_games_hold_every_deal():
    dealt = [request.artifact["cards"] for request in task().requests(3, 12, 1)]
    assert Counter(dealt[:6]) == Counter(dealt[6:]) == Counter(DEALS)
    assert dealt != [request.artifact["cards"] for request in task(seed=1).requests(3, 12, 1)]
