"""Exploitability against brute force over all pure strategies, Kuhn's equilibria, and figures of the literature."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from turnwise.tasks.kuhn_poker import DEALS, INFORMATION_SETS, VALUE, equilibrium, kuhn_tree, payoff, solve
from turnwise.tasks.kuhn_poker.game import ENDS

UNIFORM = np.full((12, 2), 0.5)
SEED = int(np.random.SeedSequence().entropy % 2**32)


def played(policy, cards, history="", invalid_cost=3.0):
    """Seat 0's average payoff, by plain recursion: another way to say the rules than the tree's arrays."""
    if history in ENDS:
        return payoff(cards, history)
    seat = len(history) % 2
    row = policy[INFORMATION_SETS.index((cards[seat], history))]
    below = sum(row[i] * played(policy, cards, history + "pb"[i], invalid_cost) for i in (0, 1) if row[i])
    return below + (row[2] * (-invalid_cost if seat == 0 else invalid_cost) if len(row) > 2 else 0.0)


def value_of(policy, invalid_cost=3.0):
    return sum(played(policy, cards, invalid_cost=invalid_cost) for cards in DEALS) / 6


def best_by_brute_force(policy, player):
    """The best of the player's 64 pure strategies against the other's part of ``policy``."""
    rows = range(6) if player == 0 else range(6, 12)
    values = []
    for pure in product((0, 1), repeat=6):
        mixed = np.array(policy, dtype=float)
        for row, action in zip(rows, pure, strict=True):
            mixed[row] = np.eye(mixed.shape[1])[action]
        values.append(value_of(mixed))
    return max(values) if player == 0 else -min(values)


def random_policies(count, columns=2):
    rng = np.random.default_rng(SEED)
    print("seed", SEED)
    sharp = rng.dirichlet(np.full(columns, 0.3), size=(count, 12))
    return [*sharp, *np.eye(columns)[rng.integers(0, columns, size=(3, 12))]]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1 / 3])
def test_kuhns_equilibria_are_worth_minus_an_eighteenth_and_nobody_gains(alpha):
    solved = solve(equilibrium(alpha))
    assert solved.value == pytest.approx(VALUE, abs=1e-12) == pytest.approx(-1 / 18)
    assert solved.best_response == pytest.approx((-1 / 18, 1 / 18), abs=1e-12)
    assert solved.exploitability == pytest.approx(0.0, abs=1e-12)


def test_the_uniform_policy():
    """OpenSpiel gives 0.458333 for it as well; here also by brute force."""
    solved = solve(UNIFORM)
    assert solved.value == pytest.approx(1 / 8)
    assert solved.best_response == pytest.approx((1 / 2, 5 / 12))
    assert (solved.nash_conv, solved.exploitability) == pytest.approx((11 / 12, 11 / 24))


@pytest.mark.parametrize("player", [0, 1])
def test_best_responses_are_those_of_brute_force(player):
    for policy in [UNIFORM, equilibrium(0.2), *random_policies(6)]:
        worth, best = kuhn_tree().best_response(np.pad(policy, ((0, 0), (0, 1))), player)
        assert worth == pytest.approx(best_by_brute_force(policy, player), abs=1e-12)
        pure = np.array(policy)
        rows = slice(0, 6) if player == 0 else slice(6, 12)
        pure[rows] = np.eye(2)[best[rows]]
        reached = value_of(pure)
        assert (reached if player == 0 else -reached) == pytest.approx(worth, abs=1e-12), "the play earns what is said"


def test_invalid_actions_are_part_of_the_value():
    for cost in (2.0, 3.5):
        for policy in random_policies(6, columns=3):
            solved = solve(policy, cost)
            assert solved.value == pytest.approx(value_of(policy, cost), abs=1e-12)
            assert solved.best_response[0] >= solved.value - 1e-12 and solved.best_response[1] >= -solved.value - 1e-12
    hopeless = np.tile([0.0, 0.0, 1.0], (12, 1))
    assert solve(hopeless, 3.0).best_response == pytest.approx((3.0, 3.0)), "the other one waits for the mistake"


def test_exploitability_is_never_negative_and_zero_only_in_the_family():
    for policy in random_policies(50):
        assert solve(policy).exploitability > 1e-6
    nearly = equilibrium(0.2)
    nearly[INFORMATION_SETS.index(("Q", "b"))] = [0.5, 0.5]
    assert solve(nearly).exploitability > 0.01


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (np.full((11, 2), 0.5), r"shape \(11, 2\)"),
        (np.full((12, 2), 0.4), "sum 1"),
        (np.tile([1.5, -0.5], (12, 1)), ">= 0"),
        (np.full((12, 2), np.nan), ">= 0"),
    ],
)
def test_bad_policies_are_refused(policy, named):
    with pytest.raises(ValueError, match=named):
        solve(policy)
