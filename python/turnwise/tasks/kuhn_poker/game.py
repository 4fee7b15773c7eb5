"""Kuhn poker (H. W. Kuhn, "A simplified two-person poker", 1950): three cards, one chip each, one bet.

The cards are J < Q < K. Each seat gets one and pays an ante of 1. Seat 0 checks or bets 1 more. After a check, seat 1
checks or bets. The other seat calls a bet or folds. The higher card takes the pot. A history is a string of ``p``
(check or fold) and ``b`` (bet or call). The value of the game for seat 0 is -1/18.

Example: with cards ``"KQ"`` and history ``"pbb"`` (check, bet, call) the king wins 2 chips.

A policy is ``[12, 2]`` float64: the probabilities of ``p`` and ``b``, with rows in the order of ``INFORMATION_SETS``.
``[12, 3]`` adds the probability of an invalid action, which costs ``invalid_cost``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from itertools import permutations
from random import Random
from typing import Any

import numpy as np

from turnwise.arena import private
from turnwise.tasks.base import Player
from turnwise.tasks.two_player import SEATS, Decision, Rules
from turnwise.tasks.two_player.tree import Exploitability, GameTree, build_tree, check_policy
from turnwise.types import Messages

CARDS = "JQK"
DEALS = tuple("".join(pair) for pair in permutations(CARDS, 2))
"""Deals: the cards of seat 0 and seat 1, all equally likely."""

ENDS = ("pp", "pbp", "pbb", "bp", "bb")
PASS, BET = "p", "b"
WORDS = {"": ("check", "bet"), "p": ("check", "bet"), "b": ("fold", "call"), "pb": ("fold", "call")}
"""Names of ``p`` and ``b`` after each history."""

INFORMATION_SETS = tuple(
    (card, history) for histories in (("", "pb"), ("p", "b")) for history in histories for card in CARDS
)
"""``(own card, history)``: the first six are seat 0's, the others seat 1's. The rows of every policy."""

VALUE = -1 / 18
"""Value of the game for seat 0 at an equilibrium."""

_CARD, _BETS = "Your card: {}.", "Bets so far: {}."


class KuhnRules(Rules):
    """The game as a :class:`Rules`. Payoffs are the chips won or lost, including the ante: 1 or 2.

    Question: ``{"cards": "KQ"}``, seat 0's card first.
    """

    name = "kuhn_poker"

    def __init__(self, invalid_cost: float = 3.0) -> None:
        self.invalid_cost = invalid_cost

    def start(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if question.get("cards") not in DEALS:
            raise ValueError(f"artifact['cards']={question.get('cards')!r}: expected one of {DEALS}")
        return {"cards": question["cards"], "history": ""}

    def to_move(self, game: Mapping[str, Any]) -> int | None:
        return None if game["history"] in ENDS else len(game["history"]) % 2

    def observe(self, game: Mapping[str, Any], seat: int) -> str:
        card = private(_CARD.format(game["cards"][seat]), to=f"player{seat}")
        return board(card, game["history"])

    def parse(self, text: str) -> str | None:
        """Find the last of ``[check]``, ``[bet]``, ``[fold]`` and ``[call]`` in the text."""
        words = re.findall(r"\[(check|bet|fold|call)\]", text.casefold())
        return words[-1] if words else None

    def is_legal(self, game: Mapping[str, Any], action: str) -> bool:
        return action in WORDS[game["history"]]

    def apply(self, game: dict[str, Any], action: str) -> None:
        game["history"] += (PASS, BET)[WORDS[game["history"]].index(action)]

    def payoffs(self, game: Mapping[str, Any]) -> tuple[float, float]:
        won = payoff(game["cards"], game["history"])
        return won, -won

    def score(self, payoffs: tuple[float, float], seat: int) -> float:
        """Scale chips to a score from 0 (2 lost) to 1 (2 won). The share of pots won would punish good folds."""
        return min(max((payoffs[seat] + 2) / 4, 0.0), 1.0)

    def describe(self, game: Mapping[str, Any]) -> dict[str, Any]:
        return {"cards": game["cards"], "history": game["history"]}


def payoff(cards: str, history: str) -> float:
    """Return the chips that seat 0 wins: ``payoff("KQ", "pbb") == 2.0``. Raises ``ValueError`` before the end."""
    if history not in ENDS:
        raise ValueError(f"history={history!r}: expected one of {ENDS}")
    higher = 1.0 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1.0
    return {"pp": higher, "pbp": -1.0, "bp": 1.0}.get(history, 2.0 * higher)


def board(card: str, history: str) -> str:
    """Return the text that a seat sees. ``card`` is the sentence that names its own card."""
    bets = ", ".join(WORDS[history[:index]][(PASS, BET).index(one)] for index, one in enumerate(history)) or "none"
    first, second = WORDS[history]
    return f"{card}\n{_BETS.format(bets)}\nReply with [{first}] or [{second}]."


def read_board(messages: Messages) -> tuple[str, str]:
    """Parse ``(card, history)`` from a prompt. Raises ``ValueError`` for any other text."""
    shown = messages[-1]["content"]
    for card, history in INFORMATION_SETS:
        if shown == board(_CARD.format(card), history):
            return card, history
    raise ValueError(f"messages={messages!r}: expected a prompt of Kuhn poker")


def equilibrium(alpha: float = 1 / 3) -> np.ndarray:
    """Return one of Kuhn's equilibria, ``[12, 2]``. ``alpha`` in [0, 1/3] is the probability that seat 0 bets a jack.

    Seat 0 bets a king with probability ``3 alpha``, never bets a queen, and calls with a queen with probability
    ``alpha + 1/3``. Seat 1 has one strategy: it bets kings, bluffs with a jack and calls with a queen, the last two
    with probability 1/3 each.
    """
    if not 0 <= alpha <= 1 / 3:
        raise ValueError(f"alpha={alpha!r}: expected a number in [0, 1/3]")
    bets = {
        "": {"J": alpha, "Q": 0.0, "K": 3 * alpha},
        "pb": {"J": 0.0, "Q": alpha + 1 / 3, "K": 1.0},
        "p": {"J": 1 / 3, "Q": 0.0, "K": 1.0},
        "b": {"J": 0.0, "Q": 1 / 3, "K": 1.0},
    }
    chance = np.array([bets[history][card] for card, history in INFORMATION_SETS])
    return np.stack([1 - chance, chance], axis=1)


def table_player(policy: np.ndarray, rng: Random) -> Player:
    """A player that plays a policy ``[12, 2]`` or ``[12, 3]``. For the third column it gives an invalid answer."""
    rows = {infoset: policy[index] for index, infoset in enumerate(INFORMATION_SETS)}

    def play(actor_id: str, messages: Messages) -> str:
        card, history = read_board(messages)
        words = (*WORDS[history], "pass")
        chosen = rng.choices(range(len(rows[card, history])), weights=rows[card, history].tolist())[0]
        return f"[{words[chosen]}]"

    return play


# ---------------------------------------------------------------------------------------------------------------------
# Exact value and exploitability
# ---------------------------------------------------------------------------------------------------------------------
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

    owners = [(information_set, len(information_set[1]) % 2) for information_set in INFORMATION_SETS]
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
