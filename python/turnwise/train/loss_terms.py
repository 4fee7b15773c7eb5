"""What a loss's terms mean for a run: rows that train without an advantage, and passes over the head's logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnwise.train.callbacks import TrainerView
from turnwise.train.config.optimization import LossConfig
from turnwise.train.model.policy import Policy
from turnwise.train.terms.registry import terms_of
from turnwise.train.terms.term import Term
from turnwise.types import Sample


def terms_beside_advantage(config: LossConfig, policies: Mapping[str, Policy]) -> dict[str, dict[str, Term]]:
    """Return the terms that train samples whose advantage is 0, by their config keys and the policies.

    A KL penalty on the reward is none: it changes advantages.
    """
    found: dict[str, dict[str, Term]] = {}
    for name, policy in policies.items():
        for term in terms_of(policy).all.values():
            for key in term.beside_advantage(config):
                found.setdefault(key, {})[name] = term
    return found


def note_passes(trainer: TrainerView) -> None:
    """Note the terms for which the head computes its logits twice."""
    config, policies = trainer.config.loss, trainer.policies.values()
    terms = [term for policy in policies if policy.trainable for term in terms_of(policy).all.values()]
    if names := dict.fromkeys(term.name for term in terms if term.is_on(config) and term.needs.logprobs):
        trainer.log.note(
            f"the LM head computes its logits twice in an update, as {' and '.join(names)} must read log-probs before "
            "the loss is known"
        )


def keep_their_rows(trainer: TrainerView) -> None:
    """Let the arena's filter keep the rows that :func:`terms_beside_advantage` train, and note it."""
    terms, filters = terms_beside_advantage(trainer.config.loss, trainer.policies), trainer.arena.filters
    if not (terms and filters.drop_zero_advantage):
        return

    def keep(sample: Sample) -> bool:
        policy = trainer.policies.get(sample.policy)
        if policy is None or not policy.trainable:
            return False
        return any(own[policy.name].trains(policy, sample) for own in terms.values() if policy.name in own)

    trainer.arena.filters = replace(filters, keep=keep)
    trainer.log.note(
        f"samples with an advantage of 0 train too, with {' and '.join(terms)}: filter.drop_zero_advantage does not "
        "drop them, and the metrics without_advantage/<cause> count them"
    )
