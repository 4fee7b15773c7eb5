"""Measurements of the micro-batches of an update, and the metrics that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from turnwise.ops import PolicyLoss
from turnwise.train.model.micro_batch import SingleRank
from turnwise.train.terms.policy_loss import with_sample_sizes
from turnwise.train.terms.term import Part
from turnwise.types import TrainingBatch


@dataclass(slots=True)
class MicroBatchMetrics:
    """Measurements of one micro-batch."""

    trained: int
    """Number of tokens that train."""
    trained_by_actor: np.ndarray
    """The same by actor ``[num_actors]`` int64."""
    dropped_by_actor: Mapping[str, np.ndarray]
    """Number of tokens that each mask drops, by actor ``[num_actors]`` int64."""
    loss: float
    metrics: Mapping[str, Tensor]
    actor_metrics: Mapping[str, Tensor]
    computed: int
    """Number of tokens that passed through the model."""
    tokens: int
    """Number of the rows' tokens."""
    bad_tokens: np.ndarray
    """Positions in the batch's stream where log-probs or advantages are not finite."""
    mismatch: float
    """Largest difference of the log-probs from the sampler's."""
    shares: Mapping[str, tuple[int, int]]
    """Metrics of columns, each as a part and a whole."""

    def on_cpu(self) -> MicroBatchMetrics:
        """Return a copy for other processes."""
        metrics, actor_metrics = ({k: v.cpu() for k, v in m.items()} for m in (self.metrics, self.actor_metrics))
        return replace(self, metrics=metrics, actor_metrics=actor_metrics)


class UpdateLog:
    """Collects the metrics of a batch's micro-batches, as token-weighted means and as maxima. Skipped updates don't
    count. :meth:`join` adds the other ranks' micro-batches, so that every rank has the same numbers. ``weights`` name
    the metrics that are means over other tokens than those that train, and the metrics that count these."""

    def __init__(self, actors: list[str], weights: Mapping[str, str] | None = None) -> None:
        self.actors, self.weights = actors, weights or {}
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.skipped = 0
        self.micros: list[MicroBatchMetrics] = []
        self.current: list[MicroBatchMetrics] = []
        self.mismatch: float | None = None
        self.computed = self.tokens = 0

    def add_micro(self, out: PolicyLoss, part: Part, logprobs_N: Tensor) -> None:
        micro = part.micro
        trained = micro.mask_N.bool()
        actors_N = micro.actor_ids_B[micro.row_N]

        def by_actor(tokens_N: Tensor) -> np.ndarray:
            return torch.bincount(actors_N[tokens_N], minlength=len(self.actors)).cpu().numpy()

        difference_N = (logprobs_N - micro.rollout_logprobs_N).abs()
        bad_N = trained & ~(difference_N + micro.advantages_N).isfinite()
        difference = difference_N[trained & ~bad_N]
        self.current.append(
            MicroBatchMetrics(
                trained=int(trained.sum()),
                trained_by_actor=by_actor(trained),
                dropped_by_actor={name: by_actor(tokens_N) for name, tokens_N in part.dropped.items()},
                loss=float(out.loss.detach()),
                metrics=out.metrics,
                actor_metrics=out.actor_metrics,
                computed=micro.num_tokens,
                tokens=sum(micro.lengths),
                bad_tokens=micro.token_N[bad_N].cpu().numpy(),
                mismatch=float(difference.max()) if len(difference) else 0.0,
                shares={name: pair for column in micro.columns.values() for name, pair in column.shares.items()},
            )
        )

    def join(self, ranks: SingleRank) -> None:
        """End the micro-batches of an update: add those of the other ``ranks``."""
        self.current = ranks.gather([one.on_cpu() for one in self.current] if ranks.size > 1 else self.current)
        self.computed += sum(one.computed for one in self.current)
        self.tokens += sum(one.tokens for one in self.current)
        if not self.grad_norms:  # before the first step, sampler and trainer hold the same weights
            self.mismatch = max([self.mismatch or 0.0, *(one.mismatch for one in self.current)])

    @property
    def current_loss(self) -> float:
        """The loss of the current update."""
        return sum((one.loss for one in self.current), 0.0)

    def bad_tokens(self) -> np.ndarray:
        """Return the positions in the batch's stream where log-probs or advantages of this update are not finite."""
        return np.concatenate([one.bad_tokens for one in self.current])

    def add_step(self, grad_norm: float) -> None:
        self.grad_norms.append(grad_norm)
        self.losses.append(self.current_loss)
        self.micros += self.current
        self.current = []

    def skip_step(self) -> None:
        self.skipped += 1
        self.current = []

    def result(self) -> dict[str, float]:
        counts = {"updates": len(self.grad_norms), "skipped_updates": self.skipped}
        if not self.grad_norms:
            return {**counts}
        metrics = {
            "loss": float(np.mean(self.losses)),
            "grad_norm": float(np.mean(self.grad_norms)),
            **counts,
            "sampler_trainer_logprob_max_diff": self.mismatch or 0.0,
            "unique_token_share": self.computed / self.tokens,
        }
        # The loss's own metrics, over all tokens and then by actor.
        tokens = np.array([one.trained for one in self.micros])
        for name in self.micros[0].metrics:
            weights = self._values(self.weights[name]) if name in self.weights else tokens
            metrics[name] = self._reduce(name, self._values(name), weights)
        actor_tokens = np.array([one.trained_by_actor for one in self.micros])
        for name in self.micros[0].actor_metrics:
            values = np.array([one.actor_metrics[name].cpu().numpy() for one in self.micros])
            for i, actor in enumerate(self.actors):
                if actor_tokens[:, i].any():
                    metrics[f"{actor}/{name}"] = self._reduce(name, values[:, i], actor_tokens[:, i])
        return with_sample_sizes(metrics) | self._column_shares() | self._masked_shares()

    def _column_shares(self) -> dict[str, float]:
        pairs: dict[str, list[tuple[int, int]]] = {}
        for name, pair in (item for one in self.micros for item in one.shares.items()):
            pairs.setdefault(name, []).append(pair)
        sums = {name: np.sum(each, axis=0).tolist() for name, each in pairs.items()}
        return {name: part / max(whole, 1) for name, (part, whole) in sums.items()}

    def _values(self, name: str) -> np.ndarray:
        return np.array([float(one.metrics[name]) for one in self.micros])

    def _masked_shares(self) -> dict[str, float]:
        """Return the share of tokens that each mask drops, over all tokens and by actor."""
        names = list(self.micros[0].dropped_by_actor)
        dropped = {name: np.sum([one.dropped_by_actor[name] for one in self.micros], axis=0) for name in names}
        # Rejected tokens are no longer among those that train.
        tokens = np.sum([one.trained_by_actor for one in self.micros], axis=0) + dropped.get("rejection", 0)
        shares: dict[str, float] = {}
        for name, counts in dropped.items():
            shares[f"masked/{name}"] = float(counts.sum() / max(tokens.sum(), 1))
            by_actor = zip(self.actors, counts.tolist(), tokens.tolist(), strict=True)
            shares |= {f"{actor}/masked/{name}": count / total for actor, count, total in by_actor if total}
        return shares

    def _reduce(self, name: str, values: np.ndarray, tokens: np.ndarray) -> float:
        """Reduce ``values`` by the metric's name: the maximum of maxima, the sum of counts, else the token mean."""
        if name.endswith("_max"):
            return float(values[tokens > 0].max(initial=0.0))
        if name in ("tokens", *self.weights.values()):
            return float(values.sum())
        return float((values * tokens).sum() / max(tokens.sum(), 1))


def describe_bad_rows(batch: TrainingBatch, tokens: np.ndarray) -> str:
    """Describe the first rows with non-finite log-probs or advantages; ``tokens`` are places in the batch's stream."""
    rows = np.unique(np.searchsorted(batch.cu_targets, tokens, side="right") - 1)
    if not len(rows):
        return "the log-probs and advantages of all rows are finite"
    described = [
        f"row {row} (actor {batch.actors[batch.actor_index[row]]!r}, reward {batch.rewards[row]:g}, "
        f"advantage {batch.advantages[row]:g})"
        for row in rows[:3].tolist()
    ]
    return f"{len(rows)} rows are not finite: {', '.join(described)}{', ...' if len(rows) > 3 else ''}"
