"""Updates one policy on one batch: ppo epochs × minibatches, with gradients accumulated over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.model.micro_batch import MicroBatch, explain_out_of_memory, minibatches
from turnwise.train.model.policy import Policy
from turnwise.train.terms.registry import Terms, terms_of
from turnwise.train.terms.term import Part
from turnwise.train.update.log import UpdateLog, describe_bad_rows
from turnwise.types import TrainingBatch
from turnwise.utils.memory import is_out_of_memory


def update_policy(
    policy: Policy,
    batch: TrainingBatch,
    update: UpdateConfig,
    loss_config: LossConfig,
    rng: np.random.Generator,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Train ``policy`` on its rows of ``batch`` and return the metrics of all updates; no metrics if it has no rows.

    An update whose loss or gradient is not finite is skipped and counted. Raises ``FloatingPointError`` after more than
    ``update.max_nonfinite_updates`` of them in a row. ``show(done, total)`` is called after each update.
    """
    rows = rows_of(policy, batch)
    if not policy.trainable or len(rows) == 0:
        return {}
    terms = terms_of(policy).begin(loss_config, batch.actors)
    log = UpdateLog(batch.actors, terms.weights)
    recomputed = old_logprobs(policy, batch, rows, update) if update.old_logprobs == "recompute" else None
    batch = terms.prepare(policy, batch, rows, update.micro_batch_tokens)
    # One optimizer step for each minibatch of each epoch.
    rate = policy.learning_rate
    policy.model.train(policy.dropout)  # without dropout the first ratio is 1, as the sampler has none
    parts = [part for _ in range(update.ppo_epochs) for part in minibatches(batch, rows, update.num_minibatches, rng)]
    for done, part in enumerate(parts, start=1):
        _accumulate_part(policy, batch, part, update, recomputed, terms, log)
        log.join(policy.ranks)
        step_or_skip(policy, batch, log, update.max_nonfinite_updates)
        show(done, len(parts))
    metrics = log.result()
    metrics |= terms.metrics(metrics, len(rows))
    return metrics | ({"learning_rate": rate} if metrics["updates"] else {})


def _accumulate_part(
    policy: Policy,
    batch: TrainingBatch,
    part: np.ndarray,
    update: UpdateConfig,
    recomputed: Tensor | None,
    terms: Terms,
    log: UpdateLog,
) -> None:
    """Accumulate the gradient of the rows ``part``; its micro-batches halve if memory runs out."""
    while True:
        cut = policy.cut(batch, part, policy.micro_batch_tokens(update.micro_batch_tokens))
        try:
            micros = [micro.to(policy.device) for micro in cut]
            olds = [m.rollout_logprobs_N if recomputed is None else recomputed[m.token_N] for m in micros]
            return accumulate(policy, micros, olds, terms, log)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or not policy.halve_micro_batches(cut):
                raise
            log.current = []


def skip_draws(policy: Policy, batch: TrainingBatch, update: UpdateConfig, rng: np.random.Generator) -> None:
    """Draw from ``rng`` what :func:`update_policy` draws, for a policy that other ranks train."""
    rows = rows_of(policy, batch)
    if policy.trainable and len(rows):
        for _ in range(update.ppo_epochs):
            minibatches(batch, rows, update.num_minibatches, rng)


def accumulate(
    policy: Policy, micros: Sequence[MicroBatch], olds: Sequence[Tensor], terms: Terms, log: UpdateLog
) -> None:
    """Accumulate the gradient of one minibatch, micro-batch by micro-batch."""
    parts = terms.minibatch(policy, [Part(micro, old) for micro, old in zip(micros, olds, strict=True)])
    for index in policy.ranks.indices(len(parts)):
        if index is None:  # the other ranks have one more micro-batch
            part = replace(min(parts, key=lambda each: each.micro.num_tokens), counts=False)
        else:
            part = parts[index]
        with explain_out_of_memory(part.micro):
            read = terms.read(policy, part)
            out, whole = terms.loss(read, part)
            if not part.counts:
                (0.0 * whole).backward()
                continue
            whole.backward()
        log.add_micro(out, part, read.logprobs_N.detach())


def step_or_skip(policy: Policy, batch: TrainingBatch, log: UpdateLog, max_skipped: int) -> None:
    """Take an optimizer step, or skip it if loss or gradient is not finite: then no weight changes.

    Raises ``FloatingPointError`` after more than ``max_skipped`` such updates in a row, counted
    over the whole run, and at once if the weights themselves are not finite.
    """
    try:
        if not math.isfinite(log.current_loss):
            policy.discard_gradient()
            raise FloatingPointError(f"policy {policy.name!r}: loss is {log.current_loss} at update {policy.updates}")
        norm = policy.step()
    except FloatingPointError as error:
        policy.check_finite(f"at update {policy.updates}")  # with such weights every later batch would fail too
        policy.skipped += 1
        if policy.skipped > max_skipped:
            raise FloatingPointError(
                f"{error}; {policy.skipped} in a row, update.max_nonfinite_updates = {max_skipped}; "
                f"{describe_bad_rows(batch, log.bad_tokens())}"
            ) from None
        log.skip_step()
    else:
        policy.skipped = 0
        log.add_step(norm)


def rows_of(policy: Policy, batch: TrainingBatch) -> np.ndarray:
    """Return the indices ``[b]`` of the rows that ``policy`` sampled."""
    if policy.name not in batch.policies:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(batch.policy_index == batch.policies.index(policy.name))


@torch.no_grad()
def old_logprobs(policy: Policy, batch: TrainingBatch, rows: np.ndarray, update: UpdateConfig) -> Tensor:
    """Return the trainer's log-probs before the first update, one per token of the batch's stream; 0 for tokens that
    have none."""
    policy.model.eval()  # as the sampler
    micros = policy.cut(batch, rows, policy.micro_batch_tokens(update.micro_batch_tokens))
    return policy.over_stream(len(batch.targets), micros, policy.logprobs)
