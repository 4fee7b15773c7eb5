"""Exact exploitability of a policy in a small game of OpenSpiel, by OpenSpiel's own best responses.

A policy is ``[I, A]`` float64: ``I`` different prompts that decide, ``A`` numbers of actions. ``[I, A + 1]`` adds the
probability of texts that are no legal move. OpenSpiel's games have no such move, so the policy is measured on the
condition that the move is legal.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from turnwise.integrations.environments.base.texts import with_moves
from turnwise.tasks.two_player import Decision, Exploitability
from turnwise.tasks.two_player.tree import check_policy
from turnwise.types import Messages

MOST_STATES = 1_000_000
"""States of the largest game that is solved; tic-tac-toe has 549,946."""


def unsolved_reason(game: Any) -> str:
    """Return a sentence on why OpenSpiel can't solve ``game``, from its type alone; empty if it can."""
    kind, types = game.core.get_type(), game.spiel.GameType
    zero_sums = (types.Utility.ZERO_SUM, types.Utility.CONSTANT_SUM)
    if game.core.num_players() != 2 or kind.utility not in zero_sums:
        return "it is no zero-sum game for two"
    if game.is_simultaneous:
        return "its moves are simultaneous"
    if kind.chance_mode == types.ChanceMode.SAMPLED_STOCHASTIC:
        return "its chance is sampled, so its outcomes can't be enumerated"
    if not kind.provides_information_state_string:
        return "OpenSpiel has no information states of it"
    return ""


class ExactGame:
    """All decisions of a game, and its solver. States with equal prompts are one decision.

    Example: ``ExactGame(game).solve(uniform).exploitability`` is 2.3736111111 for Leduc poker.
    """

    def __init__(self, game: Any) -> None:
        if reason := unsolved_reason(game):
            raise ValueError(f"task {game.name!r} has no exact exploitability: {reason}")
        self.game = game
        self.decisions: list[Decision] = []
        self.row_of: dict[str, int] = {}
        """Row of the policy by information state."""
        self._rows: dict[tuple[str, str], int] = {}
        self._enumerate()
        self.legal = np.array([[name is not None for name in one.actions] for one in self.decisions])

    def uniform(self) -> np.ndarray:
        """Return ``[I, A]``: equal probabilities for all legal moves."""
        return self.legal / self.legal.sum(axis=1, keepdims=True)

    def parse(self, text: str) -> str | None:
        """Return the last text in brackets, as the rules of turnwise's own games do."""
        found = re.findall(r"\[([^\[\]]+)\]", text)
        return found[-1] if found else None

    def solve(self, policy: Any) -> Exploitability:
        """Compute the value, both best responses and the exploitability of a policy table.

        Raises ``ValueError`` for a table of another shape, or with probability on an illegal move.
        """
        table = check_policy(policy, self.legal)[:, :-1]
        mass = table.sum(axis=1, keepdims=True)
        table = np.where(mass > 0, table / np.where(mass > 0, mass, 1.0), self.uniform())
        spiel, core = self.game.spiel, self.game.core
        chances = {
            state: [(int(action), float(table[row, action])) for action in np.flatnonzero(self.legal[row])]
            for state, row in self.row_of.items()
        }
        tabular, root = spiel.TabularPolicy(chances), core.new_initial_state()
        value = spiel.expected_returns(root, tabular, -1, True)[0]
        first, second = (spiel.TabularBestResponse(core, seat, tabular).value_from_state(root) for seat in (0, 1))
        # A constant-sum game counts as the zero-sum game with payoffs from its mean.
        middle = core.utility_sum() / 2
        return Exploitability(value - middle, (first - middle, second - middle))

    def _enumerate(self) -> None:
        """Visit every state once, and give each different prompt a row."""
        stack, visited = [self.game.core.new_initial_state()], 0
        while stack:
            state = stack.pop()
            visited += 1
            if visited > MOST_STATES:
                raise ValueError(
                    f"task {self.game.name!r} has no exact exploitability: it has more than {MOST_STATES:,} states"
                )
            if state.is_terminal():
                continue
            if not state.is_chance_node():
                information = state.information_state_string(state.current_player())
                if information not in self.row_of:
                    self.row_of[information] = self._row(state)
            stack += [state.child(action) for action in reversed(state.legal_actions())]

    def _row(self, state: Any) -> int:
        seat, moves = state.current_player(), self.game.moves_of(state)
        actor = self.game.actors[seat]
        prompt = with_moves(self.game.text_of(state, seat), tuple(moves))
        row = self._rows.setdefault((actor, prompt), len(self.decisions))
        if row == len(self.decisions):
            actions: list[str | None] = [None] * self.game.core.num_distinct_actions()
            for name, number in moves.items():
                actions[number] = name
            messages: Messages = [{"role": "user", "content": prompt}]
            self.decisions.append(Decision(actor, messages, tuple(actions)))
        return row
