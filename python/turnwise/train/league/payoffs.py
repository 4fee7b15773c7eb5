"""Payoff matrix of results between players, updated match by match.

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


@dataclass(frozen=True, slots=True)
class Game:
    """Result of one game for one of two sides. ``share``, from 0 to 1, is this side's part: 1 for a win, 0.5 for a
    draw. The other side has the rest. ``payoff`` and ``theirs`` are both sides' rewards.

    Example: ``Game(share=1.0, payoff=2.0, theirs=-2.0)``
    """

    share: float
    payoff: float
    theirs: float


@dataclass(slots=True)
class Record:
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

    def add(self, match: Sequence[Game]) -> None:
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

    def mirrored(self) -> Record:
        """Return this record from the other side's view."""
        return Record(
            self.matches, self.games, self.losses, self.draws, self.wins, self.matches - self.share,
            self.theirs, self.theirs2, self.payoff, self.payoff2,
        )  # fmt: skip

    def plus(self, other: Record) -> Record:
        return Record(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))

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
    """The payoff matrix: a :class:`Record` for each pair of players, stored once for both directions."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], Record] = {}

    def add(self, player: str, opponent: str, match: Sequence[Game]) -> None:
        """Count a match, with its games as ``player`` sees them."""
        if player == opponent:
            raise ValueError(f"player={player!r}: expected another one than the opponent")
        if not match:
            raise ValueError("match is empty: expected at least one game")
        if (opponent, player) in self._records:
            match = [Game(1.0 - game.share, game.theirs, game.payoff) for game in match]
            player, opponent = opponent, player
        self._records.setdefault((player, opponent), Record()).add(match)

    def between(self, player: str, opponent: str) -> Record:
        """Return the record of ``player`` against ``opponent``; an empty one if they never met."""
        if (player, opponent) in self._records:
            return self._records[player, opponent]
        return self._records.get((opponent, player), Record()).mirrored()

    def rename(self, old: str, new: str) -> None:
        """Move all records of ``old`` to ``new``."""
        swap = {old: new}
        self._records = {(swap.get(a, a), swap.get(b, b)): record for (a, b), record in self._records.items()}

    def forget(self, player: str) -> None:
        """Drop every match of ``player``."""
        self._records = {pair: record for pair, record in self._records.items() if player not in pair}

    def matrices(self, players: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ``matches [P, P]`` and ``shares [P, P]``: the row player's sum of shares against the column player."""
        records = [[self.between(a, b) if a != b else Record() for b in players] for a in players]
        matches = np.array([[record.matches for record in row] for row in records], dtype=np.float64)
        return matches, np.array([[record.share for record in row] for row in records])

    def state_dict(self) -> dict[str, Any]:
        """Return the records in a JSON-serialisable form."""
        return {"records": [[*pair, *astuple(record)] for pair, record in self._records.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._records = {(a, b): Record(*numbers) for a, b, *numbers in state["records"]}


def game_of(rollout: Rollout, side: Iterable[str], seats: Sequence[str]) -> Game:
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
        known = [float(score) for score in scores if score is not None]
        share = 0.5 + (float(np.mean(known[: len(mine)])) - float(np.mean(known[len(mine) :]))) / 2
    return Game(min(max(share, 0.0), 1.0), payoff, theirs)


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
