"""Solve Kuhn poker on its whole tree: the exact value and exploitability of a policy.

A policy is ``[12, 2]`` float64: the probabilities of ``p`` and ``b``, with rows in the order of ``INFORMATION_SETS``.
``[12, 3]`` adds the probability of an invalid action, which costs ``invalid_cost``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from turnwise.tasks.kuhn_poker.game import BET, DEALS, ENDS, INFORMATION_SETS, PASS, WORDS, KuhnRules, payoff
from turnwise.tasks.two_player import SEATS, Decision
from turnwise.tasks.two_player.tree import Exploitability, GameTree, build_tree, check_policy

INVALID = "x"
LEGAL = np.ones((len(INFORMATION_SETS), 2), dtype=bool)


@cache
def kuhn_tree(invalid_cost: float = 3.0) -> GameTree:
    """Build the tree below the six deals. A third action, ``x``, is invalid: it ends the game, and its seat pays."""

    def children(state: tuple[str, str]) -> list[tuple[int, tuple[str, str]]]:
        cards, history = state
        over = history in ENDS or history.endswith(INVALID)
        return [] if over else [(index, (cards, history + one)) for index, one in enumerate((PASS, BET, INVALID))]

    def infoset(state: tuple[str, str]) -> tuple[str, str]:
        cards, history = state
        return cards[len(history) % 2], history

    def worth(state: tuple[str, str]) -> float:
        cards, history = state
        if not history.endswith(INVALID):
            return payoff(cards, history)
        return -invalid_cost if len(history) % 2 == 1 else invalid_cost

    owners = [(place, len(place[1]) % 2) for place in INFORMATION_SETS]
    deals = [((cards, ""), 1 / len(DEALS)) for cards in DEALS]
    return build_tree(deals, children, infoset, worth, owners, actions=3)


def solve(policy: Any, invalid_cost: float = 3.0) -> Exploitability:
    """Compute value, best responses and exploitability of a policy for both seats.

    Example: ``solve(equilibrium()).exploitability == 0`` (to rounding), and
    ``solve(np.full((12, 2), 0.5)).nash_conv`` is 11/12.
    """
    return kuhn_tree(invalid_cost).solve(check_policy(policy, LEGAL))


def decisions() -> list[Decision]:
    """Return the query to a player at each information set, in the order of ``INFORMATION_SETS``."""
    asked = []
    for card, history in INFORMATION_SETS:
        seat = len(history) % 2
        game = {"cards": card * 2, "history": history}  # one card for both, as a prompt shows only its own seat's
        asked.append(Decision(SEATS[seat], KuhnRules().messages(game, seat), WORDS[history]))
    return asked
