"""Matchmakers choose past policies as opponents: a weight for each member of the pool, oldest first.

A matchmaker is called with the learner's chances ``[M]`` against the members and gives their weights ``[M]`` >= 0;
where they are all 0, each member is as likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Matchmaker(Protocol):
    """From the learner's estimated shares ``[M]`` of its games against each member to the members' weights ``[M]``."""

    def weights(self, p_win: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each member is as likely: fictitious self-play."""

    def weights(self, p_win: np.ndarray) -> np.ndarray:
        return np.ones(len(p_win))


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest ``k``, each as likely."""

    k: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k={self.k!r}: expected at least 1")

    def weights(self, p_win: np.ndarray) -> np.ndarray:
        return (np.arange(len(p_win)) >= len(p_win) - self.k).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Prioritized fictitious self-play: ``(1 - p_win) ** power``, so that the hardest are met most often (Vinyals et
    al., "Grandmaster level in StarCraft II using multi-agent reinforcement learning", Nature 575, 2019, Methods)."""

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
    """The chance ``[M]`` of each member to be drawn; raises ``ValueError`` for weights that can't be."""
    weights = np.asarray(maker.weights(p_win), dtype=np.float64)
    if weights.shape != p_win.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"{type(maker).__name__}.weights gave {weights!r}: expected {len(p_win)} finite numbers >= 0")
    if not weights.any():
        weights = np.ones(len(p_win))
    return weights / weights.sum()
