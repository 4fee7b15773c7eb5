"""The list of terms, and the terms of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.arena.stages.stage import Stage
from turnwise.inference.weights.lora import activated
from turnwise.ops import PolicyLoss, policy_loss
from turnwise.settings.section import RunFacts
from turnwise.train.config.features import FEATURES, required, term_classes
from turnwise.train.config.optimization import LossConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.policy import Policy
from turnwise.train.model.support import causal_lm
from turnwise.train.terms.term import Part, Term
from turnwise.types import TrainingBatch
from turnwise.types.passes import NOTHING, Needs, Read
from turnwise.utils.values import problem

TERMS = (
    "masks:Masks",
    "kl:KLTerm",
    "policy_loss:PolicyLossTerm",
    "entropy:EntropyBonus",
    "teaching:TeacherKL",
    "critic:Critic",
    *FEATURES,
)
"""The terms in their order: modules of this room and their classes. A line is all that registers one. A term with
settings of its own has it in :data:`turnwise.train.config.features.FEATURES`."""


@cache
def classes(terms: tuple[str, ...]) -> tuple[type[Term], ...]:
    """Import the classes of a list. Raises ``ValueError`` if two have one name, or for an order that one forbids."""
    found: tuple[type[Term], ...] = term_classes(terms)
    places = {term.name: place for place, term in enumerate(found)}
    if len(places) < len(found):
        raise ValueError(f"TERMS={terms}: expected one name for each, got {[term.name for term in found]}")
    for place, term in enumerate(found):
        wrong = [other for other in term.after if places.get(other, -1) > place]
        wrong += [other for other in term.before if places.get(other, place) < place]
        if wrong:
            raise ValueError(f"TERMS={terms}: expected {term.name!r} on the other side of {wrong}. Change their order")
    return found


class Terms:
    """The terms of one policy, and of its updates those that are on."""

    def __init__(self) -> None:
        self.all: dict[str, Term] = {term.name: term() for term in classes(TERMS)}
        self.on: list[Term] = []
        self.unrewarded: frozenset[str] = frozenset()
        """Actors whose advantages are those of their teachers alone: no term replaces them by others, and no penalty
        changes their rewards."""

    def __getitem__(self, name: str) -> Any:
        return self.all[name]

    def begin(self, config: LossConfig, actors: Sequence[str]) -> Terms:
        """Take the settings of the next updates, and the names of the batch's actors.

        Raises ``ValueError`` naming the wrong key, and for two terms that replace the advantages.
        """
        for term in self.all.values():
            term.configure(config, actors)
        self.on = [term for term in self.all.values() if term.is_on(config)]
        replacing = [term.name for term in self.on if term.effect == "replaces"]
        if len(replacing) > 1:
            raise ValueError(f"terms {replacing}: expected one that replaces the advantages")
        return self

    @property
    def needs(self) -> Needs:
        """What all terms need of a pass, without the ids of other tokens."""
        return reduce(or_, (term.needs for term in self.on), NOTHING)

    @property
    def weights(self) -> dict[str, str]:
        """Metrics that are means over other tokens than those that train, and the metrics that count these."""
        return {metric: count for term in self.on for metric, count in term.weights.items()}

    def prepare(self, policy: Policy, batch: TrainingBatch, rows: np.ndarray, max_tokens: int | str) -> TrainingBatch:
        """Return ``batch`` as the terms change it for the ``rows`` of ``policy``.

        Those that replace advantages get the rows that a reward pays; there may be none.
        """
        taught = [index for index, actor in enumerate(batch.actors) if actor in self.unrewarded]
        paid = rows[~np.isin(batch.actor_index[rows], taught)]
        for term in self.on:
            batch = term.prepare(policy, batch, paid if term.effect == "replaces" else rows, max_tokens)
        return batch

    def minibatch(self, policy: Policy | None, parts: list[Part]) -> list[Part]:
        """Let the terms change the micro-batches of one optimizer step."""
        for term in self.on:
            term.minibatch(policy, parts)
        return parts

    def read(self, policy: Policy, part: Part) -> Read:
        """Make the pass of a micro-batch that the terms need. If none needs log-probs with a gradient, the pass makes
        the policy loss."""
        ids = [found for term in self.on if (found := term.others(policy, part)) is not None]
        assert len(ids) <= 1, "two terms read other tokens: join their ids"
        needs = replace(self.needs, others_Nk=ids[0] if ids else None, reference=False)
        reference_N = policy.reference_logprobs(part.micro) if self.needs.reference else None
        if not needs.logprobs:
            arguments = self._arguments(Read(None, reference_N=reference_N), part)
            into = policy.head_gradient() if part.counts else None
            needs = replace(needs, loss={**self["policy_loss"].head_arguments(part, arguments), "grad_into": into})
        return policy.read(part.micro, needs)._replace(reference_N=reference_N)

    def _arguments(self, read: Read, part: Part) -> dict[str, Any]:
        return {key: value for term in self.on for key, value in term.arguments(read, part).items()}

    def loss(self, read: Read, part: Part) -> tuple[PolicyLoss, Tensor]:
        """Return the loss of a micro-batch with its metrics, and the sum whose gradient trains."""
        arguments = self._arguments(read, part)
        computing = self["policy_loss"]
        out = computing.compute(read, part, arguments)
        apart: list[Tensor] = []
        for term in self.on:
            if (added := term.loss(read, part)) is None:
                continue
            loss = out.loss
            if added.counts:
                loss = loss + added.loss
            else:
                apart.append(added.loss)
            metrics = {**out.metrics, **added.metrics}
            out = PolicyLoss(loss, metrics, {**out.actor_metrics, **added.actor_metrics})
        return out, sum(apart, out.loss)

    def metrics(self, measured: Mapping[str, float], rows: int) -> dict[str, float]:
        """Return the terms' metrics of a batch, after its last update."""
        return {key: value for term in self.on for key, value in term.metrics(measured, rows).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-ready state of all terms, also of those that are off."""
        states = [term.state_dict() for term in self.all.values()]
        whole = {key: value for state in states for key, value in state.items()}
        assert len(whole) == sum(map(len, states)), "two terms have a state of the same name"
        return whole

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for term in self.all.values():
            term.load_state_dict(state)


def terms_of(policy: Policy) -> Terms:
    """Return the terms of ``policy``, which it has from the first call on."""
    if policy.terms is None:
        policy.terms = Terms()
    terms: Terms = policy.terms
    return terms


def teachers_replace_rewards(policies: Mapping[str, Policy], actors: Iterable[str]) -> None:
    """Note that these actors learn from their teachers alone."""
    for policy in policies.values():
        terms_of(policy).unrewarded = frozenset(actors)


def stages_of_terms(config: LossConfig, learner: Any) -> list[Stage]:
    """Return the stages that the terms of ``config`` add to the arena of a run that ``learner`` trains."""
    return [stage for term in Terms().all.values() for stage in term.stages(config, learner)]


def attach_terms(policy: Policy, config: LossConfig) -> None:
    """Give ``policy`` what the terms of ``config`` train beside its model. Raises ``ValueError`` for one that can't."""
    for term in terms_of(policy).all.values():
        if term.is_on(config):
            term.attach(policy, config)


def terms_on(config: LossConfig) -> list[Term]:
    """Return new terms, those that updates with ``config`` have."""
    return [term for term in Terms().all.values() if term.is_on(config)]


def check_columns(config: TrainConfig, batch: TrainingBatch) -> None:
    """Raise :class:`ConfigError` for a batch without a column that the client must return."""
    for name, key in required(config).items():
        if len(batch) and name not in batch.columns:
            raise ConfigError(f"config key {key!r} = true: the client returned no {name}: make it with {name}=True")


def check_term_models(config: TrainConfig, models: Mapping[str, nn.Module]) -> None:
    """Raise :class:`ConfigError` for a model that trains and that a term of ``config`` can't take."""
    trained = [name for name in models if name in config.policies and config.policies[name].trainable]
    terms, lms = Terms().all.values(), {name: causal_lm(activated(models[name])) for name in trained}
    if lines := [line for term in terms for name, lm in lms.items() for line in term.model_problems(config, name, lm)]:
        raise ConfigError("\n".join(lines))


def loss_problems(run: RunFacts) -> list[str]:
    """Return the problems of the terms' settings, one line each. It tries the loss on two rows of two tokens."""
    loss, terms = run.config.loss, Terms().all.values()
    problems = [line for term in terms for line in term.problems(run)]
    if run.server is not None:
        problems += [problem(key, why, value) for term in terms for key, value, why in term.unserved(loss)]
    return [*problems, *check_loss(loss), *_unrewarded(run)]


def _unrewarded(run: RunFacts) -> Iterator[str]:
    """Yield a line for each setting without effect, if every actor that trains learns from its teacher alone."""
    config = run.config
    trainable = {name for name, policy in config.policies.items() if policy.trainable}
    trained = {actor.id for actor in run.actors if actor.policy in trainable}
    if config.distill.add_to_reward or not trained or not config.teachers().keys() >= trained:
        return
    why = "has no effect, as all actors that train learn from their teachers alone: expected distill.add_to_reward ="
    for key in [key for term in Terms().all.values() for key in term.needing_rewards(config.loss)]:
        yield problem(key, f"{why} true, or no setting here")


def check_loss(config: LossConfig) -> list[str]:
    """Try a loss on two rows of two tokens, and return its problems, one line each."""
    try:
        computing = Terms().begin(config, ["actor"])["policy_loss"]
    except (ValueError, TypeError) as error:
        text = str(error)
        return [text if "config key" in text else f"config section 'loss': {text}"]
    # A custom loss may fail when it is called, so compute the loss and its gradient once.
    tokens = torch.full((4,), -1.0, requires_grad=True)
    try:
        result = policy_loss(
            tokens,
            tokens.detach(),
            torch.tensor([1.0, -1.0]),
            cu_seqlens=torch.tensor([0, 2, 4]),
            variant=computing.variant,
            correction=computing.correction,
            rollout_logprobs=tokens.detach(),
            aggregation=config.aggregation,
            actor_ids=torch.zeros(2, dtype=torch.int64),
            num_actors=1,
            max_length=config.max_length,
        )
        result.loss.backward()
    except Exception as error:  # a custom loss may raise anything
        return [f"config section 'loss' (type {config.type!r}), tried on four tokens: {type(error).__name__}: {error}"]
    return []
