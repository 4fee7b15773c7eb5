"""The protocol of a term, and what one sees of a minibatch.

A term is a file with a :class:`Term`, and a line in :data:`turnwise.train.config.features.FEATURES`. The config's
classes import such files, so neither this one nor they import torch before they compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from turnwise.arena.stages.stage import Stage
from turnwise.settings.section import RunFacts, Section
from turnwise.types import Sample, TrainingBatch
from turnwise.types.passes import LOGPROBS, Needs, Read

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.train.model.micro_batch import MicroBatch
    from turnwise.train.model.policy import Policy


@dataclass(slots=True)
class Part:
    """One micro-batch of a minibatch, with what the terms found for it in the whole minibatch.

    ``micro.mask_N`` lacks rejected tokens. Of the others, those outside of ``kept_N`` have no policy gradient.
    """

    micro: MicroBatch
    old_logprobs_N: Tensor
    kept_N: Tensor | None = None
    dropped: Mapping[str, Tensor] = field(default_factory=dict)
    """Tokens ``[N]`` that each mask drops, by its key in ``loss.masks``."""
    selected_N: Tensor | None = None
    """Tokens that the loss selects in the minibatch; ``None`` if it takes all."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Arguments of :func:`turnwise.ops.aggregate`, with the normaliser of the minibatch."""
    counts: bool = True
    """False for a pass that a rank makes because the others have one more: it must add no gradient."""

    def aggregate(self, values_N: Tensor) -> Tensor:
        """Aggregate values per token as the policy loss is: the micro-batch's share of the minibatch's loss."""
        from turnwise.ops import aggregate

        return aggregate(values_N, **self.layout)


class Added(NamedTuple):
    """What a term adds to the loss of a micro-batch, and its metrics, as scalars without a gradient.

    A metric is a mean over the tokens that train here (``part.micro.mask_N``), as the log weighs it by their number,
    or over those that :attr:`Term.weights` names. All micro-batches return the same metrics. ``actor_metrics`` are such
    means by actor ``[num_actors]``.
    A loss that doesn't ``count`` has gradients for weights of its own alone, and is no part of the loss that is logged.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = {}
    actor_metrics: Mapping[str, Tensor] = {}
    counts: bool = True


class Term:
    """Base of all terms, which does nothing. A policy has one object of each for its life.

    An update calls, in the order of the list: :meth:`configure`, :meth:`prepare` once per batch, :meth:`minibatch` once
    per optimizer step, :meth:`others`, :meth:`arguments` and :meth:`loss` once per micro-batch, and :meth:`metrics`.
    """

    name: ClassVar[str]
    effect: ClassVar[Literal["masks", "computes", "adds", "scales", "replaces"] | None] = "adds"
    """Effect: it masks tokens, computes the policy loss, adds to the loss, or scales or replaces the advantages;
    ``None`` if it leaves the loss as it is. Of those that replace them, an update has at most one."""
    after: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ()
    """Names of the terms after and before which the list must have it."""
    settings: ClassVar[Mapping[str, type[Section]]] = MappingProxyType({})
    """Config fields that it adds, by section; its line is then in :mod:`turnwise.train.config.features`."""
    described: ClassVar[tuple[tuple[str, str, str, str, str], ...]] = ()
    """Its metrics for ``docs/metrics.md``: name, unit, what they are over, healthy range, meaning."""
    requires: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Columns that the client returns if its option of that name is on, each with the config key that asks for it."""
    weights: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Metrics that are means over other tokens than those that train, and the metric that counts these."""
    trains_alone: ClassVar[bool] = False
    """True if it trains an attempt that credit compares with no other."""
    needs: Needs = LOGPROBS
    """What it needs of each pass. The head makes the policy loss in one pass over its logits if no term needs log-probs
    with a gradient, so a term whose loss reads none has ``NOTHING`` here, or ``Needs(logprobs=False, ...)``."""
    config: Any
    """The section ``loss`` of the config, which each method gets that takes a ``config`` and says nothing else."""
    actors: Sequence[str]

    # -- settings ------------------------------------------------------------------------------------------------------
    def is_on(self, config: Any) -> bool:
        """Return True if updates with this configuration have the term."""
        return True

    def problems(self, run: RunFacts) -> Iterator[str]:
        """Yield a line for each of its settings that is valid alone but doesn't fit ``run``. Terms that are off are
        asked too."""
        return iter(())

    def needing_rewards(self, config: Any) -> Iterator[str]:
        """Yield its keys that mean nothing where no actor that trains learns from its rewards."""
        return iter(())

    def unserved(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yield its keys with their values and the reason why a server that has only policy losses can't serve them."""
        return iter(())

    def model_problems(self, config: Any, name: str, lm: Any) -> Iterator[str]:
        """Yield a line for each reason why it can't train the causal LM of a policy under the whole ``config``."""
        return iter(())

    def see_whole(self, policy: Policy, config: Any) -> None:
        """See a policy of the whole ``config`` once, before its weights are sharded."""

    def attach(self, policy: Policy, config: Any) -> None:
        """Add what the term trains beside the model of ``policy``. Raises ``ValueError`` for one that can't have it."""

    def stages(self, config: Any, learner: Any) -> Iterator[Stage]:
        """Yield what an arena does for it around the episodes. Terms that are off are asked too."""
        return iter(())

    def configure(self, config: Any, actors: Sequence[str]) -> None:
        """Take the settings of the next updates. Raises ``ValueError`` naming the wrong key."""
        self.config, self.actors = config, actors

    def beside_advantage(self, config: Any) -> list[str]:
        """Return its config keys with which it trains rows whose advantage is 0."""
        return []

    def trains(self, policy: Policy, sample: Sample) -> bool:
        """Return True if it trains this sample, where :meth:`beside_advantage` has keys."""
        return True

    # -- an update -----------------------------------------------------------------------------------------------------
    def prepare(self, policy: Policy, batch: TrainingBatch, rows: np.ndarray, max_tokens: int | str) -> TrainingBatch:
        """Return ``batch`` with what the term changes for ``rows``; ``max_tokens`` is
        ``update.micro_batch_tokens``."""
        return batch

    def minibatch(self, policy: Policy | None, parts: list[Part]) -> None:
        """Change the ``parts`` of a minibatch, so that any cut into micro-batches gives the same gradient."""

    def others(self, policy: Policy, part: Part) -> Tensor | None:
        """Return ids ``[N, k]`` of other tokens whose log-probs it needs."""
        return None

    def arguments(self, read: Read, part: Part) -> dict[str, Any]:
        """Return its arguments of :func:`turnwise.ops.linear_policy_loss`, such as ``kl``. ``read`` has the reference's
        log-probs; the others are there only for a term that needs them."""
        return {}

    def loss(self, read: Read, part: Part) -> Added | None:
        """Return what it adds to the loss of a micro-batch."""
        return None

    def metrics(self, measured: Mapping[str, float], rows: int) -> dict[str, float]:
        """Return its metrics of the batch, and adapt to those ``measured`` on ``rows`` rows.

        If all updates were skipped, ``measured["updates"]`` is 0 and the loss's metrics are absent: keep the state.
        """
        return {}

    # -- state ---------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-ready state that a checkpoint keeps, by names that no other term has."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it from the state of all terms. A checkpoint from before a term has none of its names."""
