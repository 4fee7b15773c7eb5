"""The KL term's two extras: a coefficient that adapts, and the term in the reward instead of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from turnwise.samples.pack import pack
from turnwise.train.config.optimization import KLConfig
from turnwise.train.model.micro_batch import micro_batches
from turnwise.train.model.policy import Policy
from turnwise.types import Sample

ERROR_BOUND = 0.2
"""Largest relative distance from the target that a measured KL counts as (Ziegler et al. 2019, section 2.2)."""


def coefficient(policy: Policy, config: KLConfig) -> float:
    """The policy's present coefficient: the configured one until it adapted."""
    return config.coef if policy.kl_coef is None else policy.kl_coef


def adapted(coef: float, kl: float, samples: int, config: KLConfig) -> float:
    """The coefficient after ``samples`` rows with a mean KL per token of ``kl``; ``coef`` itself without a target.

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)`` (https://arxiv.org/abs/1909.08593); a batch
    larger than the horizon counts as one horizon. A KL that is not finite changes nothing.
    """
    if config.target is None or not np.isfinite(kl):
        return coef
    error = float(np.clip(kl / config.target - 1, -ERROR_BOUND, ERROR_BOUND))
    return coef * (1 + error * min(1.0, samples / config.horizon))


class KLPenalty:
    """``coef * sum(sampled - reference log-prob)`` over a row's trained tokens: what credit finds taken from rewards.

    The sum is the k1 estimate of ``KL(sampler || reference)`` of the row, under the weights that sampled it. Set as
    ``arena.reward_penalty``; :meth:`adapt` follows the update, with the metrics of the last batch. Rows of policies
    without a reference lose nothing.
    """

    def __init__(self, policies: Mapping[str, Policy], config: KLConfig, micro_batch_tokens: int) -> None:
        self.policies = dict(policies)
        self.config = config
        self.micro_batch_tokens = micro_batch_tokens
        self._measured: dict[str, dict[str, tuple[float, int, int]]] = {}

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """The penalty ``[B]`` of each sample, in units of its reward."""
        penalties = np.zeros(len(samples))
        self._measured = {}
        for name, policy in self.policies.items():
            rows = [place for place, sample in enumerate(samples) if sample.policy == name]
            if policy.reference is None or not rows:
                continue
            kl_B, tokens_B = self._row_kl(policy, [samples[row] for row in rows])
            penalties[rows] = coefficient(policy, self.config) * kl_B
            by_actor: dict[str, tuple[float, int, int]] = {}
            for row, kl, tokens in zip(rows, kl_B.tolist(), tokens_B.tolist(), strict=True):
                total, count, number = by_actor.get(samples[row].actor, (0.0, 0, 0))
                by_actor[samples[row].actor] = (total + kl, count + tokens, number + 1)
            self._measured[name] = by_actor
        return penalties.tolist()

    @torch.no_grad()
    def _row_kl(self, policy: Policy, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """The sum of log-prob differences ``[b]`` float64, and the trained tokens ``[b]``, of rows of one policy."""
        batch = pack([replace(sample, advantage=0.0) for sample in samples], {}, {})
        difference = torch.zeros(len(batch.token_ids), dtype=torch.float64)
        trained = torch.zeros(len(batch.token_ids), dtype=torch.float64)
        policy.model.eval()  # an adapter's reference is its own model, with the adapter off
        rows = np.arange(len(batch))
        for micro in micro_batches(batch, rows, self.micro_batch_tokens, trie_share=policy.trie_share):
            reference_N = policy.reference_logprobs(micro.to(policy.device))
            assert reference_N is not None
            reference_N = reference_N.cpu()
            gap_N = micro.rollout_logprobs_N.double() - reference_N.double()
            trained[micro.token_N] = micro.mask_N.double()
            difference[micro.token_N] = torch.where(micro.mask_N.bool(), gap_N, 0.0)
        starts = batch.cu_seqlens[:-1]
        return np.add.reduceat(difference.numpy(), starts), np.add.reduceat(trained.numpy(), starts).astype(np.int64)

    def adapt(self) -> dict[str, float]:
        """Move each policy's coefficient by the KL of the last batch, which is in the metrics (per token, k1), with the
        coefficient that was used and the mean penalty of a row. Names start with the policy's where there are several.
        """
        metrics: dict[str, float] = {}
        for name, by_actor in self._measured.items():
            policy, prefix = self.policies[name], f"{name}/" if len(self.policies) > 1 else ""
            coef = coefficient(policy, self.config)
            kl, tokens, rows = (sum(values) for values in zip(*by_actor.values(), strict=True))
            metrics |= {
                f"{prefix}kl": kl / max(tokens, 1),
                f"{prefix}kl_coef": coef,
                f"{prefix}kl_penalty": coef * kl / rows,
                **{f"{prefix}{actor}/kl": total / max(count, 1) for actor, (total, count, _) in by_actor.items()},
            }
            policy.kl_coef = adapted(coef, kl / max(tokens, 1), rows, self.config)
        self._measured = {}
        return metrics
