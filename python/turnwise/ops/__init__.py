"""Fused ops: grouped advantages, reward reductions and the clipped policy loss. Needs torch and numpy alone."""

from __future__ import annotations

from .aggregation import AGGREGATIONS, aggregate, loss_normalizer
from .backends import BackendUnavailable, available_backends, backend
from .factorize import factorize
from .gae import gae
from .group_advantage import group_advantage
from .grouped_policy_loss import GroupedPolicyLoss, grouped_policy_loss
from .linear_logprob import linear_logprob
from .linear_policy_loss import linear_policy_loss
from .logprob import logprob
from .options import (
    CISPO,
    GMPO,
    GPG,
    GSPO,
    KL,
    SAPO,
    Clip,
    ClipCov,
    Custom,
    ImportanceCorrection,
    KLCov,
    Reinforce,
    Variant,
)
from .policy_loss import PolicyLoss, policy_loss
from .policy_loss_variants import select_tokens
from .token_rewards import token_returns, token_reward_sum

__all__ = [
    "AGGREGATIONS",
    "CISPO",
    "GMPO",
    "GPG",
    "GSPO",
    "KL",
    "SAPO",
    "BackendUnavailable",
    "Clip",
    "ClipCov",
    "Custom",
    "GroupedPolicyLoss",
    "ImportanceCorrection",
    "KLCov",
    "PolicyLoss",
    "Reinforce",
    "Variant",
    "aggregate",
    "available_backends",
    "backend",
    "factorize",
    "gae",
    "group_advantage",
    "grouped_policy_loss",
    "linear_logprob",
    "linear_policy_loss",
    "logprob",
    "loss_normalizer",
    "policy_loss",
    "select_tokens",
    "token_returns",
    "token_reward_sum",
]
