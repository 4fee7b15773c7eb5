"""Exact values and best responses of a small zero-sum game with hidden information, stored as arrays over its nodes.

Legend: ``N`` nodes, each after its parent; ``I`` information sets; ``A`` actions, the last of which may be an invalid
one. A policy is ``[I, A]`` float64: row ``i`` holds the probabilities of the actions at information set ``i``. One
policy serves both players, as each information set belongs to one of them. Values are player 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Exploitability:
    """Distance of a policy for both seats of a zero-sum game from an equilibrium.

    ``value`` is player 0's payoff if both seats follow the policy. ``best_response[p]`` is player ``p``'s payoff if it
    plays its best response to the policy. ``nash_conv`` is the sum of both players' gains, and ``exploitability`` half
    of it: 0 at an equilibrium and nowhere else (as in OpenSpiel, https://arxiv.org/abs/1908.09453, section 3.4).
    """

    value: float
    best_response: tuple[float, float]

    @property
    def nash_conv(self) -> float:
        return self.best_response[0] + self.best_response[1]

    @property
    def exploitability(self) -> float:
        return self.nash_conv / 2


@dataclass(frozen=True, slots=True)
class GameTree:
    """A game as arrays over its nodes.

    ``parent [N]``: -1 at the roots. ``action [N]``: the action that leads to the node. ``infoset [N]``: -1 if the game
    is over. ``payoff [N]``: player 0's payoff at an end, else 0. ``chance [N]``: the probability of the deal.
    ``depth [N]``: the number of actions before. ``player [I]``: the player that acts at an information set. ``actions``
    is the number of columns of a policy.
    """

    parent: np.ndarray
    action: np.ndarray
    infoset: np.ndarray
    payoff: np.ndarray
    chance: np.ndarray
    depth: np.ndarray
    player: np.ndarray
    actions: int

    def value(self, policy: np.ndarray) -> float:
        """Return player 0's mean payoff if both players follow ``policy``."""
        reach = self.chance * self._reach(policy, 0) * self._reach(policy, 1)
        return float(reach @ self.payoff)

    def best_response(self, policy: np.ndarray, player: int) -> tuple[float, np.ndarray]:
        """Return the value of ``player``'s best response to ``policy``, and its action at each information set.

        The actions are ``[I]`` int64. The method solves information sets from the deepest to the first. The value of an
        action is the sum over the set's nodes, weighted by the probability that chance and the other player lead there.
        Perfect recall makes this exact.
        """
        sign = 1.0 - 2.0 * player
        weight = self.chance * self._reach(policy, 1 - player)
        worth = np.where(self.infoset < 0, sign * weight * self.payoff, 0.0)
        best = np.zeros(len(self.player), dtype=np.int64)
        for depth in range(int(self.depth.max()), 0, -1):
            # Sum the nodes' values per information set and action, and let the player choose the best action.
            nodes = np.flatnonzero(self.depth == depth)
            at = self.infoset[self.parent[nodes]]
            mine = self.player[at] == player
            gains = np.zeros((len(self.player), self.actions))
            reached = np.zeros((len(self.player), self.actions), dtype=bool)
            np.add.at(gains, (at[mine], self.action[nodes[mine]]), worth[nodes[mine]])
            reached[at[mine], self.action[nodes[mine]]] = True
            chosen = np.where(reached, gains, -np.inf).argmax(axis=1)
            best[at[mine]] = chosen[at[mine]]
            # At the player's own nodes only the chosen child counts. The weights already hold the other's choices.
            taken = ~mine | (self.action[nodes] == chosen[at])
            np.add.at(worth, self.parent[nodes[taken]], worth[nodes[taken]])
        return float(worth[self.depth == 0].sum()), best

    def solve(self, policy: np.ndarray) -> Exploitability:
        """Compute value, best responses and exploitability of ``policy [I, A]``, exactly up to float64 rounding."""
        responses = (self.best_response(policy, 0)[0], self.best_response(policy, 1)[0])
        return Exploitability(self.value(policy), responses)

    def _reach(self, policy: np.ndarray, player: int) -> np.ndarray:
        """Return ``[N]``: the probability that ``player``'s own actions lead to each node."""
        reach = np.ones(len(self.parent))
        for depth in range(1, int(self.depth.max()) + 1):
            nodes = np.flatnonzero(self.depth == depth)
            at = self.infoset[self.parent[nodes]]
            chances = np.where(self.player[at] == player, policy[at, self.action[nodes]], 1.0)
            reach[nodes] = reach[self.parent[nodes]] * chances
        return reach


def build_tree(
    roots: Sequence[tuple[Any, float]],
    children: Callable[[Any], Sequence[tuple[int, Any]]],
    infoset: Callable[[Any], Hashable],
    payoff: Callable[[Any], float],
    infosets: Sequence[tuple[Hashable, int]],
    actions: int,
) -> GameTree:
    """Build the tree below ``roots``, which are ``(state, probability)``. A state without ``children`` is an end.

    ``children(state)`` lists ``(action, state)``. ``infosets`` lists ``(information set, player)`` in the order of the
    policy's rows.
    """
    rows = {name: index for index, (name, _) in enumerate(infosets)}
    columns: dict[str, list[float]] = {
        name: [] for name in ("parent", "action", "infoset", "payoff", "chance", "depth")
    }
    # Visit the states depth first, so that each node comes after its parent.
    stack = [(state, -1, 0, probability, 0) for state, probability in reversed(roots)]
    while stack:
        state, parent, action, probability, depth = stack.pop()
        number, below = len(columns["parent"]), children(state)
        row = (
            parent,
            action,
            rows[infoset(state)] if below else -1,
            0.0 if below else payoff(state),
            probability,
            depth,
        )
        for name, value in zip(columns, row, strict=True):
            columns[name].append(value)
        stack += [(child, number, taken, probability, depth + 1) for taken, child in reversed(below)]
    kinds = {"payoff": np.float64, "chance": np.float64}
    arrays = {name: np.array(values, dtype=kinds.get(name, np.int64)) for name, values in columns.items()}
    within = {(int(i), int(d)) for i, d in zip(arrays["infoset"], arrays["depth"], strict=True) if i >= 0}
    assert len(within) == len(infosets), "each information set lies at one depth, and is reached"
    return GameTree(**arrays, player=np.array([player for _, player in infosets], dtype=np.int64), actions=actions)


def check_policy(policy: Any, legal: np.ndarray) -> np.ndarray:
    """Return ``policy`` as ``[I, A + 1]`` float64. The last column is for invalid actions; it is 0 if it was missing.

    ``legal [I, A]`` marks the legal actions. Raises ``ValueError`` for another shape, for rows that are not a
    distribution, and for probability on an illegal action, which belongs in the last column.
    """
    table = np.asarray(policy, dtype=np.float64)
    rows, actions = legal.shape
    if table.shape == (rows, actions):
        table = np.concatenate([table, np.zeros((rows, 1))], axis=1)
    if table.shape != (rows, actions + 1):
        raise ValueError(
            f"policy has shape {table.shape}: expected ({rows}, {actions}), or one column more for invalid"
        )
    if not np.isfinite(table).all() or table.min() < 0 or np.abs(table.sum(axis=1) - 1).max() > 1e-6:
        raise ValueError("policy: expected probabilities >= 0 in each row, with sum 1")
    if table[:, :actions][~legal].any():
        row, column = np.argwhere((table[:, :actions] > 0) & ~legal)[0]
        raise ValueError(f"policy[{row}, {column}]={table[row, column]:g}: the action is not legal there, expected 0")
    return table
