"""Terms of the loss beside the advantage: rows without an advantage train with them, so no filter drops these rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from turnwise.ops import policy_loss
from turnwise.train.callbacks import TrainerView
from turnwise.train.config.optimization import LossConfig
from turnwise.train.model.policy import Policy
from turnwise.train.update.loss_types import make_variant
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
        "loss.type": (_moves_without_advantage(config), _every),
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


def _moves_without_advantage(config: LossConfig) -> bool:
    """Return True if the loss of the config's type has a gradient where all advantages are 0, such as DRO's.

    Losses that select tokens of the minibatch compare rows, and move none without an advantage by themselves.
    """
    variant = make_variant(config)
    if variant.selects:
        return False
    aggregation = (variant.aggregations or ("token-mean",))[0]
    logprobs, old = torch.tensor([-1.0, -0.5], requires_grad=True), torch.tensor([-1.2, -0.3])
    layout: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 2]), "aggregation": aggregation}
    loss = policy_loss(logprobs, old, torch.zeros(1), variant=variant, **layout).loss
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    return gradient is not None and bool(gradient.any())
