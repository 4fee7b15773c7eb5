"""A small game with hidden information as one array per property of its nodes: exact values and best responses.

Legend: ``N`` nodes, each after its parent; ``I`` information sets; ``A`` actions, the last of which may be an invalid
one. A policy is ``[I, A]`` float64: row ``i`` holds the probabilities of the actions at information set ``i``, for
both players, since each information set belongs to one of them. Values are player 0's; the game is zero sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Exploitability:
    """Distance of a policy for both seats of a zero-sum game from an equilibrium.

    ``value`` is what player 0 gets when both seats follow the policy; ``best_response[p]`` what player ``p`` gets
    by playing best against it. ``nash_conv`` is what both could gain together, ``exploitability`` half of it: 0 at an
    equilibrium and nowhere else (as OpenSpiel counts them, https://arxiv.org/abs/1908.09453, section 3.4).
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
    """``parent [N]`` (-1 at the roots), ``action [N]`` the one that led here, ``infoset [N]`` (-1 where the game is
    over), ``payoff [N]`` player 0's at the ends, ``chance [N]`` the probability of the deal, ``depth [N]``;
    ``player [I]`` who acts at an information set."""

    parent: np.ndarray
    action: np.ndarray
    infoset: np.ndarray
    payoff: np.ndarray
    chance: np.ndarray
    depth: np.ndarray
    player: np.ndarray
    actions: int

    def value(self, policy: np.ndarray) -> float:
        """Return player 0's mean payoff when both follow ``policy``."""
        reach = self.chance * self._reach(policy, 0) * self._reach(policy, 1)
        return float(reach @ self.payoff)

    def best_response(self, policy: np.ndarray, player: int) -> tuple[float, np.ndarray]:
        """Return the value of ``player``'s best response to ``policy``, and the response ``[I]`` int64, an action each.

        Information sets are settled from the last to the first: at each, an action is worth the sum over its nodes,
        weighed by how likely chance and the other one make them (perfect recall makes that exact).
        """
        sign = 1.0 - 2.0 * player
        weight = self.chance * self._reach(policy, 1 - player)
        worth = np.where(self.infoset < 0, sign * weight * self.payoff, 0.0)
        best = np.zeros(len(self.player), dtype=np.int64)
        for depth in range(int(self.depth.max()), 0, -1):
            nodes = np.flatnonzero(self.depth == depth)
            at = self.infoset[self.parent[nodes]]
            mine = self.player[at] == player
            gains = np.zeros((len(self.player), self.actions))
            known = np.zeros((len(self.player), self.actions), dtype=bool)
            np.add.at(gains, (at[mine], self.action[nodes[mine]]), worth[nodes[mine]])
            known[at[mine], self.action[nodes[mine]]] = True
            chosen = np.where(known, gains, -np.inf).argmax(axis=1)
            best[at[mine]] = chosen[at[mine]]
            # Of its own nodes only the chosen child counts; the other one's children are weighed in already.
            taken = ~mine | (self.action[nodes] == chosen[at])
            np.add.at(worth, self.parent[nodes[taken]], worth[nodes[taken]])
        return float(worth[self.depth == 0].sum()), best

    def solve(self, policy: np.ndarray) -> Exploitability:
        """Value, best responses and exploitability of ``policy [I, A]``, exactly (to float64's rounding)."""
        responses = (self.best_response(policy, 0)[0], self.best_response(policy, 1)[0])
        return Exploitability(self.value(policy), responses)

    def _reach(self, policy: np.ndarray, player: int) -> np.ndarray:
        """``[N]``: the probability that ``player``'s own actions lead to each node."""
        reach = np.ones(len(self.parent))
        for depth in range(1, int(self.depth.max()) + 1):
            nodes = np.flatnonzero(self.depth == depth)
            at = self.infoset[self.parent[nodes]]
            own = np.where(self.player[at] == player, policy[at, self.action[nodes]], 1.0)
            reach[nodes] = reach[self.parent[nodes]] * own
        return reach


def build_tree(
    roots: Sequence[tuple[Any, float]],
    children: Callable[[Any], Sequence[tuple[int, Any]]],
    infoset: Callable[[Any], Hashable],
    payoff: Callable[[Any], float],
    infosets: Sequence[tuple[Hashable, int]],
    actions: int,
) -> GameTree:
    """The tree below ``roots``, states with the probability of each. A state without ``children`` is an end.

    ``children(state)`` are ``(action, state)``; ``infosets`` lists ``(information set, player)`` in the policy's order.
    """
    place = {name: index for index, (name, _) in enumerate(infosets)}
    columns: dict[str, list[float]] = {
        name: [] for name in ("parent", "action", "infoset", "payoff", "chance", "depth")
    }
    stack = [(state, -1, 0, probability, 0) for state, probability in reversed(roots)]
    while stack:
        state, parent, action, probability, depth = stack.pop()
        number, below = len(columns["parent"]), children(state)
        row = (
            parent,
            action,
            place[infoset(state)] if below else -1,
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
    """``policy`` as ``[I, A + 1]`` float64, the last column for invalid actions; one without it gets zeros there.

    ``legal [I, A]`` says which actions there are. Raises ``ValueError`` for another shape, for rows that are no
    distribution, and for weight on an action that is not legal: it belongs into the last column.
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
