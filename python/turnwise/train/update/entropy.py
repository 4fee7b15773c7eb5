"""The entropy bonus with an adaptive coefficient (Skywork-OR1, https://arxiv.org/abs/2505.22312, section 3.2).

    bonus of step k   c_k * entropy   if e <= target, else 0
    c_{k+1}           c_k + step      if e_k < target
                      c_k - step      if e_k > target, at least 0

``e_k`` is the mean entropy per token of step ``k``, and ``e`` the last one that was measured, that of step ``k - 1``.
"""

from __future__ import annotations

import math

from turnwise.train.config.optimization import LossConfig
from turnwise.train.model.policy import Policy


def entropy_coefficient(policy: Policy, config: LossConfig) -> float:
    """Return the coefficient of the policy's next step: the configured one until it has adapted."""
    coef = config.entropy_coef if policy.entropy_coef is None else policy.entropy_coef
    if config.entropy_target is None or policy.last_entropy is None:
        return coef
    return coef if policy.last_entropy <= config.entropy_target else 0.0


def adapt_entropy_coefficient(policy: Policy, entropy: float, config: LossConfig) -> None:
    """Adapt the policy's coefficient to the ``entropy`` of its last step; without a target, or a number, it stays."""
    if config.entropy_target is None or not math.isfinite(entropy):
        return
    coef = config.entropy_coef if policy.entropy_coef is None else policy.entropy_coef
    if entropy != config.entropy_target:
        coef += config.entropy_step if entropy < config.entropy_target else -config.entropy_step
    policy.entropy_coef, policy.last_entropy = max(coef, 0.0), entropy
