"""Credit rules as advantage estimators of rLLM (https://github.com/rllm-org/rllm).

The tests ran it in rLLM 0.3.0.pre, commit 9beb6e0f676a46d38858991fd79ac5f8e0b16d4c, which PyPI does not have.

rLLM groups trajectories by ``(task, role)`` and calls an estimator once per role and batch, with one reward for each
trajectory. Each step of a trajectory gets the trajectory's advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from turnwise.credit import ATGRPOCredit, Credit, TurnReturnsCredit, credit_columns
from turnwise.integrations.trainers import import_from, make_rule

Advantages = tuple[list[np.ndarray], list[np.ndarray]]


def register_credit(rule: Credit | str, name: str | None = None, **options: Any) -> str:
    """Register ``rule`` with rLLM and return its name there, by default ``turnwise_<rule>``.

    ``rule`` is a name in ``turnwise.credit.registry``, built with ``options``, or a rule. Use the result in
    ``traj_group_adv_estimator_map``, which maps a role to an estimator. One call makes one rule, so roles that share
    the name share the rule. A rule with baselines (``"rae"``) keeps them as long as the process lives.

    Raises ``ModuleNotFoundError`` without rLLM, and ``ValueError`` for a rule that needs more than a trajectory's
    reward (``"at_grpo"``, ``"turn_returns"``, ``"gigpo"``, ``"levels"``, ``"vine"``).

    Example: ``{"solver": register_credit("dr_mas"), "verifier": register_credit("rae")}``
    """
    advantage = import_from("rllm.trainer.algorithms.advantage", "rLLM", "install https://github.com/rllm-org/rllm")
    assigner, name = make_rule(rule, name, options)
    if isinstance(assigner, ATGRPOCredit | TurnReturnsCredit):
        raise ValueError(f"rule={rule!r}: it compares single calls, and rLLM has one reward for a trajectory's calls")
    advantage.register_rllm_adv_estimator(name)(estimator(assigner))
    return name


def estimator(rule: Credit) -> Callable[..., Advantages]:
    """Return an estimator with rLLM's signature, ``(rewards, algorithm_config, *, traj_groups)``.

    ``rewards`` has one float array per group, all of one role. The result is ``(advantages, advantages)``, arrays of
    the same shapes, as no rule has a critic.
    """

    def estimate(
        rewards: Sequence[np.ndarray], algorithm_config: Any, *, traj_groups: Sequence[Any], **_: Any
    ) -> Advantages:
        trajectories = [trajectory for group in traj_groups for trajectory in group.trajectories]
        advantages = credit_columns(
            rule,
            np.concatenate([np.zeros(0), *rewards]),
            questions=[group.group_id for group in traj_groups for _ in group.trajectories],
            actors=[group.group_role for group in traj_groups for _ in group.trajectories],
            lengths=[sum(len(step.response_ids) for step in each.steps) for each in trajectories],
        )
        by_group = np.split(advantages, np.cumsum([len(group) for group in rewards])[:-1]) if rewards else []
        return by_group, by_group

    return estimate
