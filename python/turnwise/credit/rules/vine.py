"""Branch values: an action's advantage is the value that it adds to the state, estimated from sampled play.

    A(s, a) = r + gamma V(s') - V(s)

``s'`` is the state after the action. ``V`` needs no critic: it is a mean of sampled returns (VinePPO, Kazemnejad et
al., https://arxiv.org/abs/2410.01679, section 4). A tree already contains such returns:

    V(s) = mean over the branches b at s of Q(b),  Q(b) = r_b + gamma V(s_b)     if the tree branched at s
         = mean return of the playouts from s                                   else, if there are any
         = Q of the one action that was taken at s                              else
         = the rubric's rewards of actors whose last action has no reward        if s is an end

A branch that was not selected has no later play, except in playouts. Without playouts, its state gets the mean value of
its siblings' states, so unknown play makes no difference. With one survivor and without playouts, ``A`` is therefore
the reward minus the siblings' mean reward. Playouts (``TreeSampler(playouts=M)``) look ahead. The means have no bias,
unless the same playouts select the branches (``score_by="value"``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import Credit, tops_of
from turnwise.credit.rules.turn_returns import check_gamma
from turnwise.credit.state_values import StateValues
from turnwise.types import CreditCapabilities, Sample


@dataclass(kw_only=True)
class VineCredit(Credit):
    """Computes ``r + gamma V(next state) - V(state)`` with values from branches and playouts.

    By default an actor counts only its own rewards, discounted by ``gamma`` once for each of its own actions. With
    ``team`` it counts the rewards of all actors, discounted with each action, so that early members of a team get
    credit for later ones' rewards. Model calls of hooks are not actions and get 0.
    """

    capabilities = CreditCapabilities(values_of_states=True, step_rewards=False)
    gamma: float = 1.0
    team: bool = False

    def __post_init__(self) -> None:
        check_gamma(self.gamma)

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order.

        Raises ``ValueError`` for samples without their rollout, and for a batch without branches and playouts.
        """
        advantages = np.zeros(len(samples), dtype=np.float32)
        trees = 0
        for tree, rows in self._trees(samples):
            trees += tree.was_sampled
            for row in rows:
                advantages[row] = tree.advantage(samples[row].step_index)
        if samples and not trees:
            raise ValueError(
                "no rollout of the batch has branches or playouts, so the values of its states are unknown: "
                "expected TreeSampler(branches=N) with N > 1, or TreeSampler(playouts=M) with M > 0"
            )
        return advantages

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the cause of a zero advantage, for each of ``rows`` of ``samples``."""
        causes: dict[int, str] = {}
        for tree, of_tree in self._trees(samples):
            causes |= {row: tree.zero_cause(samples[row].step_index) for row in of_tree}
        return [causes[row] for row in rows]

    def _trees(self, samples: Sequence[Sample]) -> Iterator[tuple[StateValues, list[int]]]:
        """Yield the values of each rollout, and the rows of ``samples`` that belong to it."""
        rows_of: defaultdict[str, list[int]] = defaultdict(list)
        for row, sample in enumerate(samples):
            rows_of[sample.rollout_id].append(row)
        rollouts = {node.rollout.id: node.rollout for top in tops_of(samples) for node in top.walk()}
        for id, rows in rows_of.items():
            yield StateValues(rollouts[id], [samples[row] for row in rows], gamma=self.gamma, team=self.team), rows
