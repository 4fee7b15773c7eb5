"""The loss of one micro-batch: configuration in, one fused op call out."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.ops import KL, PolicyLoss, loss_normalizer, policy_loss
from turnwise.train.batch import MicroBatch
from turnwise.train.config import LossConfig
from turnwise.train.losses import registry


class Loss:
    """Calls :func:`turnwise.ops.policy_loss` on packed micro-batches with the normaliser of a whole optimizer step."""

    def __init__(self, config: LossConfig, num_actors: int) -> None:
        self.config = config
        self.num_actors = num_actors
        self.variant = registry[config.kind](**config.options)
        self.kl = KL(config.kl.kind, coef=config.kl.coef) if config.kl.coef else None

    def normalizer(self, micros: list[MicroBatch]) -> Tensor:
        """What the whole minibatch divides by, so that any cut into micro-batches gives the same gradient."""
        lengths = torch.cat([torch.diff(micro.cu_seqlens) for micro in micros])
        return loss_normalizer(
            self.config.aggregation,
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            mask=torch.cat([micro.mask_N for micro in micros]),
            actor_ids=torch.cat([micro.actor_ids_B for micro in micros]),
            num_actors=self.num_actors,
            max_length=self.config.max_length,
        )

    def __call__(
        self,
        logprobs_N: Tensor,
        micro: MicroBatch,
        old_logprobs_N: Tensor,
        ref_logprobs_N: Tensor | None,
        normalizer: Tensor,
    ) -> PolicyLoss:
        return policy_loss(
            logprobs_N,
            old_logprobs_N,
            micro.advantages_B,
            mask=micro.mask_N,
            cu_seqlens=micro.cu_seqlens,
            variant=self.variant,
            kl=self.kl,
            ref_logprobs=ref_logprobs_N,
            aggregation=self.config.aggregation,
            normalizer=normalizer,
            actor_ids=micro.actor_ids_B,
            num_actors=self.num_actors,
            max_length=self.config.max_length,
        )
