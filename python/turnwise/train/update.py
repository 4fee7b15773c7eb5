"""Stage: one batch updates one policy: ppo epochs × minibatches, gradients accumulated over micro-batches."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from turnwise.ops import PolicyLoss
from turnwise.train.batch import MicroBatch, micro_batches, minibatches
from turnwise.train.config import LossConfig, UpdateConfig
from turnwise.train.loss import Loss
from turnwise.train.policy import Policy
from turnwise.types import TrainingBatch


def update_policy(
    policy: Policy,
    batch: TrainingBatch,
    update: UpdateConfig,
    loss_config: LossConfig,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Train ``policy`` on its rows of ``batch``; returns the metrics of all updates. No rows: no update, no metrics."""
    rows = rows_of(policy, batch)
    if not policy.trainable or len(rows) == 0:
        return {}
    loss = Loss(loss_config, len(batch.actors))
    log = UpdateLog(batch.actors)
    recomputed = old_logprobs(policy, batch, rows, update) if update.old_logprobs == "recompute" else None
    policy.model.train()
    for _ in range(update.ppo_epochs):
        for part in minibatches(rows, update.minibatches, rng):
            micros = micro_batches(batch, part, update.micro_batch_tokens)
            normalizer = loss.normalizer(micros)
            for micro in micros:
                logprobs_N = policy.logprobs(micro)
                old_N = micro.rollout_logprobs_N if recomputed is None else recomputed[micro.token_N]
                out = loss(logprobs_N, micro, old_N, policy.reference_logprobs(micro), normalizer)
                out.loss.backward()
                log.add_micro(out, micro, logprobs_N.detach())
            log.add_step(policy.step())
    return log.result()


def rows_of(policy: Policy, batch: TrainingBatch) -> np.ndarray:
    """Indices ``[b]`` of the rows that ``policy`` sampled."""
    if policy.name not in batch.policies:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(batch.policy_index == batch.policies.index(policy.name))


@torch.no_grad()
def old_logprobs(policy: Policy, batch: TrainingBatch, rows: np.ndarray, update: UpdateConfig) -> Tensor:
    """The trainer's own log-probs before the first update, one per token of the batch's stream (0 where none is)."""
    policy.model.eval()  # as the sampler was: dropout must not stand in the ratio's denominator
    old = torch.zeros(len(batch.token_ids))
    for micro in micro_batches(batch, rows, update.micro_batch_tokens):
        old[micro.token_N] = policy.logprobs(micro)
    return old


class UpdateLog:
    """Token-weighted means (and maxima) of what the micro-batches of one update stage measured."""

    def __init__(self, actors: list[str]) -> None:
        self.actors = actors
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.micros: list[tuple[int, np.ndarray, PolicyLoss]] = []
        self.current_loss = 0.0
        self.mismatch: float | None = None

    def add_micro(self, out: PolicyLoss, micro: MicroBatch, logprobs_N: Tensor) -> None:
        self.current_loss += float(out.loss.detach())
        trained = micro.mask_N.bool()
        tokens_by_actor = torch.zeros(len(self.actors), dtype=torch.int64).index_add_(
            0, micro.actor_ids_B[micro.row_N], trained.long()
        )
        self.micros.append((int(trained.sum()), tokens_by_actor.numpy(), out))
        if not self.grad_norms:  # before the first step, sampler and trainer hold the same weights
            difference = (logprobs_N - micro.rollout_logprobs_N).abs()[trained]
            self.mismatch = max(self.mismatch or 0.0, float(difference.max()) if len(difference) else 0.0)

    def add_step(self, grad_norm: float) -> None:
        self.grad_norms.append(grad_norm)
        self.losses.append(self.current_loss)
        self.current_loss = 0.0

    def result(self) -> dict[str, float]:
        metrics = {
            "loss": float(np.mean(self.losses)),
            "grad_norm": float(np.mean(self.grad_norms)),
            "updates": len(self.grad_norms),
            "sampler_trainer_logprob_max_diff": self.mismatch or 0.0,
        }
        tokens = np.array([count for count, _, _ in self.micros])
        for name in self.micros[0][2].metrics:
            metrics[name] = _reduce(name, np.array([float(out.metrics[name]) for *_, out in self.micros]), tokens)
        actor_tokens = np.array([by_actor for _, by_actor, _ in self.micros])
        for name in self.micros[0][2].actor_metrics:
            values = np.array([out.actor_metrics[name].numpy() for *_, out in self.micros])
            for i, actor in enumerate(self.actors):
                if actor_tokens[:, i].any():
                    metrics[f"{actor}/{name}"] = _reduce(name, values[:, i], actor_tokens[:, i])
        return metrics


def _reduce(name: str, values: np.ndarray, tokens: np.ndarray) -> float:
    """Maxima stay maxima, counts add up, all else is a mean over tokens."""
    if name.endswith("_max"):
        return float(values[tokens > 0].max(initial=0.0))
    if name == "tokens":
        return float(values.sum())
    return float((values * tokens).sum() / max(tokens.sum(), 1))
