"""Pass@k training: a trajectory's advantage is what it adds to the best of k.

Each subset ``S`` of ``k`` of the ``n`` answers to a question has the reward of its best answer, ``R(S) = max R_j``.
With the mean and the standard deviation over all subsets,

    A_i = (E[R(S) | i in S] - E[R(S)]) / (std(R(S)) + eps)

computed exactly from order statistics. For rewards 0 and 1 this is the published closed form: with ``N`` wrong
answers, ``E[R(S)] = 1 - C(N, k) / C(n, k)``, which is the estimator of pass@k (M. Chen et al.,
https://arxiv.org/abs/2107.03374), and ``E[R(S) | i wrong] = 1 - C(N - 1, k - 1) / C(n - 1, k - 1)``. (Z. Chen et al.,
Pass@k Training, https://arxiv.org/abs/2508.10751.) Compared with pass@1, it rewards variety: if most answers are right,
little is left to learn. ``k = 1`` is GRPO with the population's standard deviation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.credit.base import ALONE, CENTERED, EQUAL, Credit
from turnwise.credit.grouping import tolerance
from turnwise.types import CHILD, Sample


@dataclass(kw_only=True)
class PassAtKCredit(Credit):
    """Compares answers in groups ``(group_id,)`` or the sample's own ``group``; ``R`` is the mean reward of an answer.

    The sub-agents of an attempt are one answer. A question with ``k`` answers or fewer has at most one subset, so all
    its advantages are 0. If all questions of a batch have so few answers, the rule warns.
    """

    k: int = 4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k={self.k!r}: expected a whole number >= 1")
        if not self.eps >= 0:
            raise ValueError(f"eps={self.eps!r}: expected a number >= 0")

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in their order."""
        groups = _answers(samples)
        if groups and max(map(len, groups.values())) <= self.k:
            warnings.warn(
                f"k={self.k}: no question of the batch has more than {self.k} answers, so every advantage is 0; "
                "ask for more copies or a smaller k",
                stacklevel=2,
            )
        advantages = np.zeros(len(samples), dtype=np.float32)
        for trajectories in groups.values():
            if _tied(samples, trajectories):
                continue
            rewards = _rewards(samples, trajectories)
            for rows, advantage in zip(trajectories.values(), self._of_group(rewards), strict=True):
                advantages[rows] = advantage
        return advantages

    def zero_causes(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
        """Return the cause of a zero advantage, for each of ``rows`` of ``samples``."""
        causes: dict[int, str] = {}
        for trajectories in _answers(samples).values():
            tied = _tied(samples, trajectories)
            cause = ALONE if len(trajectories) <= self.k else EQUAL if tied else CENTERED
            causes |= dict.fromkeys((index for indices in trajectories.values() for index in indices), cause)
        return [causes[row] for row in rows]

    def _of_group(self, rewards: np.ndarray) -> np.ndarray:
        """Return advantages ``[n]`` of the trajectories of one question."""
        n, k = len(rewards), self.k
        values, inverse = np.unique(rewards, return_inverse=True)
        if n <= k:
            return np.zeros(n)
        values = values - values[0]  # ties stay exact, and rewards far from 0 cost no accuracy
        up_to = np.cumsum(np.bincount(inverse)).tolist()  # number of answers with at most this value
        # The best of k answers is at most v if all k are. Given one member, that one and the other k - 1 must be.
        below = np.array([math.comb(count, k) / math.comb(n, k) for count in up_to])
        share = np.diff(below, prepend=0.0)
        mean = share @ values
        std = math.sqrt(share @ (values - mean) ** 2)
        below_given = np.array([math.comb(count - 1, k - 1) / math.comb(n - 1, k - 1) for count in up_to])
        given = np.array(
            [below_given[i] * v + np.diff(below_given[i:]) @ values[i + 1 :] for i, v in enumerate(values)]
        )
        return ((given - mean) / (std + self.eps))[inverse]


def _answers(samples: Sequence[Sample]) -> dict[object, dict[Hashable, list[int]]]:
    """Return the places of each question's trajectories in ``samples``."""
    groups: dict[object, dict[Hashable, list[int]]] = {}
    for index, sample in enumerate(samples):
        key = sample.group if sample.group is not None else (sample.group_id,)
        answer = sample.trajectory_key if sample.attempt_id is None else (CHILD, sample.attempt_id)
        groups.setdefault(key, {}).setdefault(answer, []).append(index)
    return groups


def _tied(samples: Sequence[Sample], trajectories: Mapping[Hashable, Sequence[int]]) -> bool:
    """True if all trajectories have the same mean reward, up to rounding."""
    rewards = [samples[index].reward for rows in trajectories.values() for index in rows]
    return bool(np.ptp(_rewards(samples, trajectories)) <= tolerance(rewards))


def _rewards(samples: Sequence[Sample], trajectories: Mapping[Hashable, Sequence[int]]) -> np.ndarray:
    """Return the mean reward of each trajectory, ``[n]`` float64."""
    return np.array([np.mean([samples[index].reward for index in rows]) for rows in trajectories.values()])
