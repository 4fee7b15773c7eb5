"""The learner of a run in one process, and the undoing of an update that failed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.train.checkpoint.checkpoint import (
    describe_progress,
    load_checkpoint,
    load_learners,
    restore_progress,
    save_checkpoint,
)
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.learner.learner import RunShares, Show, T, Updated, Weights
from turnwise.train.model.policy import Policy, fingerprints
from turnwise.train.terms.kl import reference_logprobs, refresh, refresh_problem
from turnwise.train.terms.registry import attach_terms, check_columns
from turnwise.train.update.update import skip_draws, update_policy
from turnwise.types import TrainingBatch

MAX_COPIED_BYTES = 1 << 30
"""Weights and optimizers up to this size are copied before each update."""


class LocalLearner:
    """Trains ``policies``, whole models in this process, one after the other."""

    holds_all_weights = True
    constrained_unsupported_reason = ""

    def __init__(self, policies: Mapping[str, Policy], config: TrainConfig) -> None:
        if problem := refresh_problem(policies, config.loss.kl):
            raise ConfigError(problem)
        self.policies, self.config = dict(policies), config
        for policy in self.policies.values():
            attach_terms(policy, config.loss)
        self.trained = self.policies  # here, and not by other processes
        self.partially_updated = False

    def update(
        self, batch: TrainingBatch, phase: Collection[str], shares: RunShares, rng: np.random.Generator, show: Show
    ) -> Updated:
        check_columns(self.config, batch)
        undo = Undo(self.trained)
        before = fingerprints(self.trained)
        metrics: dict[str, dict[str, float]] = {}
        try:
            for name, policy in self.policies.items():
                if name in phase and name not in self.trained:
                    skip_draws(policy, batch, self.config.update, rng)
                elif name in phase:
                    if name in shares:
                        policy.follow_run(shares[name])
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
            for name in updated.trained:
                metrics[name] |= refresh(self.policies[name], self.config.loss.kl)
        except BaseException:
            self.partially_updated = not undo.restore()
            raise
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

    def stop(self) -> None:
        pass

    def save(self, root: Path, step: int, state: Mapping[str, Any], **files: Any) -> Path:
        return save_checkpoint(root, step, self.policies, state, **files)

    def finish_saving(self) -> None:
        pass

    def load(self, path: Path, *, generators: bool = True) -> tuple[int, dict[str, Any]]:
        return (load_checkpoint if generators else load_learners)(path, self.policies)


class Undo:
    """The state of ``policies`` before an update; without weights if these take over :data:`MAX_COPIED_BYTES`.

    Example::

        undo = Undo(policies)
        try:
            update(policies)
        except BaseException:
            intact = undo.restore()
            raise
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.policies = {name: policy for name, policy in policies.items() if policy.optimizer is not None}
        self._progress = {name: copy.deepcopy(describe_progress(policy)) for name, policy in self.policies.items()}
        # An update may move a head before its first step.
        self._heads = [
            (tensor, tensor.detach().clone())
            for policy in self.policies.values()
            for head in policy.heads.values()
            for tensor in head.module.parameters()
        ]
        self._copies: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] | None = None
        # AdamW has two moments per weight; a new optimizer has none yet.
        size = sum(3 * x.nbytes for policy in self.policies.values() for x in policy.trained_parameters())
        if size <= MAX_COPIED_BYTES:
            self._copies = {
                name: ({key: tensor.clone() for key, tensor in policy.saved_weights()}, _copied(policy.optimizer))
                for name, policy in self.policies.items()
            }

    def restore(self) -> bool:
        """Restore everything and return True; return False if weights have changed and there is no copy of them."""
        changed = any(
            policy.is_stepping or policy.updates != self._progress[name]["updates"]
            for name, policy in self.policies.items()
        )
        if changed and self._copies is None:
            return False
        for name, policy in self.policies.items():
            assert policy.optimizer is not None
            policy.optimizer.zero_grad(set_to_none=True)
            if changed and self._copies is not None:
                weights, optimizer = self._copies[name]
                with torch.no_grad():
                    for key, tensor in policy.saved_weights():
                        tensor.copy_(weights[key])
                policy.masters.write()
                policy.optimizer.load_state_dict(optimizer)
            policy.is_stepping = False
            restore_progress(policy, self._progress[name])
        with torch.no_grad():
            for tensor, before in self._heads:
                tensor.copy_(before)
        return True


def _copied(optimizer: Any) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state_dict()
    slots = {
        index: {key: value.clone() if isinstance(value, Tensor) else value for key, value in each.items()}
        for index, each in state["state"].items()
    }
    return {"state": slots, "param_groups": copy.deepcopy(state["param_groups"])}
