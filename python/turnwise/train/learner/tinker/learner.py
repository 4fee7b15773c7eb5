"""The learner that lets a server of the Tinker API train: Tinker's own service, or SkyRL."""

from __future__ import annotations

import itertools
import json
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnwise.inference.tinker import BASE, SAMPLER, TinkerServerError, token_input
from turnwise.train.checkpoint.checkpoint import restore_progress, save_checkpoint
from turnwise.train.checkpoint.files import (
    REMOTE_FORMAT,
    CheckpointError,
    CheckpointMismatch,
    read_manifest,
    read_tensors,
    write_tensors,
)
from turnwise.train.checkpoint.run_state import generator_states, set_generator_states
from turnwise.train.config.schema import TrainConfig
from turnwise.train.learner.learner import RunShares, Show, T, Updated, Weights
from turnwise.train.learner.tinker.remote import Passed, RemoteAdapter, RemotePolicy
from turnwise.train.learner.tinker.wire import server_loss, stream_of, wire_rows
from turnwise.train.model.micro_batch import SINGLE_RANK, minibatches, pack
from turnwise.train.terms.registry import Terms
from turnwise.train.terms.term import Part
from turnwise.train.update.log import UpdateLog, describe_bad_rows
from turnwise.train.update.update import rows_of
from turnwise.types import TrainingBatch
from turnwise.types.passes import Read
from turnwise.utils.values import problem

STATES = "tinker.json"
"""File of a checkpoint with the paths of the saved states on the server."""


class _Sent(NamedTuple):
    """One minibatch that was sent: its rows, and the functions that wait for the server's answers."""

    rows: np.ndarray
    part: Part
    passed: Callable[[], Passed]
    stepped: Callable[[], Mapping[str, float]]


class TinkerLearner:
    """Trains ``policies`` with the ``adapters`` that a server holds, one for each policy that is trainable.

    turnwise keeps episodes, credit, minibatches and the schedule. The server computes gradients and updates, of all
    policies at the same time. From the log-probs that it returns, turnwise computes the metrics that a local learner
    has.

    ``base`` is a sampling client of the base model, for the reference of a KL penalty. A server can't undo an update
    with a gradient that is not finite, so this ends the run.
    """

    holds_all_weights = False
    constrained_unsupported_reason = "a Tinker server does not renormalise over the allowed tokens"

    def __init__(
        self,
        policies: Mapping[str, RemotePolicy],
        adapters: Mapping[str, RemoteAdapter],
        config: TrainConfig,
        base_model: str,
        base: Any = None,
    ) -> None:
        self.policies: dict[str, Any] = dict(policies)
        self.adapters, self.config, self.base_model, self._base = dict(adapters), config, base_model, base
        self.kind = config.learner.server
        self._numbers, self._run = itertools.count(), secrets.token_hex(4)
        self._confirmed = False
        self.partially_updated = False

    # -- updates -------------------------------------------------------------------------------------------------------
    def update(
        self, batch: TrainingBatch, phase: Collection[str], shares: RunShares, rng: np.random.Generator, show: Show
    ) -> Updated:
        """Train as :class:`Learner` describes. Raises ``FloatingPointError`` at the first number that is not finite."""
        before = {name: policy.updates for name, policy in self.policies.items()}
        terms = Terms().begin(self.config.loss, batch.actors)
        rates, parts = {}, {}
        try:
            for name, policy in self.policies.items():
                if name in phase:
                    if name in shares:
                        policy.follow_run(shares[name])
                    parts[name] = self._minibatches(policy, batch, rng)
                    rates[name] = policy.learning_rate if parts[name] else 0.0
            sent = self._send(batch, parts, terms)
            metrics = {name: self._measure(name, batch, terms, rates[name], each, show) for name, each in sent.items()}
        except BaseException:
            self.partially_updated = any(policy.updates != before[name] for name, policy in self.policies.items())
            raise
        for name, measured in metrics.items():
            self.policies[name].version += bool(measured.get("updates"))
        moved = {name for name, measured in metrics.items() if measured.get("updates") and measured.get("grad_norm", 1)}
        return Updated(metrics, frozenset(moved))

    def _minibatches(self, policy: RemotePolicy, batch: TrainingBatch, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw the minibatches of all epochs, as a local update does; none for a policy without rows."""
        rows, update = rows_of(policy, batch), self.config.update
        if not policy.trainable or not len(rows):
            return []
        _check_rows(policy.name, batch, rows)
        epochs = range(update.ppo_epochs)
        return [part for _ in epochs for part in minibatches(batch, rows, update.num_minibatches, rng)]

    def _send(
        self, batch: TrainingBatch, parts: Mapping[str, list[np.ndarray]], terms: Terms
    ) -> dict[str, list[_Sent]]:
        """Send the passes and updates of all policies, the first minibatch of each before the second of any."""
        remote_loss = server_loss(terms["policy_loss"].variant)
        sent: dict[str, list[_Sent]] = {name: [] for name in parts}
        for index in range(max(map(len, parts.values()), default=0)):
            passes = []
            for name, minibatches_of_policy in parts.items():
                if index < len(minibatches_of_policy):
                    drawn = minibatches_of_policy[index]
                    micro = pack(batch, drawn)
                    (part,) = terms.minibatch(None, [Part(micro, micro.rollout_logprobs_N)])
                    rows = wire_rows(batch, drawn, micro, terms["policy_loss"].token_weights(part), self.kind)
                    passed = cache(self.adapters[name].forward_backward(rows, remote_loss))
                    passes.append((name, drawn, part, passed))
            for name, drawn, part, passed in passes:
                if not self._confirmed:  # a wrong `server` must not change the weights
                    self._confirm(passed())
                if self.kind.reorders:
                    passed()
                policy = self.policies[name]
                stepped = self.adapters[name].optim_step(policy.adam())
                sent[name].append(_Sent(drawn, part, passed, stepped))
                policy.step()
        return sent

    def _measure(
        self,
        name: str,
        batch: TrainingBatch,
        terms: Terms,
        rate: float,
        sent: list[_Sent],
        show: Show,
    ) -> dict[str, float]:
        """Wait for the updates of one policy, and return their metrics; none without updates."""
        if not sent:
            return {}
        log = UpdateLog(batch.actors)
        for done, one in enumerate(sent, start=1):
            stream = stream_of(batch, one.rows, one.passed().logprobs)
            logprobs_N = torch.from_numpy(stream)[one.part.micro.token_N]
            out, _ = terms.loss(Read(logprobs_N), one.part)
            log.add_micro(out, one.part, logprobs_N)
            log.join(SINGLE_RANK)
            norms = (float(value) for key, value in one.stepped().items() if "grad_norm" in key)
            norm = next(norms, math.nan)  # not every server reports it
            if not math.isfinite(log.current_loss) or math.isinf(norm):
                raise FloatingPointError(
                    f"policy {name!r}: loss is {log.current_loss}, gradient norm {norm}, on the server, which can't "
                    f"undo an update: resume from a checkpoint; {describe_bad_rows(batch, log.bad_tokens())}"
                )
            log.add_step(norm)
            show(done, len(sent))
        metrics = {**log.result(), "learning_rate": rate}
        return {key: value for key, value in metrics.items() if key != "grad_norm" or not math.isnan(value)}

    def _confirm(self, passed: Passed) -> None:
        """Raise ``ValueError`` if the first answer is not one of the configured kind of server."""
        sums = any(key.endswith(":sum") for key in passed.metrics)
        if sums == self.kind.means:
            does, key = ("sums", "hosted' or 'skyrl") if sums else ("averages", "skyrl-jax")
            why = f"the first answer is that of a server that {does} over tokens: expected '{key}'"
            server = self.config.learner.tinker.server
            raise ValueError(problem("learner.tinker.server", f"{why}. No weight has changed", server))
        self._confirmed = True

    # -- weights -------------------------------------------------------------------------------------------------------
    def send(self, name: str, receive: Callable[[Weights], T], *, base: bool = False) -> T:
        """Save the weights for sampling on the server, and return ``receive([("sampler_path", path)])``.

        A frozen policy is the base model: ``[("base_model", its name)]``.
        """
        named: list[tuple[str, Any]] = [(BASE, self.base_model)]
        if name in self.adapters:
            label = f"v{self.policies[name].version}-{self.unique_suffix()}"
            named = [(SAMPLER, self.adapters[name].save_for_sampler(label))]
        return receive(named)

    def unique_suffix(self) -> str:
        """Return a suffix for a name of saved weights, as the server accepts each name once."""
        return f"{self._run}-{next(self._numbers)}"

    def reference_logprobs(self, name: str, batch: TrainingBatch) -> Tensor:
        """Return log-probs ``[N]`` float64 of the base model, from the server."""
        rows = [batch.tokens_of(np.array([row])) for row in range(len(batch))]
        futures = [self._base.compute_logprobs(token_input(row)) for row in rows]
        wait = self.adapters[name].server.wait
        # The first token has no log-prob: the hosted service returns None for it, SkyRL omits it.
        logprobs = [np.asarray(wait(one)[1 - len(row) :], np.float32) for one, row in zip(futures, rows, strict=True)]
        return torch.from_numpy(stream_of(batch, np.arange(len(batch)), logprobs)).double()

    def stop(self) -> None:
        pass

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def save(self, root: Path, step: int, state: Mapping[str, Any], **files: Any) -> Path:
        """Save the adapters on the server, and their paths there in ``root/step_<step>``."""

        def write(folder: Path) -> Callable[[], None]:
            write_tensors(generator_states(), folder / "rng.safetensors")
            name = f"step{step}-{self.unique_suffix()}"
            waiting = {policy: adapter.save_state(name) for policy, adapter in self.adapters.items()}

            def finish() -> None:
                states = {policy: wait() for policy, wait in waiting.items()}
                ranks = {policy: adapter.rank for policy, adapter in self.adapters.items()}
                saved = {"base_model": self.base_model, "ranks": ranks, "states": states}
                (folder / STATES).write_text(json.dumps(saved, indent=1), encoding="utf-8")

            return finish

        return save_checkpoint(root, step, self.policies, state, write=write, kind=REMOTE_FORMAT, **files)

    def finish_saving(self) -> None:
        pass

    def load(self, path: Path, *, generators: bool = True) -> tuple[int, dict[str, Any]]:
        manifest = read_manifest(path, (REMOTE_FORMAT,))
        saved = json.loads((path / STATES).read_text(encoding="utf-8"))
        ranks = {name: adapter.rank for name, adapter in sorted(self.adapters.items())}
        comparisons = {
            "policies": (sorted(manifest["policies"]), sorted(self.policies)),
            "base model": (saved["base_model"], self.base_model),
            "adapters": (dict(sorted(saved["ranks"].items())), ranks),
        }
        for subject, (in_checkpoint, in_run) in comparisons.items():
            if in_checkpoint != in_run:
                raise CheckpointMismatch(f"{path}: {subject} {in_checkpoint}, the run has {in_run}")
        for name, adapter in self.adapters.items():
            try:
                adapter.load_state(saved["states"][name])
            except TinkerServerError as error:
                raise CheckpointError(f"{path}: the server does not load {saved['states'][name]}: {error}") from error
        for name, policy in self.policies.items():
            restore_progress(policy, manifest["policies"][name])
        if generators:
            set_generator_states(read_tensors(path / "rng.safetensors", 1))
        return manifest["step"], manifest["state"]


def _check_rows(name: str, batch: TrainingBatch, rows: np.ndarray) -> None:
    """Raise before anything is sent: ``ValueError`` for other temperatures, ``FloatingPointError`` for bad numbers."""
    temperatures = sorted({*batch.temperatures[rows].tolist()})
    if temperatures != [1.0]:
        raise ValueError(f"policy {name!r}: rows sampled at temperatures {temperatures}: a Tinker server trains at 1")
    bad = np.repeat(~np.isfinite(batch.advantages), np.diff(batch.cu_targets)) | ~np.isfinite(batch.target_logprobs)
    chosen = np.zeros(len(batch), dtype=bool)
    chosen[rows] = True
    if (tokens := np.flatnonzero(bad & np.repeat(chosen, np.diff(batch.cu_targets)))).size:
        raise FloatingPointError(f"policy {name!r}: nothing was sent: {describe_bad_rows(batch, tokens)}")
