"""Updates one policy on one batch: ppo epochs × minibatches, with gradients accumulated over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from turnwise.ops import PolicyLoss
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.model.micro_batch import (
    MicroBatch,
    RoutingCounts,
    SingleRank,
    explain_out_of_memory,
    minibatches,
    smallest,
)
from turnwise.train.model.policy import Policy
from turnwise.train.update.baseline import subtract_optimal_baseline
from turnwise.train.update.critic import Targets, add_value_loss, estimate_advantages, keep_states, values_of
from turnwise.train.update.entropy import adapt_entropy_coefficient, entropy_coefficient
from turnwise.train.update.kl import adapted, coefficient
from turnwise.train.update.loss import OBSERVED_TOKENS, WEIGHTS, Loss, check_observations, with_sample_sizes
from turnwise.train.update.masks import MaskedMicroBatch
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
    if loss_config.observations:
        check_observations(policy.name, batch, rows)
    entropy_coef = entropy_coefficient(policy, loss_config)
    loss = Loss(loss_config, len(batch.actors), coefficient(policy, loss_config.kl), entropy_coef)
    log = UpdateLog(batch.actors)
    recomputed = old_logprobs(policy, batch, rows, update) if update.old_logprobs == "recompute" else None
    targets: Targets | None = None
    measured: dict[str, float] = {}
    if policy.critic is not None and loss_config.critic is not None:
        max_tokens = policy.micro_batch_tokens(update.micro_batch_tokens)
        batch, targets, measured = estimate_advantages(policy, batch, rows, max_tokens, loss_config.critic)
    elif loss_config.baseline == "optimal_token":
        max_tokens = policy.micro_batch_tokens(update.micro_batch_tokens)
        batch, measured = subtract_optimal_baseline(policy, batch, rows, max_tokens)
    # One optimizer step for each minibatch of each epoch.
    rate = policy.learning_rate
    policy.model.train(policy.dropout)  # without dropout the first ratio is 1, as the sampler has none
    parts = [part for _ in range(update.ppo_epochs) for part in minibatches(batch, rows, update.num_minibatches, rng)]
    for done, part in enumerate(parts, start=1):
        micros = _accumulate_part(policy, batch, part, update, recomputed, loss, log, targets)
        log.join(policy.ranks)
        if (norm := step_or_skip(policy, batch, micros, log, update.max_nonfinite_updates)) is None:
            log.skip_step()
        else:
            log.add_step(norm)
        show(done, len(parts))
    # Adapt the coefficients to what the updates measured.
    metrics = log.result() | measured
    if metrics["updates"]:
        metrics["learning_rate"] = rate
    if loss_config.entropy_target is not None and "entropy" in metrics:
        metrics["entropy_coef"] = entropy_coef
        adapt_entropy_coefficient(policy, metrics["entropy"], loss_config)
    if loss.kl is not None and "kl" in metrics:
        metrics["kl_coef"] = loss.kl_coef
        policy.kl_coef = adapted(loss.kl_coef, metrics["kl"], len(rows), loss_config.kl)
    return metrics


def _accumulate_part(
    policy: Policy,
    batch: TrainingBatch,
    part: np.ndarray,
    update: UpdateConfig,
    recomputed: Tensor | None,
    loss: Loss,
    log: UpdateLog,
    targets: Targets | None,
) -> list[MicroBatch]:
    """Accumulate the gradient of the rows ``part``, and return its micro-batches, which halve if memory runs out."""
    while True:
        cut = policy.cut(batch, part, policy.micro_batch_tokens(update.micro_batch_tokens))
        try:
            micros = [micro.to(policy.device) for micro in cut]
            olds = [m.rollout_logprobs_N if recomputed is None else recomputed[m.token_N] for m in micros]
            accumulate(policy, micros, olds, loss, log, targets)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or not policy.halve_micro_batches(cut):
                raise
            log.current = []
        else:
            return micros


def skip_draws(policy: Policy, batch: TrainingBatch, update: UpdateConfig, rng: np.random.Generator) -> None:
    """Draw from ``rng`` what :func:`update_policy` draws, for a policy that other ranks train."""
    rows = rows_of(policy, batch)
    if policy.trainable and len(rows):
        for _ in range(update.ppo_epochs):
            minibatches(batch, rows, update.num_minibatches, rng)


def accumulate(
    policy: Policy,
    micros: list[MicroBatch],
    olds: list[Tensor],
    loss: Loss,
    log: UpdateLog,
    targets: Targets | None = None,
) -> None:
    """Accumulate the gradient of one minibatch, micro-batch by micro-batch."""
    masked = loss.masks.apply(policy, micros, olds)
    micros = [one.micro for one in masked]
    normalizer = loss.normalizer(micros)
    selected = select(policy, micros, olds, loss)
    tokens = sum(int(micro.mask_N.bool().sum()) for micro in micros) if targets is not None else 0
    for index in policy.ranks.indices(len(micros)):
        micro = smallest(micros) if index is None else micros[index]
        with explain_out_of_memory(micro):
            teaching, teacher_kl_N = policy.teaching, None
            with keep_states(policy) as states:
                if teaching is None:
                    logprobs_N, entropies_N = policy.logprobs(micro, entropy=True)
                else:
                    logprobs_N, entropies_N, teacher_kl_N = teaching.logprobs(policy, micro, log.actors)
            values_N = values_of(policy, micro, states)
            ref_N = policy.reference_logprobs(micro) if loss.reads_reference else None
            if index is None:  # the other ranks have one more micro-batch
                (0.0 * logprobs_N.sum()).backward()
                continue
            extra = {"entropies_N": entropies_N, "selected_N": selected[index], "kept_N": masked[index].kept_N}
            out = loss(logprobs_N, micro, olds[index], ref_N, normalizer, **extra)
            if teaching is not None and teacher_kl_N is not None:
                out = loss.add_teacher_kl(out, teacher_kl_N, teaching.coef, micro, normalizer)
            out = loss.add_observations(out, logprobs_N, micro, micros)
            out.loss.backward()
            out = add_value_loss(out, values_N, micro, targets, tokens)
        log.add_micro(out, masked[index], logprobs_N.detach())


@torch.no_grad()
def select(policy: Policy, micros: list[MicroBatch], olds: list[Tensor], loss: Loss) -> list[Tensor | None]:
    """Return the tokens that the loss selects in each micro-batch; ``None`` for each if the loss takes all.

    The loss selects among all tokens of the minibatch, which takes one more forward pass of each micro-batch.
    """
    if not loss.variant.selects:
        return [None] * len(micros)
    length = 1 + max((int(micro.token_N.max()) for micro in micros if len(micro.token_N)), default=0)
    logprobs = policy.over_stream(length, micros, policy.logprobs)
    return [*loss.select(micros, [logprobs[micro.token_N] for micro in micros], olds)]


def step_or_skip(
    policy: Policy, batch: TrainingBatch, micros: list[MicroBatch], log: UpdateLog, max_skipped: int
) -> float | None:
    """Take an optimizer step and return the gradient norm; ``None`` if loss or gradient is not finite.

    Then no weight changes. Raises ``FloatingPointError`` after more than ``max_skipped`` such updates in a row, counted
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
        return None
    policy.skipped = 0
    return norm


def describe_bad_rows(batch: TrainingBatch, tokens: np.ndarray) -> str:
    """Describe the first rows with non-finite log-probs or advantages; ``tokens`` are places in the batch's stream."""
    rows = np.unique(np.searchsorted(batch.cu_seqlens, tokens, side="right") - 1)
    if not len(rows):
        return "the log-probs and advantages of all rows are finite"
    described = [
        f"row {row} (actor {batch.actors[batch.actor_index[row]]!r}, reward {batch.rewards[row]:g}, "
        f"advantage {batch.advantages[row]:g})"
        for row in rows[:3].tolist()
    ]
    return f"{len(rows)} rows are not finite: {', '.join(described)}{', ...' if len(rows) > 3 else ''}"


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
    return policy.over_stream(len(batch.token_ids), micros, policy.logprobs)


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
    routing: RoutingCounts | None

    def on_cpu(self) -> MicroBatchMetrics:
        """Return a copy for other processes."""
        metrics, actor_metrics = ({k: v.cpu() for k, v in m.items()} for m in (self.metrics, self.actor_metrics))
        return replace(self, metrics=metrics, actor_metrics=actor_metrics)


class UpdateLog:
    """Collects the metrics of a batch's micro-batches, as token-weighted means and as maxima. Skipped updates don't
    count. :meth:`join` adds the other ranks' micro-batches, so that every rank has the same numbers."""

    def __init__(self, actors: list[str]) -> None:
        self.actors = actors
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.skipped = 0
        self.micros: list[MicroBatchMetrics] = []
        self.current: list[MicroBatchMetrics] = []
        self.mismatch: float | None = None
        self.computed = self.tokens = 0

    def add_micro(self, out: PolicyLoss, masked: MaskedMicroBatch, logprobs_N: Tensor) -> None:
        micro = masked.micro
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
                dropped_by_actor={name: by_actor(tokens_N) for name, tokens_N in masked.dropped.items()},
                loss=float(out.loss.detach()),
                metrics=out.metrics,
                actor_metrics=out.actor_metrics,
                computed=micro.num_tokens,
                tokens=sum(micro.lengths),
                bad_tokens=micro.token_N[bad_N].cpu().numpy(),
                mismatch=float(difference.max()) if len(difference) else 0.0,
                routing=micro.routing,
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
            weights = tokens if name not in WEIGHTS else self._values(WEIGHTS[name])
            metrics[name] = _reduce(name, self._values(name), weights)
        actor_tokens = np.array([one.trained_by_actor for one in self.micros])
        for name in self.micros[0].actor_metrics:
            values = np.array([one.actor_metrics[name].cpu().numpy() for one in self.micros])
            for i, actor in enumerate(self.actors):
                if actor_tokens[:, i].any():
                    metrics[f"{actor}/{name}"] = _reduce(name, values[:, i], actor_tokens[:, i])
        return with_sample_sizes(metrics) | self._routing_shares() | self._masked_shares()

    def _routing_shares(self) -> dict[str, float]:
        """Return the share of tokens whose experts are replayed, and that of them which another row's experts took."""
        counts = [one.routing for one in self.micros if one.routing is not None]
        if not counts:
            return {}
        tokens, recorded, conflicts = np.sum(counts, axis=0).tolist()
        return {"routing/replayed": recorded / max(tokens, 1), "routing/conflicts": conflicts / max(recorded, 1)}

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


def _reduce(name: str, values: np.ndarray, tokens: np.ndarray) -> float:
    """Reduce ``values`` by the metric's name: the maximum of maxima, the sum of counts, else the mean over tokens."""
    if name.endswith("_max"):
        return float(values[tokens > 0].max(initial=0.0))
    if name in ("tokens", OBSERVED_TOKENS):
        return float(values.sum())
    return float((values * tokens).sum() / max(tokens.sum(), 1))
