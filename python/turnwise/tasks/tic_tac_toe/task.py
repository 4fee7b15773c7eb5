"""The tic-tac-toe task: two seats, zero sum, nothing hidden, and small enough to solve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import numpy as np
from pydantic import Field

from turnwise.tasks.base import Player, Split
from turnwise.tasks.tic_tac_toe.board import (
    CELLS,
    MARKS,
    TicTacToeRules,
    decisions,
    optimal_policy,
    positions,
    read_board,
    solve,
    uniform_policy,
)
from turnwise.tasks.two_player import SEATS, Decision, Exploitability, PlayerFactory, TwoPlayerOptions, TwoPlayerTask
from turnwise.types import Messages


class TicTacToeOptions(TwoPlayerOptions):
    """Options of the task ``tic_tac_toe``.

    ``invalid_cost`` is at least 1, the cost of a loss; otherwise an invalid action could be the better choice.
    """

    invalid_cost: float = Field(default=1.5, ge=1)


class TicTacToeTask(TwoPlayerTask):
    """Tic-tac-toe in self-play, always from the empty board. Evaluations hold out the opponent's random numbers.

    Example: ``TicTacToeTask(TicTacToeOptions(opponent="oracle"))``, against which a draw is the best result
    """

    name = "tic_tac_toe"
    options_type = TicTacToeOptions
    max_turns = CELLS

    @property
    def rules(self) -> TicTacToeRules:
        return TicTacToeRules(self.options.invalid_cost)

    @property
    def players(self) -> dict[str, PlayerFactory]:
        return {
            "random": lambda rng: table_player(uniform_policy(), rng),
            "oracle": lambda rng: table_player(optimal_policy(), rng),
        }

    @property
    def system_prompts(self) -> dict[str, str]:
        prompts = (f"Tic-tac-toe. You are {mark}. Reply with a free cell, as [4]." for mark in MARKS)
        return dict(zip(SEATS, prompts, strict=True))

    def questions(self, split: Split, n: int, seed: int | str) -> Iterator[Mapping[str, Any]]:
        yield from ({} for _ in range(n))

    def decisions(self) -> list[Decision]:
        """Return the queries to a model in the 4,520 positions, for :mod:`turnwise.tasks.two_player.query`."""
        return decisions()

    def solve(self, policy: Any) -> Exploitability:
        """Measure a policy under the task's ``invalid_cost``; see :func:`turnwise.tasks.tic_tac_toe.solve`."""
        return solve(policy, self.options.invalid_cost)


def table_player(policy: np.ndarray, rng: Random) -> Player:
    """A player that plays a policy ``[4520, 9]`` or ``[4520, 10]``. For the tenth column it names an invalid cell."""
    rows = {board: index for index, board in enumerate(positions().open_boards)}

    def play(actor_id: str, messages: Messages) -> str:
        row = policy[rows[read_board(messages)]]
        return f"[{rng.choices(range(len(row)), weights=row.tolist())[0]}]"

    return play
