"""Callbacks of the training loop, and the part of the trainer that they see."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turnwise.arena import Arena, Stage
from turnwise.train.checkpoint.progress import RunProgress
from turnwise.train.config.schema import TrainConfig
from turnwise.train.group_queue import GroupQueue
from turnwise.train.learner.learner import Learner
from turnwise.train.log.metrics import ClientMetrics
from turnwise.train.log.run_log import RunLog
from turnwise.train.model.policy import Policy
from turnwise.types import GenerateResult


class TrainerView(Protocol):
    """The part of :class:`~turnwise.train.loop.Trainer` that callbacks, health checks and checkpoints use."""

    arena: Arena
    learner: Learner
    policies: Mapping[str, Policy]
    config: TrainConfig
    progress: RunProgress
    log: RunLog
    client_metrics: ClientMetrics
    rollouts: GroupQueue
    rng: np.random.Generator
    unwritten: dict[str, float] | None

    @property
    def callbacks(self) -> Mapping[str, Callback]:
        """The run's callbacks by name."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""

    async def sync_weights(self) -> None:
        """Send changed weights to the client."""

    def save(self) -> Path:
        """Write a checkpoint."""


class Callback:
    """Base class: override the methods you need. All run in the event loop's thread, while no policy is updated.

    ``name`` is that of the class by default; the second callback with the name ``plot`` is ``plot_2``. Every
    checkpoint holds :meth:`state_dict`, which must be JSON-serialisable, and :meth:`files`, so that a resumed run
    restores the callback.
    """

    name: str
    stages: Sequence[Stage] = ()
    """What the arena does for it around the episodes."""

    async def on_start(self, trainer: TrainerView) -> None:
        """Run before the first sample; the client already has the weights that the run starts or resumes with."""

    async def after_step(self, trainer: TrainerView, results: Sequence[GenerateResult]) -> Mapping[str, float]:
        """Return metrics of step ``trainer.progress.step``, which was trained on ``results`` and published."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore :meth:`state_dict`; ``folder`` is the checkpoint, which holds the :meth:`files`."""

    def protected_steps(self) -> Collection[int]:
        """Return steps whose checkpoints must stay."""
        return ()

    def files(self) -> Mapping[str, Path]:
        """Return files by their names in a checkpoint, which links them; they must never change once written."""
        return {}
