"""Players for the negotiation that see what a seat sees: one that picks at random, and one that bargains well."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np

from turnwise.tasks.base import Player
from turnwise.tasks.negotiation.game import Division, Payoff, divisions, read_prompt, rest, utility, value_rows
from turnwise.types import Messages

LEAST = 0.25
"""The least mean utility that the bargainer leaves the other in a zero-sum game, as less would not be accepted."""


def random_player(rng: Random) -> Player:
    """A player that accepts, rejects, walks away or offers, with equal chance if legal. It offers random divisions."""

    def play(actor_id: str, messages: Messages) -> str:
        seen = read_prompt(messages)
        kind = rng.choice(["keep", "walk"] if seen["offer"] is None else ["keep", "walk", "accept", "reject"])
        return offer(rng.choice(list(divisions(seen["pool"])))) if kind == "keep" else f"[{kind}]"

    return play


def bargainer(payoff: Payoff) -> Player:
    """A player that offers its best bargain. It knows its own values, and averages over all that the other may have.

    With general sums its bargain has the largest product of its own utility and the other's mean utility (Nash's
    solution under the prior). It accepts an offer that is worth at least ``(left - 1) / left`` of its bargain, where
    ``left`` counts the answers left; with the last one it accepts anything of value. With zero sums its bargain puts it
    furthest ahead on average while it leaves the other ``LEAST``. It accepts any offer that puts it ahead on average.
    """

    def play(actor_id: str, messages: Messages) -> str:
        seen = read_prompt(messages)
        bargain = best_bargain(seen["pool"], seen["values"], payoff)
        if seen["offer"] is not None and _accepts(seen, bargain, payoff):
            return "[accept]"
        return offer(bargain)

    return play


@cache
def best_bargain(pool: Division, values: Division, payoff: Payoff) -> Division:
    """Return the share that the bargainer keeps when it offers."""

    def worth(kept: Division) -> tuple[float, float]:
        mine, theirs = utility(values, kept), expected_utility(pool, rest(pool, kept))
        return (mine * theirs, mine) if payoff == "general_sum" else (mine - theirs, mine)

    fair = [kept for kept in divisions(pool) if expected_utility(pool, rest(pool, kept)) >= LEAST]
    return max(fair if payoff == "zero_sum" else list(divisions(pool)), key=worth)


def expected_utility(pool: Division, share: Sequence[int]) -> float:
    """Return the mean utility of ``share`` to a seat, over all values that the pool allows."""
    return float(np.mean([utility(row, share) for row in value_rows(pool)]))


def offer(kept: Division) -> str:
    return f"[keep {' '.join(map(str, kept))}]"


def _accepts(seen: dict[str, Any], bargain: Division, payoff: Payoff) -> bool:
    share = rest(seen["pool"], seen["offer"])
    mine = utility(seen["values"], share)
    if payoff == "zero_sum":
        return mine > expected_utility(seen["pool"], seen["offer"])
    # Each answer that is left is another chance for a better deal; at the last one any value is better than none.
    wanted = utility(seen["values"], bargain) * (seen["left"] - 1) / seen["left"]
    return mine > 0 and mine >= wanted
