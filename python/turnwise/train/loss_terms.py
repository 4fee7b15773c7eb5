"""Terms of the loss beside the advantage: rows without an advantage train with them, so no filter drops these rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from turnwise.train.callbacks import TrainerView
from turnwise.train.config.optimization import LossConfig
from turnwise.train.model.policy import Policy
from turnwise.train.update.loss import moves_without_advantage
from turnwise.types import Sample

Trains = Callable[[Policy, Sample], bool]
"""Tells whether a term trains a sample of a policy."""


def terms_beside_advantage(config: LossConfig, policies: Mapping[str, Policy]) -> dict[str, Trains]:
    """Return the terms that train samples whose advantage is 0, by their config keys.

    A KL penalty on the reward is none: it changes advantages.
    """
    taught = any(_teachers(policy) for policy in policies.values())
    terms: dict[str, tuple[bool, Trains]] = {
        "loss.kl": (
            config.kl.coef > 0 and config.kl.apply_to == "loss",
            lambda policy, _: policy.reference is not None,
        ),
        "loss.entropy_coef": (config.entropy_coef != 0, _every),
        "loss.entropy_target": (config.entropy_target is not None, _every),
        "loss.observations": (config.observations > 0, _every),
        "loss.critic": (config.critic is not None, _every),
        "loss.baseline": (config.baseline != "credit", _every),
        "loss.type": (moves_without_advantage(config), _every),
        "distill.top_k": (
            taught,
            lambda policy, sample: sample.actor in _teachers(policy),
        ),
    }
    return {key: trains for key, (is_on, trains) in terms.items() if is_on}


def keep_their_rows(trainer: TrainerView) -> None:
    """Let the arena's filter keep the rows that :func:`terms_beside_advantage` train, and note it."""
    terms, filters = terms_beside_advantage(trainer.config.loss, trainer.policies), trainer.arena.filters
    if not (terms and filters.drop_zero_advantage):
        return

    def keep(sample: Sample) -> bool:
        policy = trainer.policies.get(sample.policy)
        return policy is not None and policy.trainable and any(trains(policy, sample) for trains in terms.values())

    trainer.arena.filters = replace(filters, keep=keep)
    trainer.log.note(
        f"samples with an advantage of 0 train too, with {' and '.join(terms)}: filter.drop_zero_advantage does not "
        "drop them, and the metrics without_advantage/<cause> count them"
    )


def _teachers(policy: Policy) -> Mapping[str, Policy]:
    """Return the teachers of the policy's actors whose KL is in the loss; the policies of a server have none."""
    teaching = getattr(policy, "teaching", None)
    return {} if teaching is None else teaching.teachers


def _every(policy: Policy, sample: Sample) -> bool:
    return True
