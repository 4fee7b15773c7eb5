"""The policy loss: one call of the fused op on each micro-batch, with the normaliser of a whole optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turnwise.ops import ImportanceCorrection, PolicyLoss, loss_normalizer, policy_loss, select_tokens
from turnwise.ops.common.layout import RowLayout
from turnwise.ops.loss.reference import correction_weights
from turnwise.ops.loss.variants import LOG_RATIO_BOUND
from turnwise.settings.section import RunFacts
from turnwise.train.config.optimization import LossConfig
from turnwise.train.model.micro_batch import MicroBatch, joined_cu_seqlens
from turnwise.train.model.policy import Policy
from turnwise.train.terms.loss_types import make_variant
from turnwise.train.terms.term import Part, Term
from turnwise.types.columns import TOKEN_ADVANTAGES
from turnwise.types.passes import Needs, Read
from turnwise.utils.values import problem

ESS, MEAN, SQUARE = "ess", "importance_weight", "importance_weight_square"
"""Metrics: the effective sample size, as a share of the tokens; the mean importance weight of a token, and that of its
square. The first is that of a whole step, so that it does not depend on the cut into micro-batches or over ranks."""


class PolicyLossTerm(Term):
    """Calls :func:`turnwise.ops.policy_loss` with the arguments of all terms, and measures the entropy."""

    name = "policy_loss"
    effect = "computes"
    needs = Needs(logprobs=False, entropy=True)

    def problems(self, run: RunFacts) -> Iterator[str]:
        if run.config.loss.importance_correction is not None and run.config.update.old_logprobs != "recompute":
            yield problem(
                "loss.importance_correction",
                "the weights compare the trainer's log-probs with the sampler's, so they need update.old_logprobs = "
                "'recompute'",
            )

    def configure(self, config: LossConfig, actors: Sequence[str]) -> None:
        super().configure(config, actors)
        self.variant = make_variant(config)
        settings = config.importance_correction
        self.correction = None if settings is None else ImportanceCorrection(**settings.model_dump())

    def beside_advantage(self, config: LossConfig) -> list[str]:
        return ["loss.type"] if moves_without_advantage(config) else []

    def minibatch(self, policy: Policy | None, parts: list[Part]) -> None:
        """Lay out each part with the denominator of the whole minibatch, and select its tokens."""
        layouts: list[dict[str, Any]] = [
            {
                "aggregation": self.config.aggregation,
                "mask": part.micro.mask_N,
                "cu_seqlens": part.micro.cu_seqlens,
                "actor_ids": part.micro.actor_ids_B,
                "num_actors": len(self.actors),
                "max_length": self.config.max_length,
            }
            for part in parts
        ]
        joined: dict[str, Any] = {
            "mask": torch.cat([part.micro.mask_N for part in parts]),
            "cu_seqlens": joined_cu_seqlens([part.micro for part in parts]),
            "actor_ids": torch.cat([part.micro.actor_ids_B for part in parts]),
        }
        normalizer = loss_normalizer(**{**layouts[0], **joined})
        for part, layout in zip(parts, layouts, strict=True):
            part.layout = {**layout, "normalizer": normalizer}
        if policy is not None and self.variant.selects:
            self._read_and_select(policy, parts)

    @torch.no_grad()
    def _read_and_select(self, policy: Policy, parts: list[Part]) -> None:
        """Select among all tokens of the minibatch, which takes one more forward pass of each micro-batch."""
        micros = [part.micro for part in parts]
        length = 1 + max((int(micro.token_N.max()) for micro in micros if len(micro.token_N)), default=0)
        logprobs = policy.over_stream(length, micros, policy.logprobs)
        chosen = self.select(micros, [logprobs[each.token_N] for each in micros], [p.old_logprobs_N for p in parts])
        for part, selected_N in zip(parts, chosen, strict=True):
            part.selected_N = selected_N

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

    def head_arguments(self, part: Part, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with which the head makes the loss, given those of all terms.

        Tokens outside of ``part.kept_N`` have an advantage of 0. The op also gets the sampler's log-probs unless they
        are the old ones themselves.
        """
        micro, old_N = part.micro, part.old_logprobs_N
        advantages = micro.advantages_N if TOKEN_ADVANTAGES in micro.columns else micro.advantages_B
        return {
            "old_logprobs": old_N,
            "advantages": advantages if part.kept_N is None else micro.advantages_N * part.kept_N,
            "variant": self.variant,
            "correction": self.correction,
            "rollout_logprobs": None if old_N is micro.rollout_logprobs_N else micro.rollout_logprobs_N,
            "entropy": True,
            "selected": part.selected_N,
            **arguments,
            **part.layout,
        }

    def compute(self, read: Read, part: Part, arguments: Mapping[str, Any]) -> PolicyLoss:
        """Return loss, gradient and metrics: those that the pass made, or made here from its log-probs."""
        if read.loss is not None:
            out = PolicyLoss(*read.loss[:3])
        else:
            options, entropies_N = self.head_arguments(part, arguments), read.entropies_N
            coef = options.pop("entropy_coef", 0.0)
            options["entropy"] = None if entropies_N is None else entropies_N.detach()
            out = policy_loss(read.logprobs_N, **options)
            if coef:
                out = out._replace(loss=out.loss - coef * part.aggregate(entropies_N))
        return with_moments(out, part.micro, part.old_logprobs_N, self.correction, len(self.actors))

    def token_weights(self, part: Part) -> Tensor:
        """Return the weight ``[N]`` float32 with which each token's loss enters the loss; 0 for masked tokens."""
        values_N = torch.zeros_like(part.micro.rollout_logprobs_N, requires_grad=True)
        (weights_N,) = torch.autograd.grad(part.aggregate(values_N), values_N)
        return weights_N


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
