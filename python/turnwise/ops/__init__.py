"""Fused ops: grouped advantages and the clipped policy loss. Needs torch and numpy alone."""

from __future__ import annotations

from .aggregation import AGGREGATIONS, loss_normalizer
from .backends import BackendUnavailable, available_backends, backend
from .factorize import factorize
from .group_advantage import group_advantage
from .options import KL, Clip, ImportanceCorrection
from .policy_loss import PolicyLoss, policy_loss

__all__ = [
    "AGGREGATIONS",
    "KL",
    "BackendUnavailable",
    "Clip",
    "ImportanceCorrection",
    "PolicyLoss",
    "available_backends",
    "backend",
    "factorize",
    "group_advantage",
    "loss_normalizer",
    "policy_loss",
]
