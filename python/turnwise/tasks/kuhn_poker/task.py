"""The Kuhn poker task: two seats, zero sum, and a game small enough to know how good a policy really is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import numpy as np
from pydantic import Field

from turnwise.tasks.base import Split
from turnwise.tasks.kuhn_poker.game import (
    DEALS,
    INFORMATION_SETS,
    KuhnRules,
    decisions,
    equilibrium,
    solve,
    table_player,
)
from turnwise.tasks.two_player import SEATS, Decision, Exploitability, PlayerFactory, TwoPlayerOptions, TwoPlayerTask

_RULES = "Kuhn poker. Cards J, Q, K; the higher wins. Ante 1, a bet is 1."


class KuhnOptions(TwoPlayerOptions):
    """Options of the task ``kuhn_poker``.

    ``alpha`` is the probability that the oracle, an equilibrium player, bets a jack in seat 0. ``invalid_cost`` is in
    chips. It is at least 2, the most that a legal action loses; otherwise an invalid action could be the better choice.
    """

    alpha: float = Field(default=1 / 3, ge=0, le=1 / 3)
    invalid_cost: float = Field(default=3.0, ge=2)


class KuhnPokerTask(TwoPlayerTask):
    """Kuhn poker in self-play. There are only six deals, so evaluations hold out random numbers instead of deals.

    Example: ``KuhnPokerTask(KuhnOptions(opponent="oracle"))``
    """

    name = "kuhn_poker"
    options_type = KuhnOptions
    max_turns = 2

    @property
    def rules(self) -> KuhnRules:
        return KuhnRules(self.options.invalid_cost)

    @property
    def players(self) -> dict[str, PlayerFactory]:
        uniform = np.full((len(INFORMATION_SETS), 2), 0.5)
        return {
            "random": lambda rng: table_player(uniform, rng),
            "oracle": lambda rng: table_player(equilibrium(self.options.alpha), rng),
        }

    @property
    def system_prompts(self) -> dict[str, str]:
        return dict(zip(SEATS, (f"{_RULES} You act first.", f"{_RULES} You act second."), strict=True))

    def questions(self, split: Split, n: int, seed: int | str) -> Iterator[Mapping[str, Any]]:
        """Yield ``n`` deals. Every six games hold each deal once, in a random order, so that a few games are fair."""
        rng = Random(f"kuhn-poker/{split}/{seed}")
        order: list[str] = []
        for _ in range(n):
            order = order or rng.sample(DEALS, len(DEALS))
            yield {"cards": order.pop()}

    def decisions(self) -> list[Decision]:
        """Return the queries to a model at the twelve information sets, for :mod:`turnwise.tasks.two_player.query`."""
        return decisions()

    def solve(self, policy: Any) -> Exploitability:
        """Measure a policy under the task's ``invalid_cost``; see :func:`turnwise.tasks.kuhn_poker.solve`."""
        return solve(policy, self.options.invalid_cost)
