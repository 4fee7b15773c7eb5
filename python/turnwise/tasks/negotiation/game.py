"""The rules of a negotiation: two seats divide a pool of resources. Neither knows the other's values.

A seat answers with one of

    [keep 2 0 1]   offer to keep 2 wood, 0 gold and 1 wheat and leave the rest to the other
    [accept]       take what the other's standing offer leaves
    [reject]       turn it down, and let the other offer again
    [walk]         end it without a deal

A new offer replaces the one before. The game ends without a deal after ``turns`` answers. A seat's utility is the value
of its share divided by the value of the whole pool, from 0 to 1; without a deal it is 0 for both. The game follows
Lewis et al., "Deal or No Deal?" (https://arxiv.org/abs/1706.05125), with offers instead of free talk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any, Literal

import numpy as np

from turnwise.arena import private
from turnwise.tasks.base import Player
from turnwise.tasks.two_player import SEATS, Rules
from turnwise.types import Messages

RESOURCES = ("wood", "gold", "wheat")
MOST = 4
"""Largest count of a resource; the smallest is 1."""
WORTH = 10
"""Value of the whole pool to each seat, in its own values."""

Payoff = Literal["zero_sum", "general_sum"]
Division = tuple[int, ...]

PAYOFFS: dict[str, Callable[[float, float], tuple[float, float]]] = {
    "zero_sum": lambda first, second: (first - second, second - first),
    "general_sum": lambda first, second: (first, second),
}
"""Payoffs of both seats from their utilities: the difference (zero sum), or each seat's own utility (general sum)."""


class NegotiationRules(Rules):
    """The game as a :class:`Rules`; ``payoff`` is ``"zero_sum"`` or ``"general_sum"``, see ``PAYOFFS``.

    Question: ``{"pool": [3, 2, 1], "values": [[1, 2, 3], [2, 1, 2]]}``; the whole pool is worth 10 to each seat. With
    general sums no seat earns by the other's mistake: an invalid action costs its own seat, and ends the game for both.
    """

    name = "negotiation"

    def __init__(self, payoff: Payoff = "zero_sum", turns: int = 6, invalid_cost: float = 1.5) -> None:
        if payoff not in PAYOFFS:
            raise ValueError(f"payoff={payoff!r}: expected one of {sorted(PAYOFFS)}")
        self.payoff, self.turns, self.invalid_cost = payoff, turns, invalid_cost

    def start(self, question: Mapping[str, Any]) -> dict[str, Any]:
        pool, values = list(question.get("pool", ())), [list(row) for row in question.get("values", ())]
        right = len(pool) == len(RESOURCES) and all(isinstance(n, int) and 1 <= n <= MOST for n in pool)
        if not right or len(values) != 2 or any(tuple(row) not in value_rows(tuple(pool)) for row in values):
            raise ValueError(
                f"artifact={dict(question)!r}: expected 'pool', {len(RESOURCES)} counts from 1 to {MOST}, and "
                f"'values', two rows of whole numbers >= 0 that make the pool worth {WORTH}"
            )
        return {"pool": pool, "values": values, "said": [], "offer": None, "deal": None, "over": False}

    def to_move(self, game: Mapping[str, Any]) -> int | None:
        done = len(game["said"])
        return None if game["over"] or done >= self.turns else done % 2

    def observe(self, game: Mapping[str, Any], seat: int) -> str:
        values = private(f"Your values: {listed(game['values'][seat])}.", to=SEATS[seat])
        said = "\n".join(f"{SEATS[turn % 2]}: [{action}]" for turn, action in enumerate(game["said"]))
        left = self.turns - len(game["said"])
        return f"Pool: {listed(game['pool'])}.\n{values}\n{said or 'Nothing was said.'}\nAnswers left: {left}."

    def parse(self, text: str) -> str | None:
        """The last ``[accept]``, ``[reject]``, ``[walk]`` or ``[keep ...]`` in the text. No count has ten digits."""
        actions = re.findall(r"\[\s*(accept|reject|walk|keep(?:\s+\d{1,9})+)\s*\]", text.casefold())
        return " ".join(actions[-1].split()) if actions else None

    def is_legal(self, game: Mapping[str, Any], action: str) -> bool:
        if action in ("accept", "reject"):
            return game["offer"] is not None
        kept = kept_by(action)
        return kept is None or (
            len(kept) == len(RESOURCES) and all(have <= count for have, count in zip(kept, game["pool"], strict=True))
        )

    def apply(self, game: dict[str, Any], action: str) -> None:
        seat, kept = len(game["said"]) % 2, kept_by(action)
        game["said"].append(action)
        game["over"] = action in ("accept", "walk")
        if action == "accept":
            # The deal is what seat 0 gets; the offer said what the other one, who made it, keeps.
            game["deal"] = rest(game["pool"], game["offer"]) if seat == 0 else list(game["offer"])
        game["offer"] = None if kept is None else list(kept)

    def payoffs(self, game: Mapping[str, Any]) -> tuple[float, float]:
        return PAYOFFS[self.payoff](*utilities(game))

    def invalid_payoffs(self, seat: int) -> tuple[float, float]:
        if self.payoff == "zero_sum":
            return super().invalid_payoffs(seat)
        return (-self.invalid_cost, 0.0) if seat == 0 else (0.0, -self.invalid_cost)

    def score(self, payoffs: tuple[float, float], seat: int) -> float:
        """With zero sums, score as in chess. With general sums, return the seat's utility, 0 for an invalid end."""
        return super().score(payoffs, seat) if self.payoff == "zero_sum" else max(payoffs[seat], 0.0)

    def describe(self, game: Mapping[str, Any]) -> dict[str, Any]:
        """``deal`` (seat 0's share, or ``None``), both ``utilities``, and their product divided by the best one."""
        first, second = utilities(game)
        _, best = nash_solution(game)
        deal = None if game["deal"] is None else list(game["deal"])
        return {"deal": deal, "utilities": [first, second], "nash_share": first * second / best if best else 0.0}


def listed(counts: Sequence[int]) -> str:
    """``listed([3, 2, 1]) == "wood 3, gold 2, wheat 1"``."""
    return ", ".join(f"{name} {count}" for name, count in zip(RESOURCES, counts, strict=True))


def kept_by(action: str) -> Division | None:
    """Return the counts that ``"keep 2 0 1"`` keeps, or ``None`` for an action that is not an offer."""
    head, *numbers = action.split()
    return tuple(map(int, numbers)) if head == "keep" else None


def rest(pool: Sequence[int], kept: Sequence[int]) -> list[int]:
    return [count - have for count, have in zip(pool, kept, strict=True)]


def utility(values: Sequence[int], share: Sequence[int]) -> float:
    """Return the utility of a share; the whole pool has utility 1."""
    return sum(value * count for value, count in zip(values, share, strict=True)) / WORTH


def utilities(game: Mapping[str, Any]) -> tuple[float, float]:
    """Return the utilities of both seats at the end; ``(0.0, 0.0)`` without a deal."""
    if game["deal"] is None:
        return 0.0, 0.0
    first, second = game["values"]
    return utility(first, game["deal"]), utility(second, rest(game["pool"], game["deal"]))


def divisions(pool: Sequence[int]) -> Iterator[Division]:
    """List all shares that a seat may get, beginning with nothing."""
    yield from product(*(range(count + 1) for count in pool))


@cache
def value_rows(pool: Division) -> tuple[tuple[int, ...], ...]:
    """All rows of whole values >= 0 that make ``pool`` worth 10. A seat has each of them with equal probability."""
    rows = product(*(range(WORTH // count + 1) for count in pool))
    return tuple(row for row in rows if sum(map(int.__mul__, row, pool)) == WORTH)


def nash_solution(question: Mapping[str, Any]) -> tuple[Division, float]:
    """Return seat 0's part of the division with the largest product of utilities, and that product (J. F. Nash, "The
    Bargaining Problem", 1950). It is the bargain of a player that knows both seats' values. Ties go to the first.

    Example: seat 0 values one wood at 10, and seat 1 one gold. Each gets what it values, and the product is 1.
    """
    first, second = question["values"]
    pool = question["pool"]
    best = max(divisions(pool), key=lambda share: utility(first, share) * utility(second, rest(pool, share)))
    return best, utility(first, best) * utility(second, rest(pool, best))


def read_prompt(messages: Messages) -> dict[str, Any]:
    """``pool``, own ``values``, ``offer`` (what the other one would keep, or ``None``) and the answers ``left``."""
    shown = messages[-1]["content"]
    rows = [re.search(rf"{name}: wood (\d+), gold (\d+), wheat (\d+)\.", shown) for name in ("Pool", "Your values")]
    left = re.search(r"Answers left: (\d+)\.", shown)
    if not all(rows) or left is None:
        raise ValueError(f"messages={messages!r}: expected a prompt of the negotiation")
    pool, values = (tuple(map(int, row.groups())) for row in rows if row)
    said = re.findall(r"^player\d: \[(.*)\]$", shown, flags=re.MULTILINE)
    return {"pool": pool, "values": values, "offer": kept_by(said[-1]) if said else None, "left": int(left[1])}


# ---------------------------------------------------------------------------------------------------------------------
# Scripted players, which see what a seat sees
# ---------------------------------------------------------------------------------------------------------------------
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
