"""Put turnwise's ops into your own training step with three lines. Runs on a CPU in seconds: python drop_in.py

A plain PyTorch loop runs GRPO on a small language model and rewards even tokens. The loss is written twice:
`plain_loss` is the usual code, and `fused_loss` calls `group_advantage`, `linear_logprob` and `policy_loss` instead.
Two models train side by side from the same start, each with one of the losses. They must stay alike.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from turnwise import ops

QUESTIONS, ANSWERS, PROMPT, TOKENS, VOCABULARY = 4, 8, 3, 12, 50
LOW, HIGH, TEMPERATURE = 0.2, 0.28, 0.9


class Model(nn.Module):
    """Any causal language model: a body that computes hidden states and a head that computes logits."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.body = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states ``[B, L, H]`` of ``tokens [B, L]``."""
        return self.body(self.embedding(tokens))[0]


class Batch(NamedTuple):
    """Completions of one step: ``tokens [B, L]``, a ``mask [B, L-1]`` of the trained tokens, the sampler's
    log-probabilities ``old [B, L-1]``, ``rewards [B]``, and the question of each row ``groups [B]``."""

    tokens: Tensor
    mask: Tensor
    old: Tensor
    rewards: Tensor
    groups: Tensor


# ---------------------------------------------------------------------------------------------------------------------
# Before: the logits of the whole batch, and a dozen passes over them
# ---------------------------------------------------------------------------------------------------------------------
def plain_loss(model: Model, batch: Batch) -> Tensor:
    logits = model.head(model(batch.tokens)[:, :-1]) / TEMPERATURE
    logprobs = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)

    grouped = batch.rewards.view(QUESTIONS, ANSWERS)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)
    advantages = advantages.view(-1, 1)

    ratio = (logprobs - batch.old).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - LOW, 1 + HIGH))
    return (losses * batch.mask).sum() / batch.mask.sum()


# ---------------------------------------------------------------------------------------------------------------------
# After: three ops that compute only the trained tokens
# ---------------------------------------------------------------------------------------------------------------------
def fused_loss(model: Model, batch: Batch) -> Tensor:
    hidden, mask = model(batch.tokens)[:, :-1], batch.mask
    ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))  # offsets of the rows in the packed stream

    advantages = ops.group_advantage(batch.rewards, batch.groups)
    logprobs = ops.linear_logprob(hidden[mask], model.head.weight, batch.tokens[:, 1:][mask], temperature=TEMPERATURE)
    return ops.policy_loss(logprobs, batch.old[mask], advantages, cu_seqlens=ends, clip=ops.Clip(LOW, HIGH)).loss


# ---------------------------------------------------------------------------------------------------------------------
# The loop around them
# ---------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def sample(model: Model, generator: torch.Generator) -> Batch:
    """Sample ``ANSWERS`` completions of random length for each question."""
    groups = torch.arange(QUESTIONS).repeat_interleave(ANSWERS)
    tokens = torch.randint(VOCABULARY, (QUESTIONS, PROMPT), generator=generator)[groups]
    old = torch.zeros(len(groups), PROMPT - 1)
    for _ in range(TOKENS):
        distribution = (model.head(model(tokens)[:, -1]) / TEMPERATURE).log_softmax(-1)
        chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
        tokens, old = torch.cat([tokens, chosen], 1), torch.cat([old, distribution.gather(1, chosen)], 1)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (len(groups), 1), generator=generator)
    place = torch.arange(tokens.shape[1] - 1) - (PROMPT - 1)
    mask = (place >= 0) & (place < lengths)
    rewards = ((tokens[:, 1:] % 2 == 0) & mask).sum(1) / mask.sum(1)
    return Batch(tokens, mask, old, rewards, groups)


def main(steps: int = 25) -> None:
    torch.manual_seed(0)
    plain = Model()
    fused = copy.deepcopy(plain)
    pairs = [(model, torch.optim.Adam(model.parameters(), lr=1e-2)) for model in (plain, fused)]
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for step in range(steps):
        batch = sample(plain, generator)
        rewards.append(batch.rewards.mean().item())
        for _ in range(2):  # two updates per step, so that the ratios of the second update are not 1
            losses = []
            for (model, optimizer), loss_of in zip(pairs, (plain_loss, fused_loss), strict=True):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                losses.append(loss.detach())
                optimizer.step()
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)
            if step == 0:  # later, rounding errors accumulate
                for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    reached = sample(fused, generator).rewards.mean().item()
    assert reached > rewards[0] + 0.2, (rewards[0], reached)
    print(f"{steps} steps, reward {rewards[0]:.2f} -> {reached:.2f}; losses and gradients agree")


if __name__ == "__main__":
    main()
