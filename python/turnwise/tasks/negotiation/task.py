"""The negotiation task: two seats with private values make offers, in a zero-sum or a general-sum game."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from pydantic import Field

from turnwise.tasks.base import Split, check_split, split_of
from turnwise.tasks.negotiation.game import (
    MOST,
    RESOURCES,
    NegotiationRules,
    Payoff,
    bargainer,
    nash_solution,
    random_player,
    value_rows,
)
from turnwise.tasks.two_player import SEATS, PlayerFactory, TwoPlayerOptions, TwoPlayerTask

_PATIENCE = 5000  # after so many draws in a row without a new question, all count as found

_PROMPT = (
    f"Divide the pool with the other player. [keep 1 0 2] offers to keep so much {', '.join(RESOURCES)}; "
    "[accept], [reject] and [walk] answer."
)


class NegotiationOptions(TwoPlayerOptions):
    """Options of the task ``negotiation``.

    ``payoff = "zero_sum"``, the default, pays each seat its utility minus the other's: only the better share counts.
    ``"general_sum"`` pays each seat its own utility, so a good deal is good for both. ``turns`` limits the answers of
    both seats together. An invalid answer costs ``invalid_cost``, in utilities; the whole pool has utility 1.
    """

    payoff: Payoff = "zero_sum"
    turns: int = Field(default=6, ge=2)
    invalid_cost: float = Field(default=1.5, ge=1)


class NegotiationTask(TwoPlayerTask):
    """Negotiations in self-play. A question is a pool with both seats' values; its hash decides its split.

    Example: ``NegotiationTask(NegotiationOptions(payoff="general_sum"))``
    """

    name = "negotiation"
    options_type = NegotiationOptions
    max_turns = 1000  # the rules count the answers

    @property
    def rules(self) -> NegotiationRules:
        return NegotiationRules(self.options.payoff, self.options.turns, self.options.invalid_cost)

    @property
    def players(self) -> dict[str, PlayerFactory]:
        return {"random": random_player, "oracle": lambda rng: bargainer(self.options.payoff)}

    @property
    def system_prompts(self) -> dict[str, str]:
        return {seat: f"You are {seat}. {_PROMPT}" for seat in SEATS}

    def questions(self, split: Split, n: int, seed: int | str) -> Iterator[Mapping[str, Any]]:
        """Yield different questions for which some division gives both seats a positive utility.

        Once ``train`` has no more, its questions repeat. Raises ``ValueError`` if another split has too few.
        """
        check_split(split)
        rng = Random(f"negotiation/{split}/{seed}")
        seen: set[str] = set()
        made = misses = 0
        while made < n:
            if misses == _PATIENCE:
                if split != "train":
                    raise ValueError(f"n={n!r}: the {split} split holds about {len(seen)} questions")
                seen.clear()
            misses += 1
            pool = tuple(rng.randint(1, MOST) for _ in RESOURCES)
            rows = value_rows(pool)
            if not rows:
                continue
            question = {"pool": list(pool), "values": [list(rng.choice(rows)), list(rng.choice(rows))]}
            key = str(question)
            if key in seen or split_of(key) != split or nash_solution(question)[1] == 0:
                continue
            seen.add(key)
            made, misses = made + 1, 0
            yield question
