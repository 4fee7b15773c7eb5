"""RLOO, leave-one-out: a trajectory against the mean of the *other* answers to its question.

    A_i = R_i - mean(R_j, j != i) = n / (n - 1) * (R_i - mean(R))

Its own reward is not in its baseline, so the estimate of the policy gradient has no bias. There is no standard
deviation. (Ahmadian et al., https://arxiv.org/abs/2402.14740.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.credit.grpo import GRPOCredit


@dataclass(kw_only=True)
class RLOOCredit(GRPOCredit):
    """Group ``(uid,)``, one value per trajectory; ``hierarchy`` as in :class:`GRPOCredit`."""

    center: str = "leave_one_out"
    normalize: bool = field(default=False, kw_only=False)
