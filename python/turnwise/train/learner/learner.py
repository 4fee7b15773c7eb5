"""The protocol between the training loop and the models: the loop calls a learner, never a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from turnwise.train.model.policy import Policy
from turnwise.types import TrainingBatch

T = TypeVar("T")

Weights = Iterable[tuple[str, Any]]
"""Names and whole tensors, tied ones once. A learner whose server has the tensors names them instead."""

RunShares = Mapping[str, float]
"""Share of the run that is over, 0 to 1, for each policy (:meth:`Policy.follow_run`); without one the rate follows the
policy's own updates."""

Show = Callable[[int, int], None]
"""Function that a learner calls after each update, with the number of updates so far and in total."""


@dataclass(frozen=True, slots=True)
class Updated:
    """Result of one training step.

    Example: ``Updated({"default": {"updates": 2, "loss": 0.1}}, frozenset({"default"}))``
    """

    metrics: Mapping[str, Mapping[str, float]]
    """Metrics of each policy of the phase; empty for a policy without rows."""
    moved: frozenset[str]
    """Policies whose weights changed."""

    @property
    def trained(self) -> set[str]:
        """Policies with an update that was not skipped."""
        return {name for name, measured in self.metrics.items() if measured.get("updates")}


class Learner(Protocol):
    """Holds the models of all policies, and trains them."""

    holds_all_weights: bool
    """True if this process has all weights of the policies' models."""
    partially_updated: bool
    """True if a failed update had changed weights that can't be restored: they belong to no step."""
    constrained_unsupported_reason: str
    """Reason why it can't train on calls that were sampled under a grammar; empty if it can."""

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policies by name. The loop reads their names, versions and rates."""

    def update(
        self, batch: TrainingBatch, phase: Collection[str], shares: RunShares, rng: np.random.Generator, show: Show
    ) -> Updated:
        """Train the policies of ``phase`` on their rows of ``batch``. A policy that trained gets the next version.

        ``shares`` set the learning rates. ``rng`` draws the minibatches. Raises ``FloatingPointError`` as
        :func:`~turnwise.train.update.update.update_policy` does, and for weights that are not finite afterwards. After
        an error the policies are as before, or ``partially_updated`` is true.
        """

    def send(self, name: str, receive: Callable[[Weights], T], *, base: bool = False) -> T:
        """Return ``receive(weights)`` for the weights of policy ``name``; for an adapter without its base.

        With ``base`` they include the shared base. ``receive`` reads them during the call. Raises
        ``FloatingPointError`` if a weight is not finite, before ``receive`` is called.
        """

    def reference_logprobs(self, name: str, batch: TrainingBatch) -> Tensor:
        """Return log-probs ``[N]`` float64 under the reference of policy ``name``, on the CPU.

        There is one per token of the batch's stream; tokens that have none get 0.
        """

    def stop(self) -> None:
        """End the learner's other processes, if it has any."""

    def save(self, root: Path, step: int, state: Mapping[str, Any], **files: Any) -> Path:
        """Write ``root/step_<step>`` (:func:`~turnwise.train.checkpoint.checkpoint.save_checkpoint`).

        The learner may continue to write after it returns; :meth:`finish_saving` then raises the errors.
        """

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete. Raises ``OSError`` if it can't be written."""

    def load(self, path: Path, *, generators: bool = True) -> tuple[int, dict[str, Any]]:
        """Restore the policies, and with ``generators`` torch's random generators, from a checkpoint.

        Return ``(step, state)`` as :meth:`save` got them. Raises
        :class:`~turnwise.train.checkpoint.files.CheckpointError` before anything changes.
        """
