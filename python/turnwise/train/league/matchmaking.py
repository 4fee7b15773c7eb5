"""Matchmakers choose past policies as opponents: they weight each member of the pool, oldest first.

A matchmaker gets the learner's estimated shares ``[M]`` against the members, and returns their weights ``[M]`` >= 0. If
all weights are 0, every member is equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Matchmaker(Protocol):
    """Maps the learner's estimated shares ``[M]`` of its games against each member to the members' weights ``[M]``."""

    def weights(self, p_win: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Fictitious self-play: every member is equally likely."""

    def weights(self, p_win: np.ndarray) -> np.ndarray:
        return np.ones(len(p_win))


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest ``k`` members, all equally likely."""

    k: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k={self.k!r}: expected at least 1")

    def weights(self, p_win: np.ndarray) -> np.ndarray:
        return (np.arange(len(p_win)) >= len(p_win) - self.k).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Prioritized fictitious self-play: ``(1 - p_win) ** power``, so the hardest opponents are the most frequent
    (Vinyals et al., "Grandmaster level in StarCraft II using multi-agent reinforcement learning", Nature 575, 2019,
    Methods)."""

    power: float = 2.0

    def __post_init__(self) -> None:
        if not self.power >= 0:
            raise ValueError(f"power={self.power!r}: expected a number >= 0")

    def weights(self, p_win: np.ndarray) -> np.ndarray:
        return np.clip(1 - p_win, 0, 1) ** self.power


MATCHMAKERS: dict[str, type[Uniform] | type[Latest] | type[Prioritized]] = {
    "uniform": Uniform,
    "latest": Latest,
    "prioritized": Prioritized,
}
"""Matchmakers by the values of ``league.matchmaker``."""


def chances(maker: Matchmaker, p_win: np.ndarray) -> np.ndarray:
    """Return the probability ``[M]`` of each member to be drawn. Raises ``ValueError`` for invalid weights."""
    weights = np.asarray(maker.weights(p_win), dtype=np.float64)
    if weights.shape != p_win.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"{type(maker).__name__}.weights gave {weights!r}: expected {len(p_win)} finite numbers >= 0")
    if not weights.any():
        weights = np.ones(len(p_win))
    return weights / weights.sum()
