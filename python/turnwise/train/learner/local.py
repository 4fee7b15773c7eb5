"""The learner of a run in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from turnwise.train.checkpoint.checkpoint import load_checkpoint, load_learners, save_checkpoint
from turnwise.train.config.schema import TrainConfig
from turnwise.train.learner.learner import T, Updated, Weights
from turnwise.train.learner.undo import Undo
from turnwise.train.model.policy import Policy, fingerprints
from turnwise.train.update.kl import reference_logprobs
from turnwise.train.update.update import update_epoch, update_policy
from turnwise.types import TrainingBatch


class LocalLearner:
    """Trains ``policies``, whole models in this process, one after the other."""

    whole = True

    def __init__(self, policies: Mapping[str, Policy], config: TrainConfig) -> None:
        self.policies, self.config = dict(policies), config
        self.trained = self.policies  # here, and not by other processes
        self.torn = False

    def update(
        self,
        batch: TrainingBatch,
        phase: Collection[str],
        run_share: float,
        rng: np.random.Generator,
        show: Callable[[int, int], None],
    ) -> Updated:
        undo = Undo(self.trained)
        try:
            return self._updated(batch, phase, run_share, rng, show)
        except BaseException:
            self.torn = not undo.restore()
            raise

    def _updated(
        self,
        batch: TrainingBatch,
        phase: Collection[str],
        run_share: float,
        rng: np.random.Generator,
        show: Callable[[int, int], None],
    ) -> Updated:
        before = fingerprints(self.trained)
        metrics: dict[str, dict[str, float]] = {}
        for name, policy in self.policies.items():
            if name in phase and name not in self.trained:
                update_epoch(policy, batch, self.config.update, rng)
            elif name in phase:
                policy.follow_run(run_share)
                metrics[name] = update_policy(policy, batch, self.config.update, self.config.loss, rng, show)
                # A new version means that some update was not skipped.
                policy.version += bool(metrics[name].get("updates"))
        # Only weights that trained may have moved.
        moved = {name for name, bits in fingerprints(self.trained).items() if bits != before[name]}
        updated = Updated(metrics, frozenset(moved))
        idle = sorted(moved - updated.trained)
        assert not idle, f"an update changed the weights of {idle}, which didn't train"
        for name in sorted(updated.trained):
            self._check_finite(name)
        return updated

    def _check_finite(self, name: str) -> None:
        policy = self.policies[name]
        policy.check_finite(f"at version {policy.version}, so it is not published")

    def send(self, name: str, receive: Callable[[Weights], T], *, base: bool = False) -> T:
        policy = self.policies[name]
        self._check_finite(name)
        return receive(policy.all_weights() if base else policy.weights())

    def reference_logprobs(self, name: str, batch: TrainingBatch) -> Tensor:
        policy = self.policies[name]
        return reference_logprobs(policy, batch, policy.micro_batch_tokens(self.config.update.micro_batch_tokens))

    def scale_rate(self, name: str, factor: float) -> None:
        self.policies[name].scale_rate(factor)

    def stop(self) -> None:
        pass

    def save(self, root: Path, step: int, state: Mapping[str, Any], **files: Any) -> Path:
        return save_checkpoint(root, step, self.policies, state, **files)

    def finish_saving(self) -> None:
        pass

    def load(self, path: Path, *, generators: bool = True) -> tuple[int, dict[str, Any]]:
        return (load_checkpoint if generators else load_learners)(path, self.policies)
