"""Interface of a game for two seats: its rules on plain data, independent of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from turnwise.tasks.base import Player
from turnwise.types import Messages

SEATS = ("player0", "player1")
"""The actors of every game for two, in acting order."""

Verdict = str
"""Verdict on an action: ``"legal"``, ``"illegal"`` or ``"unreadable"``."""

PlayerFactory = Callable[[Random], Player]
"""Makes a player that draws from the given generator."""


class Rules(ABC):
    """A game for two seats, numbered 0 and 1. ``game`` is the result of ``start``: dicts and lists, changed in place.

    An action that can't be read or is not allowed ends the game, and its seat pays ``invalid_cost`` to the other.
    SPIRAL (https://arxiv.org/abs/2506.24119) gives -1.5 and +0.5 instead, which is not zero sum. Here every end of a
    zero-sum game is zero sum, so its value and exploitability stay defined for players that err.
    """

    name: str
    invalid_cost: float

    @abstractmethod
    def start(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Make the game before the first action. Raises ``ValueError`` for an invalid question."""

    @abstractmethod
    def to_move(self, game: Mapping[str, Any]) -> int | None:
        """The seat to move; ``None`` once the game is over."""

    @abstractmethod
    def observe(self, game: Mapping[str, Any], seat: int) -> str:
        """Return what ``seat`` sees on its turn; text that only it may know is marked ``private``."""

    @abstractmethod
    def parse(self, text: str) -> str | None:
        """Parse the action that a completion names into its one normal form; ``None`` if it names none."""

    @abstractmethod
    def is_legal(self, game: Mapping[str, Any], action: str) -> bool:
        """Return True if the seat to move may take this action now."""

    @abstractmethod
    def apply(self, game: dict[str, Any], action: str) -> None:
        """Do a legal action of the seat to move."""

    @abstractmethod
    def payoffs(self, game: Mapping[str, Any]) -> tuple[float, float]:
        """Return each seat's payoff at the end of a game whose actions were all legal."""

    def invalid_payoffs(self, seat: int) -> tuple[float, float]:
        """Return each seat's payoff when an invalid action of ``seat`` ended the game."""
        return (-self.invalid_cost, self.invalid_cost) if seat == 0 else (self.invalid_cost, -self.invalid_cost)

    def describe(self, game: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the finished game for readers of the rollout; goes into its extras."""
        return {}

    def score(self, payoffs: tuple[float, float], seat: int) -> float:
        """Return the score of ``seat``, from 0 to 1: 1 for a win, 0.5 for a draw, 0 for a loss, as in chess."""
        mine, theirs = payoffs[seat], payoffs[other(seat)]
        return 0.5 if mine == theirs else float(mine > theirs)

    def play(self, game: dict[str, Any], text: str) -> Verdict:
        """Let the seat to move answer with ``text``; only a legal action changes the game."""
        action = self.parse(text)
        if action is None:
            return "unreadable"
        if not self.is_legal(game, action):
            return "illegal"
        self.apply(game, action)
        return "legal"

    def messages(self, game: Mapping[str, Any], seat: int) -> Messages:
        """The chat of ``seat``, without its system prompt. It depends only on what the seat knows."""
        return [{"role": "user", "content": self.observe(game, seat)}]


def other(seat: int) -> int:
    return 1 - seat
