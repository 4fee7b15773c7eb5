"""The training loop without `Trainer`: sample, reward, group, loss, step. `python examples/train_loop.py [STEPS]`

A tiny random model learns to write vowels, in seconds on a CPU. The comment above each step names the room (a folder of
the package) that does this step in real runs. Their loop is `turnwise/train/loop.py`. This file leaves out several
turns and actors, trees, filters, packing, a KL term, minibatches, asynchronous sampling, evaluation, checkpoints, logs.

Axes in names: B samples, G prompts, T tokens.
"""

import asyncio
import sys

import torch
from torch import Tensor

from turnwise import ops
from turnwise.inference import TransformersClient
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.types import ModelRequest, ModelResponse, Sampling

PROMPTS = ("sing?", "hum?", "shout?", "whisper?")
GROUP_SIZE = 16
SAMPLING = Sampling(temperature=1.0, max_tokens=8)


def reward_of(text: str) -> float:
    """The share of vowels among the letters of ``text``."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def pad(rows: list[list[float]], length: int) -> Tensor:
    """``rows`` as ``[B, T]``, filled with 0 on the right."""
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


async def main(steps: int = 25) -> list[float]:
    """Train for ``steps`` steps; returns the mean reward of each."""
    # turnwise.train.model loads models, attaches adapters and builds the optimizer and its schedule.
    tokenizer = build_tokenizer(["abcdefghijklmnopqrstuvwxyz"])
    model = build_model(tokenizer, num_hidden_layers=2, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)

    # turnwise.inference has clients for transformers and for vLLM in this process, in others and over HTTP. This client
    # samples with the module that trains. A client with separate weights needs `load_weights` after each step.
    client = TransformersClient(model, tokenizer, share=True)

    # turnwise.tasks has prompts for many tasks; turnwise.arena turns them into chats, one per actor and turn.
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    prompt_ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    group_ids_B = torch.arange(len(PROMPTS)).repeat_interleave(GROUP_SIZE)

    curve = []
    for step in range(steps):
        # Sample. turnwise.arena runs many episodes at once; turnwise.train.group_queue runs them ahead of training.
        requests = [ModelRequest(prompt_ids[group], SAMPLING) for group in group_ids_B.tolist()]
        responses = await client.generate(requests)

        # Reward. turnwise.arena.rewards has rubrics, judges, and rewards for steps and groups.
        rewards_B = torch.tensor([reward_of(response.text) for response in responses])

        # Group. turnwise.credit has one rule per file (GRPO, Dr. MAS, AT-GRPO, RAE). Most are a group key and this op.
        advantages_B = ops.group_advantage(rewards_B, group_ids_B)

        # Loss. turnwise.samples packs a batch without padding; turnwise.train.update has more losses and minibatches.
        loss = loss_of(model, requests, responses, advantages_B)

        # Step. turnwise.train.update also accumulates micro-batches and skips non-finite updates.
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        # Record. turnwise.train.log writes metrics and rollouts; turnwise.train.checkpoint saves all training state.
        curve.append(rewards_B.mean().item())
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step + 1:3}: reward {curve[-1]:.2f}, for example {responses[0].text!r}")
    await client.close()
    return curve


def loss_of(
    model: torch.nn.Module, requests: list[ModelRequest], responses: list[ModelResponse], advantages_B: Tensor
) -> Tensor:
    """PPO's clipped loss over the completion tokens of a padded batch."""
    rows = [[*q.prompt_token_ids, *r.completion_token_ids] for q, r in zip(requests, responses, strict=True)]
    length = max(map(len, rows))
    tokens_BT = pad(rows, length)
    real_BT = pad([[1] * len(row) for row in rows], length)

    # The model predicts a token one position before it, so the old log-probs and the mask start one position earlier.
    starts = [len(request.prompt_token_ids) - 1 for request in requests]
    old_BT = pad([[0.0] * at + r.logprobs for at, r in zip(starts, responses, strict=True)], length - 1)
    mask_BT = pad([[0] * at + [1] * len(r.logprobs) for at, r in zip(starts, responses, strict=True)], length - 1)

    # turnwise.train.model packs rows or computes shared prefixes once. It stores no logits of a batch either.
    hidden_BTH = model.model(input_ids=tokens_BT, attention_mask=real_BT).last_hidden_state
    logprobs_N = ops.linear_logprob(
        hidden_BTH[:, :-1].flatten(0, 1), model.lm_head.weight, tokens_BT[:, 1:].flatten(), temperature=1.0
    )
    return ops.policy_loss(logprobs_N.view_as(old_BT), old_BT, advantages_B, mask=mask_BT).loss


if __name__ == "__main__":
    rewards = asyncio.run(main(*map(int, sys.argv[1:])))
    print(f"reward rose from {rewards[0]:.2f} to {rewards[-1]:.2f}")
