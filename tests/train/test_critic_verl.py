"""PPO with a critic, whole updates of weights and value head, against the same with verl's own functions."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from turnwise.train.config.optimization import CriticConfig, LossConfig, UpdateConfig
from turnwise.train.model.policy import Policy
from turnwise.train.terms.critic import CLIP, HEAD, value_head
from turnwise.train.update.update import update_policy
from turnwise.types import TrainingBatch

pytestmark = [pytest.mark.slow, pytest.mark.needs("verl")]

LAM, LR, CRITIC_LR = 0.9, 2e-3, 5e-2
UPDATE = UpdateConfig(lr=LR, ppo_epochs=3, old_logprobs="recompute", max_grad_norm=0.5)
LOSS = LossConfig(type="ppo", options={"low": 0.1, "high": 0.1}, critic=CriticConfig(lr=CRITIC_LR, lam=LAM))


def one_actor(batch: TrainingBatch) -> TrainingBatch:
    """verl whitens the advantages of the whole batch, ours are whitened by actor."""
    return replace(batch, actor_index=np.zeros_like(batch.actor_index), actors=["first"])


def read(model: Any, head: nn.Linear, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, values, mask and rewards of the tokens after the first of each row: ``[B, T]`` each."""
    columns: list[list[Tensor]] = [[], [], [], []]
    for row, (begin, end) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        ids = torch.from_numpy(batch.token_ids[begin:end])
        states = model.model(ids[None]).last_hidden_state[0, :-1]
        logs = torch.log_softmax(model.lm_head(states), -1)
        mask = torch.from_numpy(batch.loss_mask[begin + 1 : end].astype(np.float64))
        reward = torch.zeros_like(mask)
        reward[int(mask.nonzero().max())] = float(batch.advantages[row])
        taken = logs.gather(1, ids[1:, None])[:, 0]
        for column, value in zip(columns, (taken, head(states.detach())[:, 0], mask, reward), strict=True):
            column.append(value)
    made: Any = tuple(pad_sequence(column, batch_first=True) for column in columns)
    return made


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_steps_of_three_epochs_are_verls(small_model, random_batch, seed):
    from verl.trainer.ppo import core_algos as verl
    from verl.workers.config import ActorConfig

    torch.manual_seed(seed)
    policy = Policy("default", small_model(seed)[0].double(), UPDATE, total_steps=100)
    policy.add_head(HEAD, value_head(policy).double(), CRITIC_LR)
    model, head = copy.deepcopy(policy.model), copy.deepcopy(policy.heads[HEAD].module)
    groups = [
        {"params": list(model.parameters())},
        {"params": list(head.parameters()), "lr": CRITIC_LR, "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=UPDATE.betas, weight_decay=UPDATE.weight_decay)
    settings = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.1, clip_ratio_high=0.1,
        clip_ratio_c=1e9,
    )  # fmt: skip
    clipped = [0.0, 0.0]
    for step in range(3):
        batch = one_actor(random_batch(10 * seed + step, rows=7))
        metrics = update_policy(policy, batch, UPDATE, LOSS, np.random.default_rng(0))
        with torch.no_grad():
            old, old_values, mask, rewards = read(model, head, batch)
            # Before the update, the bias moves the values to the mean of the rewards.
            offset = (rewards.sum(1, keepdim=True) - old_values)[mask != 0].mean()
            head.bias += offset
            old_values += offset
        advantages, returns = verl.compute_gae_advantage_return(rewards, old_values, mask, 1.0, LAM)
        for _ in range(UPDATE.ppo_epochs):
            logprobs, values, _, _ = read(model, head, batch)
            loss, found = verl.compute_policy_loss_vanilla(
                old_log_prob=old, log_prob=logprobs, advantages=advantages, response_mask=mask,
                loss_agg_mode="token-mean", config=settings,
            )  # fmt: skip
            value_loss, value_clipped = verl.compute_value_loss(
                values, returns, old_values, mask, CLIP, loss_agg_mode="token-mean"
            )
            optimizer.zero_grad()
            (loss + value_loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), UPDATE.max_grad_norm)
            optimizer.step()
            clipped = [clipped[0] + float(found["actor/pg_clipfrac"]), clipped[1] + float(value_clipped)]
        kept = mask != 0
        spread = float(returns[kept].var(correction=0))
        explained = 1 - float((returns - old_values)[kept].var(correction=0)) / spread
        assert metrics["explained_variance"] == pytest.approx(explained, abs=1e-5)
    assert min(clipped) > 0, "both clips must have an effect"
    ours, theirs = dict(policy.model.named_parameters()), dict(model.named_parameters())
    ours |= {f"critic.{name}": each for name, each in policy.heads[HEAD].module.named_parameters()}
    theirs |= {f"critic.{name}": each for name, each in head.named_parameters()}
    before = dict(small_model(seed)[0].double().named_parameters())
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        torch.testing.assert_close(mine, theirs[name], rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert max(float((ours[name] - each).detach().abs().max()) for name, each in before.items()) > 5e-3
