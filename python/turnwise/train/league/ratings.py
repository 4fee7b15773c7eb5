"""Bradley–Terry ratings from a matrix of results.

    P(i beats j) = g_i / (g_i + g_j)

The strengths ``g`` maximize the likelihood, by the MM algorithm of D. R. Hunter ("MM algorithms for generalized
Bradley–Terry models", Annals of Statistics 32, 2004, eq. 3). A draw is half a win for each player. Every player gets
one extra draw against a player of strength 1, so that players who won or lost every game have a finite strength too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from turnwise.train.eval.statistics import Z

ELO = 400 / math.log(10)
"""Elo points per unit of log-strength: 400 points are odds of 10 to 1."""


@dataclass(frozen=True, slots=True)
class Ratings:
    """``elo [P]``, with mean 0 over the players, and the ends ``low [P]`` and ``high [P]`` of 95% intervals.

    The intervals are those of maximum likelihood, from the observed information.
    """

    elo: np.ndarray
    low: np.ndarray
    high: np.ndarray


def bradley_terry(
    matches: np.ndarray, shares: np.ndarray, *, prior: float = 1.0, tolerance: float = 1e-10, rounds: int = 10_000
) -> Ratings:
    """Rate ``P`` players from counts of matches, ``matches [P, P]``, and the row players' shares, ``shares [P, P]``.

    ``prior`` is the weight of the draw with the player of strength 1. Raises ``ValueError`` for inconsistent matrices.

    Example: ``bradley_terry([[0, 40], [40, 0]], [[0, 30], [10, 0]], prior=1e-9).elo`` is ``ELO * log(3) / 2`` and its
    negative, 95.4 and -95.4.
    """
    # MM iterations on the log-strengths theta.
    played, won = _checked(matches, shares, prior)
    total = won.sum(axis=1) + prior / 2
    theta = np.zeros(len(played))
    for _ in range(rounds):
        strength = np.exp(theta)
        pairs = played / (strength[:, None] + strength[None, :])
        updated = np.log(total / (pairs.sum(axis=1) + prior / (strength + 1)))
        moved, theta = np.abs(updated - theta).max(), updated
        if moved < tolerance:
            break
    # Intervals from the inverse of the observed information, for ratings relative to their mean.
    chance = 1 / (1 + np.exp(theta[None, :] - theta[:, None]))
    weight = played * chance * (1 - chance)
    anchor = prior * np.exp(theta) / (1 + np.exp(theta)) ** 2
    information = np.diag(weight.sum(axis=1) + anchor) - weight
    centre = np.eye(len(theta)) - 1 / len(theta)
    spread = centre @ np.linalg.inv(information) @ centre
    elo = ELO * (theta - theta.mean())
    half = Z * ELO * np.sqrt(np.maximum(np.diag(spread), 0.0))
    return Ratings(elo, elo - half, elo + half)


def _checked(matches: np.ndarray, shares: np.ndarray, prior: float) -> tuple[np.ndarray, np.ndarray]:
    played, won = np.asarray(matches, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    if played.ndim != 2 or played.shape[0] != played.shape[1] or won.shape != played.shape or not len(played):
        raise ValueError(f"matches {played.shape}, shares {won.shape}: expected two square matrices of one size")
    if not (played == played.T).all() or np.diag(played).any() or not np.allclose(won + won.T, played):
        raise ValueError("matches must be symmetric with zeros on its diagonal, and shares + shares.T equal to it")
    if not prior > 0:
        raise ValueError(f"prior={prior!r}: expected a weight > 0")
    return played, won
