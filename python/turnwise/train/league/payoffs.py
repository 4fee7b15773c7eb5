"""Payoff matrix of results between players, updated match by match, and ratings from it.

A match is one question played from every seat against the same opponent, so that neither the deal nor the first move
favours one side. It counts as one observation, because its games are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from turnwise.train.eval.statistics import Z, wilson
from turnwise.types import Rollout

ELO = 400 / math.log(10)
"""Elo points per unit of log-strength: 400 points are odds of 10 to 1."""


@dataclass(frozen=True, slots=True)
class GameResult:
    """Result of one game for one of two sides. ``share``, from 0 to 1, is this side's part: 1 for a win, 0.5 for a
    draw. The other side has the rest. ``payoff`` and ``theirs`` are both sides' rewards.

    Example: ``GameResult(share=1.0, payoff=2.0, theirs=-2.0)``
    """

    share: float
    payoff: float
    theirs: float


@dataclass(slots=True)
class MatchRecord:
    """One side's results against another. ``share``, ``payoff`` and ``theirs`` are sums over matches of the match's
    mean, ``payoff2`` and ``theirs2`` sums of its square. Wins, draws and losses count games, by payoffs."""

    matches: int = 0
    games: int = 0
    wins: int = 0
    draws: int = 0
    losses: int = 0
    share: float = 0.0
    payoff: float = 0.0
    payoff2: float = 0.0
    theirs: float = 0.0
    theirs2: float = 0.0

    def add(self, match: Sequence[GameResult]) -> None:
        """Count the games of one match."""
        self.matches += 1
        self.games += len(match)
        self.wins += sum(game.payoff > game.theirs for game in match)
        self.draws += sum(game.payoff == game.theirs for game in match)
        self.losses += sum(game.payoff < game.theirs for game in match)
        payoff, theirs = (
            math.fsum(getattr(game, name) for game in match) / len(match) for name in ("payoff", "theirs")
        )
        self.share += math.fsum(game.share for game in match) / len(match)
        self.payoff, self.payoff2 = self.payoff + payoff, self.payoff2 + payoff * payoff
        self.theirs, self.theirs2 = self.theirs + theirs, self.theirs2 + theirs * theirs

    def mirrored(self) -> MatchRecord:
        """Return this record from the other side's view."""
        return MatchRecord(
            self.matches, self.games, self.losses, self.draws, self.wins, self.matches - self.share,
            self.theirs, self.theirs2, self.payoff, self.payoff2,
        )  # fmt: skip

    def plus(self, other: MatchRecord) -> MatchRecord:
        return MatchRecord(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))

    def mean_share(self) -> float:
        """Mean share of the games, 0.5 if none was played."""
        return self.share / self.matches if self.matches else 0.5

    def share_interval(self) -> tuple[float, float]:
        """Return the 95% interval of the share: Wilson's score with each match as one trial. It is wide enough for any
        results between 0 and 1."""
        return wilson(min(max(self.mean_share(), 0.0), 1.0), self.matches)

    def mean_payoff(self) -> float:
        return self.payoff / self.matches if self.matches else 0.0

    def payoff_interval(self) -> tuple[float, float] | None:
        """Return the 95% interval of the payoff by Student's t over matches; ``None`` for fewer than two matches."""
        if self.matches < 2:
            return None
        mean = self.mean_payoff()
        variance = max(self.payoff2 - self.matches * mean * mean, 0.0) / (self.matches - 1)
        half = student_t(self.matches - 1) * math.sqrt(variance / self.matches)
        return mean - half, mean + half


class Payoffs:
    """The payoff matrix: a :class:`MatchRecord` for each pair of players, stored once for both directions."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], MatchRecord] = {}

    def add(self, player: str, opponent: str, match: Sequence[GameResult]) -> None:
        """Count a match; its games have the results of ``player``."""
        if player == opponent:
            raise ValueError(f"player={player!r}: expected another one than the opponent")
        if not match:
            raise ValueError("match is empty: expected at least one game")
        if (opponent, player) in self._records:
            match = [GameResult(1.0 - game.share, game.theirs, game.payoff) for game in match]
            player, opponent = opponent, player
        self._records.setdefault((player, opponent), MatchRecord()).add(match)

    def between(self, player: str, opponent: str) -> MatchRecord:
        """Return the record of ``player`` against ``opponent``; an empty one if they never met."""
        if (player, opponent) in self._records:
            return self._records[player, opponent]
        return self._records.get((opponent, player), MatchRecord()).mirrored()

    def rename(self, old: str, new: str) -> None:
        """Move all records of ``old`` to ``new``."""
        swap = {old: new}
        self._records = {(swap.get(a, a), swap.get(b, b)): record for (a, b), record in self._records.items()}

    def forget(self, player: str) -> None:
        """Drop every match of ``player``."""
        self._records = {pair: record for pair, record in self._records.items() if player not in pair}

    def matrices(self, players: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ``matches [P, P]`` and ``shares [P, P]``: the row player's sum of shares against the column player."""
        records = [[self.between(a, b) if a != b else MatchRecord() for b in players] for a in players]
        matches = np.array([[record.matches for record in row] for row in records], dtype=np.float64)
        return matches, np.array([[record.share for record in row] for row in records])

    def state_dict(self) -> dict[str, Any]:
        """Return the records in a JSON-serialisable form."""
        return {"records": [[*pair, *astuple(record)] for pair, record in self._records.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._records = {(a, b): MatchRecord(*numbers) for a, b, *numbers in state["records"]}


def game_of(rollout: Rollout, side: Iterable[str], seats: Sequence[str]) -> GameResult:
    """Return the result of ``rollout`` for the seats of ``side`` against the others of ``seats``.

    The share is 0.5 plus half the difference of the metrics ``score/<seat>``, if a task has them; for scores that add
    up to 1 this is the side's own score. Without scores the share is 1 for the higher reward, 0.5 for equal rewards.
    """
    mine = [seat for seat in seats if seat in set(side)]
    others = [seat for seat in seats if seat not in mine]
    payoff, theirs = (float(np.mean([rollout.rewards[seat] for seat in half])) for half in (mine, others))
    scores = [rollout.metrics.get(f"score/{seat}") for seat in (*mine, *others)]
    if any(score is None for score in scores):
        share = 0.5 if payoff == theirs else float(payoff > theirs)
    else:
        numbers = [float(score) for score in scores if score is not None]
        share = 0.5 + (float(np.mean(numbers[: len(mine)])) - float(np.mean(numbers[len(mine) :]))) / 2
    return GameResult(min(max(share, 0.0), 1.0), payoff, theirs)


def student_t(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t (Abramowitz and Stegun, 1964, 26.7.5; exact for 1 and 2 degrees)."""
    if freedom <= 2:
        return {1: 12.706205, 2: 4.302653}[freedom]
    z, n = Z, freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n ** (power + 1) for power, term in enumerate(terms))


# -- ratings -----------------------------------------------------------------------------------------------------------
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

    In the Bradley–Terry model ``P(i beats j) = g_i / (g_i + g_j)``. The strengths ``g`` maximize the likelihood, by the
    MM algorithm of D. R. Hunter ("MM algorithms for generalized Bradley–Terry models", Annals of Statistics 32, 2004,
    eq. 3). A draw is half a win for each player. Every player gets one extra draw against a player of strength 1, with
    the weight ``prior``, so that players who won or lost every game have a finite strength too. Raises ``ValueError``
    for inconsistent matrices.

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
