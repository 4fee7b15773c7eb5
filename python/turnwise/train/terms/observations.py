"""The cross entropy of what came back after an actor's answers (ECHO, https://arxiv.org/abs/2605.24517).

``loss.observation_coef`` times the mean of ``-log p(token)`` over the observed tokens of the minibatch joins the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np

from turnwise.train.config.optimization import LossConfig
from turnwise.train.model.head import Read
from turnwise.train.model.policy import Policy
from turnwise.train.terms.term import Added, Part, Term
from turnwise.types import TrainingBatch

MEAN, COUNT = "loss_observations", "observation_tokens"
"""Metrics: the mean cross entropy of the observed tokens, in nats, and their number."""


class Observations(Term):
    """Adds the cross entropy of the observed tokens, which the arena marks in its batches."""

    name = "observations"
    after = ("policy_loss",)
    columns = ("observation_mask",)
    weights = MappingProxyType({MEAN: COUNT})
    trains_alone = True

    def is_on(self, config: LossConfig) -> bool:
        return config.observation_coef > 0

    def unserved(self, config: LossConfig) -> Iterator[tuple[str, Any, str]]:
        if config.observation_coef:
            yield (
                "loss.observation_coef",
                config.observation_coef,
                "its losses have no cross entropy of prompts: expected 0",
            )

    def beside_advantage(self, config: LossConfig) -> list[str]:
        return ["loss.observation_coef"] if config.observation_coef else []

    def prepare(self, policy: Policy, batch: TrainingBatch, rows: np.ndarray, max_tokens: int | str) -> TrainingBatch:
        """Raise ``ValueError`` if the observed tokens are not marked. Warn if ``rows`` have none."""
        if batch.observation_mask is None:
            raise ValueError(
                "batch.observation_mask=None: expected marked observations with loss.observation_coef: set "
                "arena.marks_observations = True"
            )
        sums = np.concatenate([[0], batch.observation_mask.cumsum(dtype=np.int64)])[batch.cu_seqlens]
        if not np.diff(sums)[rows].any():
            text = "no chat of this batch goes on after an answer with the same tokens, so there is nothing to predict"
            warnings.warn(f"loss.observation_coef, policy {policy.name!r}: {text}", RuntimeWarning, stacklevel=4)
        return batch

    def minibatch(self, policy: Policy | None, parts: list[Part]) -> None:
        observed = [part.micro.observed_N for part in parts]
        self.count = sum(int(tokens.sum()) for tokens in observed if tokens is not None)

    def loss(self, read: Read, part: Part) -> Added | None:
        if part.micro.observed_N is None:
            return None
        losses_n = -read.logprobs_N[part.micro.observed_N]
        total, count = losses_n.sum(), len(losses_n)
        mean, number = total.detach() / max(1, count), total.new_tensor(float(count)).detach()
        return Added(self.config.observation_coef * total / max(1, self.count), {MEAN: mean, COUNT: number})
