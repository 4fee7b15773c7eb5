from __future__ import annotations

import math

import numpy as np
import pytest

from turnwise.train.league.ratings import ELO, bradley_terry


def played(theta, n, rng):
    """Matches and shares of a round robin of ``n`` games each between players of these log-strengths."""
    size = len(theta)
    matches, shares = np.zeros((size, size)), np.zeros((size, size))
    for i in range(size):
        for j in range(i):
            won = rng.binomial(n, 1 / (1 + math.exp(theta[j] - theta[i])))
            matches[i, j] = matches[j, i] = n
            shares[i, j], shares[j, i] = won, n - won
    return matches, shares


def test_players_by_hand():
    ratings = bradley_terry(np.array([[0, 40], [40, 0]]), np.array([[0, 30], [10, 0]]), prior=1e-9)
    assert ratings.elo == pytest.approx([ELO * math.log(3) / 2, -ELO * math.log(3) / 2], abs=1e-3)
    # the log-odds of 30 in 40 have variance 1/30 + 1/10; each rating is half of them
    half = 1.959964 * ELO * math.sqrt(1 / 30 + 1 / 10) / 2
    assert ratings.high - ratings.elo == pytest.approx([half, half], rel=1e-3)
    drawn = bradley_terry(np.array([[0, 8], [8, 0]]), np.array([[0, 6], [2, 0]]))
    halves = bradley_terry(np.array([[0, 8], [8, 0]]), np.array([[0, 4 + 4 * 0.5], [4 * 0.5, 0]]))
    assert drawn.elo == pytest.approx(halves.elo)
    # Who won all is finite and ahead.
    ratings = bradley_terry(np.array([[0, 10, 0], [10, 0, 0], [0, 0, 0]]), np.array([[0, 10, 0], [0, 0, 0], [0, 0, 0]]))
    assert np.isfinite(ratings.elo).all() and ratings.elo[0] > ratings.elo[2] > ratings.elo[1]
    assert (ratings.high - ratings.low)[2] > (ratings.high - ratings.low)[0], "nobody knows the one who never played"


def test_it_is_the_largest_likelihood():
    """The gradient of the log-likelihood, the draw with the player of strength 1 included, is 0 there."""
    rng = np.random.default_rng(3)
    matches, shares = played([0.0, 1.0, -0.7, 0.3], 30, rng)
    prior = 0.5
    elo = bradley_terry(matches, shares, prior=prior).elo
    total = shares.sum(axis=1)

    def gradient(theta):
        chance = 1 / (1 + np.exp(theta[None, :] - theta[:, None]))
        return total - (matches * chance).sum(axis=1) + prior / 2 - prior / (1 + np.exp(-theta))

    shift = np.linspace(-2, 2, 40001)  # ratings have mean 0; their place against the player of strength 1 is lost
    found = min(np.abs(gradient(elo / ELO + by)).max() for by in shift[::10])
    assert found < 5e-3, found


@pytest.mark.parametrize(
    ("matches", "shares", "prior", "told"),
    [
        ([[0, 1]], [[0, 1]], 1.0, "square"),
        ([[0, 2], [1, 0]], [[0, 1], [1, 0]], 1.0, "symmetric"),
        ([[0, 2], [2, 0]], [[0, 2], [1, 0]], 1.0, r"shares \+ shares.T"),
        ([[0, 2], [2, 0]], [[0, 1], [1, 0]], 0.0, "prior=0.0"),
    ],
)
def test_mistakes_are_told(matches, shares, prior, told):
    with pytest.raises(ValueError, match=told):
        bradley_terry(np.array(matches), np.array(shares), prior=prior)
