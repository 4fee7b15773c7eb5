"""Branch values: an action by what it adds to the worth of the state, as what was sampled from there tells it.

    A(s, a) = r + gamma V(s') - V(s)

``s'`` is the state that the action left. ``V`` needs no critic: it is a mean of sampled returns (VinePPO, Kazemnejad et
al., https://arxiv.org/abs/2410.01679, section 4). In a tree these are there already:

    V(s) = mean over the branches b at s of Q(b),  Q(b) = r_b + gamma V(s_b)     where the tree branched at s
         = mean return of the playouts from s                                   else, where there are any
         = Q of the one action that was taken at s                              else
         = what the rubric gave at the end, to actors whose last action earned
           nothing by itself                                                    where s is an end

From the state of a branch that was pruned nothing was played, unless by playouts. Then it is worth what the states
of its siblings are worth on the mean: what nobody looked at makes no difference. So with one survivor and without
playouts ``A`` is the reward less the siblings' mean; each of ``TreeSampler(playouts=M)`` is a look ahead.
Means have no bias so long as branches are not selected by these very playouts (``score_by="value"``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from turnwise.credit.base import Credit
from turnwise.credit.returns import check_gamma
from turnwise.credit.state_values import StateValues
from turnwise.types import Rollout, Sample


@dataclass(kw_only=True)
class VineCredit(Credit):
    """``r + gamma V(next state) - V(state)``, the values from branches and playouts.

    An actor's rewards are its own, discounted by ``gamma`` once for each of its actions; with ``team`` the rewards of
    all actors are added up, and discounted with each action, for a team whose early members are to be paid for what the
    later ones make of it. Model calls of hooks are no actions, and get 0.
    """

    values_of_states: ClassVar[bool] = True
    gamma: float = 1.0
    team: bool = False

    def __post_init__(self) -> None:
        check_gamma(self.gamma)

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Advantages ``[B]`` float32 of ``samples``, in their order.

        Raises ``ValueError`` for samples that tell no rollout, and for a batch without a branch or a playout.
        """
        advantages = np.zeros(len(samples), dtype=np.float32)
        trees = 0
        for tree, rows in self._trees(samples):
            trees += tree.was_sampled
            for row in rows:
                advantages[row] = tree.advantage(samples[row].step_index)
        if samples and not trees:
            raise ValueError(
                "no rollout of the batch has branches or playouts, so nothing tells what its states are worth: "
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
        """The values of each rollout, and the rows of ``samples`` that are of it."""
        rows_of: defaultdict[str, list[int]] = defaultdict(list)
        for row, sample in enumerate(samples):
            rows_of[sample.rollout_id].append(row)
        rollouts = _rollouts_of(samples)
        for id, rows in rows_of.items():
            yield StateValues(rollouts[id], [samples[row] for row in rows], gamma=self.gamma, team=self.team), rows


def _rollouts_of(samples: Sequence[Sample]) -> dict[str, Rollout]:
    """The rollouts by id of all trees of episodes that ``samples`` come from."""
    tops = {}
    for sample in samples:
        if sample.root_result is None:
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.rollout_id!r} tells no tree of episodes: expected "
                "samples of turnwise.samples.collect.collect_samples(results)"
            )
        tops[id(sample.root_result)] = sample.root_result
    return {node.rollout.id: node.rollout for top in tops.values() for node in top.walk()}
