"""The ops of several steps against verl's functions one after the other: rewards to loss, hidden states to loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from turnwise.ops import Clip, factorize, grouped_policy_loss, linear_policy_loss

pytestmark = pytest.mark.slow

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@pytest.fixture(scope="session")
def vanilla(verl: Any) -> Any:
    from verl.workers.config import ActorConfig

    def loss(s: Any, log_prob: torch.Tensor, advantages: torch.Tensor, agg: str, clip: Clip) -> torch.Tensor:
        settings = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=clip.low,
            clip_ratio_high=clip.high,
            clip_ratio_c=clip.dual_clip,
        )
        return verl.compute_policy_loss_vanilla(s.double("old"), log_prob, advantages, s.mask.double(), agg, settings)[
            0
        ]

    return loss


def draw_clip(choose: Any) -> Clip:
    return Clip(choose.uniform(0.05, 0.5), choose.uniform(0.05, 0.5), dual_clip=choose.uniform(1.6, 4))


@pytest.mark.parametrize("by_std", [True, False], ids=["std", "no-std"])
def test_rewards_to_loss(
    verl: Any, vanilla: Any, streams: Any, same_loss: Any, target: Any, seeds: Any, by_std: bool
) -> None:
    for seed in seeds(2):
        s = streams(seed)
        rewards = s.ref * s.mask  # verl adds up rewards of masked tokens too
        uids = np.array([f"q{s.choose.randrange(2)}" for _ in s.mask], dtype=object)
        agg, clip = s.choose.choice(AGGREGATIONS), draw_clip(s.choose)
        lp, leaf = s.leaves()
        advantages, _ = verl.compute_grpo_outcome_advantage(
            rewards.double(), torch.ones_like(s.mask).double(), uids, norm_adv_by_std_in_grpo=by_std
        )
        g, (ids, groups) = s.on(target), factorize(uids)
        ours = grouped_policy_loss(
            lp.to(target.device),
            g.old,
            rewards.to(target.device),
            ids.to(target.device),
            num_groups=groups,
            scale="std" if by_std else "none",
            singleton="raw",
            mask=g.mask,
            clip=clip,
            aggregation=agg,
            backend=target.backend,
        )
        same_loss(ours.loss, lp, vanilla(s, leaf, advantages, agg, clip), leaf)


def test_hidden_states_to_loss(vanilla: Any, streams: Any, same_loss: Any, target: Any, seeds: Any) -> None:
    """Gradients of the weight and, by way of it, of the hidden states: the log-probabilities are float64's."""
    for seed in seeds(8):
        s = streams(seed)
        rows, width = s.mask.shape
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(rows * width, 8, generator=generator)
        weight = torch.randn(s.choose.randint(2, 40), 8, generator=generator) / 2
        targets = torch.randint(len(weight), (rows * width,), generator=generator)
        agg, clip, temperature = s.choose.choice(AGGREGATIONS), draw_clip(s.choose), s.choose.uniform(0.6, 1.5)
        mine, theirs = weight.clone().requires_grad_(), weight.double().requires_grad_()
        logits = hidden.double() @ theirs.T / temperature
        log_prob = logits.log_softmax(-1).gather(-1, targets[:, None]).view(rows, width)
        s.old = (log_prob.detach() + 0.4 * (s.old - s.logprobs)).float()
        g = s.on(target)
        ours = linear_policy_loss(
            hidden.to(target.device),
            mine.to(target.device),
            targets.to(target.device),
            g.old.flatten(),
            g.advantages.flatten(),
            cu_seqlens=(torch.arange(rows + 1) * width).to(target.device),
            mask=g.mask.flatten(),
            temperature=temperature,
            clip=clip,
            aggregation=agg,
            backend=target.backend,
        )
        same_loss(ours.loss, mine, vanilla(s, log_prob, s.spread(), agg, clip), theirs)
