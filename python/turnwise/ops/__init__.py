"""Fused ops: grouped advantages, reward reductions, log-probabilities and policy losses. Needs only torch and numpy.

Read in this order: common, advantage, rewards, logprob, loss, head, value_loss, masks, parallel.
May import: _C, utils.
"""

from __future__ import annotations

from turnwise.utils.registry import require

require("turnwise.ops", "numpy", "torch")

from turnwise.ops.advantage.factorize import factorize
from turnwise.ops.advantage.group_advantage import group_advantage
from turnwise.ops.advantage.optimal_token_baseline import optimal_token_baseline
from turnwise.ops.common.dispatch import BackendUnavailable, available_backends, backend
from turnwise.ops.head.linear_policy_loss import linear_policy_loss
from turnwise.ops.head.one_pass import HeadLoss
from turnwise.ops.logprob.linear_logprob import linear_logprob
from turnwise.ops.logprob.logprob import logprob
from turnwise.ops.loss.aggregation import AGGREGATIONS, aggregate, loss_normalizer
from turnwise.ops.loss.grouped_policy_loss import GroupedPolicyLoss, grouped_policy_loss
from turnwise.ops.loss.options import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GPG,
    GSPO,
    KL,
    LUSPO,
    SAPO,
    VESPO,
    Clip,
    ClipCov,
    Custom,
    ImportanceCorrection,
    KLCov,
    Reinforce,
    Variant,
)
from turnwise.ops.loss.policy_loss import PolicyLoss, policy_loss
from turnwise.ops.loss.variants import select_tokens
from turnwise.ops.masks import (
    Rejection,
    RejectionMask,
    off_policy_mask,
    rejection_mask,
    second_moment_mask,
    top_entropy_mask,
)
from turnwise.ops.parallel import dtensor as _dtensor  # noqa: F401 -- the ops find it in a table
from turnwise.ops.parallel.sequence_policy_loss import sequence_parallel_policy_loss
from turnwise.ops.parallel.vocab_logprob import vocab_parallel_linear_logprob, vocab_parallel_logprob
from turnwise.ops.parallel.vocab_policy_loss import vocab_parallel_linear_policy_loss
from turnwise.ops.rewards.gae import gae
from turnwise.ops.rewards.token_rewards import token_returns, token_reward_sum
from turnwise.ops.value_loss import ValueLoss, value_loss

__all__ = [
    "AGGREGATIONS",
    "CISPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GPG",
    "GSPO",
    "KL",
    "LUSPO",
    "SAPO",
    "VESPO",
    "BackendUnavailable",
    "Clip",
    "ClipCov",
    "Custom",
    "GroupedPolicyLoss",
    "HeadLoss",
    "ImportanceCorrection",
    "KLCov",
    "PolicyLoss",
    "Reinforce",
    "Rejection",
    "RejectionMask",
    "ValueLoss",
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
    "off_policy_mask",
    "optimal_token_baseline",
    "policy_loss",
    "rejection_mask",
    "second_moment_mask",
    "select_tokens",
    "sequence_parallel_policy_loss",
    "token_returns",
    "token_reward_sum",
    "top_entropy_mask",
    "value_loss",
    "vocab_parallel_linear_logprob",
    "vocab_parallel_linear_policy_loss",
    "vocab_parallel_logprob",
]
