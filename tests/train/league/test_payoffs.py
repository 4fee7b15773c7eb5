from __future__ import annotations

import json
import math

import numpy as np
import pytest

from turnwise.train.eval.statistics import wilson
from turnwise.train.league.payoffs import ELO, GameResult, MatchRecord, Payoffs, bradley_terry, game_of, student_t
from turnwise.types import Rollout

WIN, DRAW, LOSS = GameResult(1.0, 2.0, -2.0), GameResult(0.5, 0.0, 0.0), GameResult(0.0, -1.0, 1.0)


def test_a_match_is_one_observation_of_its_mean():
    record = MatchRecord()
    for match in ([WIN, LOSS], [WIN, DRAW], [WIN]):
        record.add(match)
    assert (record.matches, record.games, record.wins, record.draws, record.losses) == (3, 5, 3, 1, 1)
    assert record.mean_share() == pytest.approx((0.5 + 0.75 + 1) / 3)
    payoffs = np.array([0.5, 1.0, 2.0])
    assert record.mean_payoff() == pytest.approx(payoffs.mean())
    half = 4.302653 * payoffs.std(ddof=1) / math.sqrt(3)
    assert record.payoff_interval() == pytest.approx((payoffs.mean() - half, payoffs.mean() + half))
    assert record.share_interval() == wilson(0.75, 3)
    # Nothing played leaves everything open.
    record = MatchRecord()
    assert record.mean_share() == 0.5 and record.share_interval() == (0.0, 1.0) and record.payoff_interval() is None
    record.add([WIN])
    assert record.payoff_interval() is None, "one match says nothing of the spread"


def test_both_directions_are_one_record():
    payoffs = Payoffs()
    payoffs.add("a", "b", [WIN, DRAW])
    payoffs.add("b", "a", [WIN])
    mine, theirs = payoffs.between("a", "b"), payoffs.between("b", "a")
    assert (mine.wins, mine.draws, mine.losses) == (1, 1, 1) == (theirs.losses, theirs.draws, theirs.wins)
    assert mine.share == pytest.approx(0.75) and theirs.share == pytest.approx(1.25)
    assert mine.payoff == pytest.approx(1.0 - 2.0) and theirs.payoff == pytest.approx(-1.0 + 2.0)
    matches, shares = payoffs.matrices(["a", "b", "c"])
    assert matches.tolist() == [[0, 2, 0], [2, 0, 0], [0, 0, 0]]
    assert np.allclose(shares + shares.T, matches)


def test_rename_forget_and_state():
    payoffs = Payoffs()
    payoffs.add("live", "old", [WIN])
    payoffs.rename("live", "step 3")
    assert payoffs.between("step 3", "old").wins == 1 and payoffs.between("live", "old").matches == 0
    again = Payoffs()
    again.load_state_dict(json.loads(json.dumps(payoffs.state_dict())))
    assert again.between("old", "step 3") == payoffs.between("old", "step 3") and again.between("old", "step 3").losses
    again.forget("old")
    assert again.between("old", "step 3").matches == 0
    with pytest.raises(ValueError, match="player='a'"):
        Payoffs().add("a", "a", [WIN])
    with pytest.raises(ValueError, match="at least one game"):
        Payoffs().add("a", "b", [])


def test_the_share_of_a_game():
    def played(rewards, metrics=()):
        return Rollout("r", "game", None, rewards=rewards, metrics=dict(metrics))

    seats = ("x", "y")
    assert game_of(played({"x": 1.0, "y": -1.0}), ["y"], seats) == GameResult(0.0, -1.0, 1.0)
    assert game_of(played({"x": 0.0, "y": 0.0}), ["x"], seats) == GameResult(0.5, 0.0, 0.0)
    scored = played({"x": 1.0, "y": -1.0}, {"score/x": 0.75, "score/y": 0.25})
    assert game_of(scored, ["x"], seats).share == 0.75, "a chip of two is not the whole pot"
    both_gain = played({"x": 0.9, "y": 0.5}, {"score/x": 0.9, "score/y": 0.5})
    assert game_of(both_gain, ["y"], seats).share == pytest.approx(0.3)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (30, 2.04227)])
def test_quantiles_of_students_t(freedom, quantile):
    assert student_t(freedom) == pytest.approx(quantile, rel=1e-3)


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
