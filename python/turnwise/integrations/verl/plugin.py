"""Register turnwise with verl. Importing verl imports this module too, in every process (``verl.plugins``)."""

from __future__ import annotations

import warnings
from importlib.util import find_spec


def register() -> None:
    """Register every credit rule, policy loss and trainer under its name with ``turnwise_`` before it."""
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    from turnwise.integrations.verl.estimators import RULES, make_estimator
    from turnwise.integrations.verl.losses import MODES, make_loss

    for rule in RULES:
        register_adv_est(f"turnwise_{rule}")(make_estimator(rule))
    for mode in MODES:
        register_policy_loss(f"turnwise_{mode}")(make_loss(mode))
    if find_spec("transfer_queue") is not None:  # without it verl has only its old trainer
        from turnwise.integrations.verl import trainers  # noqa: F401


try:
    register()
except Exception as error:  # verl hides what a plugin raises
    warnings.warn(f"turnwise is not registered with verl: {type(error).__name__}: {error}", stacklevel=2)
    raise
