"""The loss of one micro-batch: turns the configuration into one call of the fused op."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.ops import KL, ImportanceCorrection, PolicyLoss, aggregate, loss_normalizer, policy_loss, select_tokens
from turnwise.ops.common.layout import RowLayout
from turnwise.ops.loss.reference import correction_weights
from turnwise.ops.loss.variants import LOG_RATIO_BOUND
from turnwise.train.config.optimization import LossConfig
from turnwise.train.model.micro_batch import MicroBatch, joined_cu_seqlens
from turnwise.train.update.loss_types import make_variant
from turnwise.train.update.masks import TokenMasks
from turnwise.types import TrainingBatch

TEACHER_KL = "teacher_forward_kl"
"""Metric: the forward KL per token of the teachers, with ``distill.top_k``."""
OBSERVATIONS, OBSERVED_TOKENS = "loss_observations", "observation_tokens"
"""Metrics: the mean cross entropy of the observed tokens, in nats, and their number; with ``loss.observations``."""
WEIGHTS = {OBSERVATIONS: OBSERVED_TOKENS}
"""Metrics that are means over other tokens than those that train, and the metric that counts these."""

ESS, MEAN, SQUARE = "ess", "importance_weight", "importance_weight_square"
"""Metrics: the effective sample size, as a share of the tokens; the mean importance weight of a token, and that of its
square. The first is that of a whole step, so that it does not depend on the cut into micro-batches or over ranks."""


class Loss:
    """Calls :func:`turnwise.ops.policy_loss` on packed micro-batches with the normaliser of a whole optimizer step.

    ``kl_coef`` and ``entropy_coef`` are the present coefficients, by default the configured ones. Raises ``ValueError``
    naming the invalid config key.
    """

    def __init__(
        self, config: LossConfig, num_actors: int, kl_coef: float | None = None, entropy_coef: float | None = None
    ) -> None:
        self.config = config
        self.num_actors = num_actors
        self.variant = make_variant(config)
        self.masks = TokenMasks(config.masks)
        self.kl_coef = config.kl.coef if kl_coef is None else kl_coef
        self.entropy_coef = config.entropy_coef if entropy_coef is None else entropy_coef
        kl, in_loss = config.kl, config.kl.apply_to == "loss"
        if kl.importance_weighted and not in_loss:
            raise ValueError(
                "config key 'loss.kl.importance_weighted' = True: expected False with loss.kl.apply_to = 'reward': "
                "the policy that sampled earned the reward, so there is no ratio"
            )
        self.kl = KL(kl.estimator, self.kl_coef, kl.importance_weighted) if in_loss and self.kl_coef else None
        self.correction = (
            None
            if config.importance_correction is None
            else ImportanceCorrection(**config.importance_correction.model_dump())
        )

    @property
    def reads_reference(self) -> bool:
        """True if the loss needs a reference's log-probs; a KL penalty on the reward was applied earlier."""
        return self.config.kl.apply_to == "loss"

    def normalizer(self, micros: Sequence[MicroBatch]) -> Tensor:
        """Return the denominator of the whole minibatch, so that any cut into micro-batches gives the same gradient."""
        return loss_normalizer(
            self.config.aggregation,
            cu_seqlens=joined_cu_seqlens(micros),
            mask=torch.cat([micro.mask_N for micro in micros]),
            actor_ids=torch.cat([micro.actor_ids_B for micro in micros]),
            num_actors=self.num_actors,
            max_length=self.config.max_length,
        )

    def select(
        self, micros: Sequence[MicroBatch], logprobs: Sequence[Tensor], old_logprobs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return a mask ``[N]`` for each micro-batch, of the tokens that the variant selects in the whole minibatch.

        The variant sees the tokens in the order of the batch's own stream, so a random choice is the same for any cut.
        """
        order = torch.cat([micro.token_N for micro in micros]).argsort()
        advantages = torch.cat([micro.advantages_N for micro in micros])[order]
        chosen = torch.zeros(len(order), dtype=torch.bool, device=order.device)
        chosen[order] = select_tokens(
            torch.cat(list(logprobs))[order],
            torch.cat(list(old_logprobs))[order],
            advantages,
            self.variant,
            mask=torch.cat([micro.mask_N for micro in micros])[order],
            cu_seqlens=torch.tensor([0, len(order)], device=order.device),
        )
        return list(chosen.split([len(micro.mask_N) for micro in micros]))

    def __call__(
        self,
        logprobs_N: Tensor,
        micro: MicroBatch,
        old_logprobs_N: Tensor,
        ref_logprobs_N: Tensor | None,
        normalizer: Tensor,
        *,
        entropies_N: Tensor | None = None,
        selected_N: Tensor | None = None,
        kept_N: Tensor | None = None,
    ) -> PolicyLoss:
        """Return loss, gradient and metrics. Tokens outside of ``kept_N`` have an advantage of 0.

        The op also gets the sampler's log-probs unless they are ``old_logprobs_N`` themselves.
        """
        aggregation = self._aggregation(micro, normalizer)
        advantages = micro.advantages_B if micro.token_advantages_N is None else micro.advantages_N
        out = policy_loss(
            logprobs_N,
            old_logprobs_N,
            advantages if kept_N is None else micro.advantages_N * kept_N,
            variant=self.variant,
            kl=self.kl,
            ref_logprobs=ref_logprobs_N,
            correction=self.correction,
            rollout_logprobs=None if old_logprobs_N is micro.rollout_logprobs_N else micro.rollout_logprobs_N,
            entropy=None if entropies_N is None else entropies_N.detach(),
            selected=selected_N,
            **aggregation,
        )
        out = with_moments(out, micro, old_logprobs_N, self.correction, self.num_actors)
        # The entropy bonus needs gradients, so it is added outside of the op.
        if not self.entropy_coef or entropies_N is None:
            return out
        return out._replace(loss=out.loss - self.entropy_coef * aggregate(entropies_N, **aggregation))

    def add_teacher_kl(
        self, out: PolicyLoss, kl_N: Tensor, coef: float, micro: MicroBatch, normalizer: Tensor
    ) -> PolicyLoss:
        """Add ``coef`` times the teachers' KL ``[N]`` to the loss, aggregated as it, and its means to the metrics."""
        loss = out.loss + coef * aggregate(kl_N, **self._aggregation(micro, normalizer))
        measured_N, actor_N = kl_N.detach() * micro.mask_N, micro.actor_ids_B[micro.row_N]
        sums, tokens = (
            torch.zeros(self.num_actors, device=kl_N.device).index_add_(0, actor_N, values.float())
            for values in (measured_N, micro.mask_N)
        )
        by_actor = sums / tokens.clamp_min(1)
        return out._replace(
            loss=loss,
            metrics={**out.metrics, TEACHER_KL: sums.sum() / tokens.sum().clamp_min(1)},
            actor_metrics={**out.actor_metrics, TEACHER_KL: by_actor},
        )

    def add_observations(
        self, out: PolicyLoss, logprobs_N: Tensor, micro: MicroBatch, micros: Sequence[MicroBatch]
    ) -> PolicyLoss:
        """Add ``loss.observations`` times the mean of ``-log p(token)`` over the observed tokens of the minibatch
        ``micros`` to the loss, and those of ``micro`` to the metrics (ECHO, https://arxiv.org/abs/2605.24517)."""
        if not self.config.observations or micro.observed_N is None:
            return out
        losses_n = -logprobs_N[micro.observed_N]
        total, count = losses_n.sum(), len(losses_n)
        observed = sum(int(each.observed_N.sum()) for each in micros if each.observed_N is not None)
        metrics = {
            OBSERVATIONS: total.detach() / max(1, count),
            OBSERVED_TOKENS: total.new_tensor(float(count)).detach(),
        }
        loss = out.loss + self.config.observations * total / max(1, observed)
        return out._replace(loss=loss, metrics={**out.metrics, **metrics})

    def token_weights(self, micro: MicroBatch, normalizer: Tensor) -> Tensor:
        """Return the weight ``[N]`` float32 with which each token's loss enters the loss; 0 for masked tokens."""
        values_N = torch.zeros_like(micro.rollout_logprobs_N, requires_grad=True)
        (weights_N,) = torch.autograd.grad(aggregate(values_N, **self._aggregation(micro, normalizer)), values_N)
        return weights_N

    def _aggregation(self, micro: MicroBatch, normalizer: Tensor) -> dict[str, Any]:
        """Return the arguments that aggregate values per token."""
        return {
            "aggregation": self.config.aggregation,
            "mask": micro.mask_N,
            "cu_seqlens": micro.cu_seqlens,
            "normalizer": normalizer,
            "actor_ids": micro.actor_ids_B,
            "num_actors": self.num_actors,
            "max_length": self.config.max_length,
        }


@torch.no_grad()
def with_moments(
    out: PolicyLoss, micro: MicroBatch, old_logprobs_N: Tensor, correction: ImportanceCorrection | None, actors: int
) -> PolicyLoss:
    """Replace the effective sample size of a micro-batch by the means that it consists of, overall and by actor."""
    if ESS not in out.metrics:
        return out
    mask_N = micro.mask_N.bool()
    mismatch_N = torch.where(mask_N, old_logprobs_N.float() - micro.rollout_logprobs_N, 0.0)
    if correction is None:
        weights_N = mismatch_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    else:
        weights_N, _ = correction_weights(mismatch_N, RowLayout(mismatch_N, micro.cu_seqlens), correction)
    columns = torch.stack([torch.ones_like(weights_N), weights_N, weights_N.square()], -1).double() * mask_N[:, None]
    sums = columns.new_zeros(actors, 3).index_add_(0, micro.actor_ids_B[micro.row_N], columns)
    names = (MEAN, SQUARE)
    whole, by_actor = (table[..., 1:] / table[..., :1].clamp_min(1) for table in (sums.sum(0), sums))
    kept, kept_by_actor = ({k: v for k, v in m.items() if k != ESS} for m in (out.metrics, out.actor_metrics))
    return out._replace(
        metrics={**kept, **dict(zip(names, whole, strict=True))},
        actor_metrics={**kept_by_actor, **dict(zip(names, by_actor.unbind(1), strict=True))},
    )


def with_sample_sizes(metrics: dict[str, float]) -> dict[str, float]:
    """Replace each mean of squares in a step's ``metrics`` by the effective sample size, ``mean**2 / mean of squares``.

    Example: ``{"importance_weight": 1.0, "importance_weight_square": 2.0}`` has an ``ess`` of 0.5
    """
    for key in [key for key in metrics if key.endswith(SQUARE)]:
        square, prefix = metrics.pop(key), key.removesuffix(SQUARE)
        metrics[prefix + ESS] = metrics[prefix + MEAN] ** 2 / square if square else 0.0
    return metrics


def check_observations(name: str, batch: TrainingBatch, rows: np.ndarray) -> None:
    """Raise ``ValueError`` if the batch's observed tokens are not marked. Warn if ``rows``, of policy ``name``, have
    none."""
    if batch.observation_mask is None:
        raise ValueError(
            "batch.observation_mask=None: expected marked observations with loss.observations: set "
            "arena.marks_observations = True"
        )
    sums = np.concatenate([[0], batch.observation_mask.cumsum(dtype=np.int64)])[batch.cu_seqlens]
    if not np.diff(sums)[rows].any():
        text = "no chat of this batch goes on after an answer with the same tokens, so there is nothing to predict"
        warnings.warn(f"loss.observations, policy {name!r}: {text}", RuntimeWarning, stacklevel=3)


def check_loss(config: LossConfig) -> list[str]:
    """Try a loss on two rows of two tokens, and return its problems, one line each."""
    try:
        loss = Loss(config, num_actors=1)
    except (ValueError, TypeError) as error:
        text = str(error)
        return [text if "config key" in text else f"config section 'loss': {text}"]
    # A custom loss may fail when it is called, so compute the loss and its gradient once.
    tokens = torch.full((4,), -1.0, requires_grad=True)
    try:
        result = policy_loss(
            tokens,
            tokens.detach(),
            torch.tensor([1.0, -1.0]),
            cu_seqlens=torch.tensor([0, 2, 4]),
            variant=loss.variant,
            correction=loss.correction,
            rollout_logprobs=tokens.detach(),
            aggregation=config.aggregation,
            actor_ids=torch.zeros(2, dtype=torch.int64),
            num_actors=1,
            max_length=config.max_length,
        )
        result.loss.backward()
    except Exception as error:  # a custom loss may raise anything
        return [f"config section 'loss' (type {config.type!r}), tried on four tokens: {type(error).__name__}: {error}"]
    return []


def moves_without_advantage(config: LossConfig) -> bool:
    """Return True if the loss of the config's type has a gradient where all advantages are 0, such as DRO's.

    Losses that select tokens of the minibatch compare rows, and move none without an advantage by themselves.
    """
    variant = make_variant(config)
    if variant.selects:
        return False
    aggregation = (variant.aggregations or ("token-mean",))[0]
    logprobs, old = torch.tensor([-1.0, -0.5], requires_grad=True), torch.tensor([-1.2, -0.3])
    layout: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 2]), "aggregation": aggregation}
    loss = policy_loss(logprobs, old, torch.zeros(1), variant=variant, **layout).loss
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    return gradient is not None and bool(gradient.any())
