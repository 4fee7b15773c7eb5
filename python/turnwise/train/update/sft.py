"""Supervised warm start before RL.

It uses the trainer's own update with constant credit: with advantage 1 for every completion, the REINFORCE loss
``-A * log p`` is the cross-entropy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
from torch import nn

from turnwise.samples.pack import select
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.config.policies import WarmStartConfig
from turnwise.train.model.policy import Policy
from turnwise.train.update.sft_data import Demonstration
from turnwise.train.update.update import update_policy
from turnwise.types import TrainingBatch

_NAME = "warm start"
_SMOOTHED = 10
"""Number of steps whose mean loss is compared with ``target_loss``: the loss of one step is too noisy."""


def warm_start(
    model: nn.Module,
    demonstrations: Sequence[Demonstration],
    config: WarmStartConfig,
    *,
    seed: int,
    micro_batch_tokens: int = 2048,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train ``model`` in place for ``config.steps`` on batches drawn without replacement, and return the last loss.

    The loss is the mean cross-entropy per completion token. ``on_step(step, loss)`` is called after each step. Training
    ends early once the mean of ten steps is ``config.target_loss`` or less. Successive rows with the same prompt are
    drawn together, so that in a trie the prompt passes through the model once. ``micro_batch_tokens`` bounds the tokens
    of one forward pass. The learning rate falls linearly to a tenth.
    Raises ``ValueError`` for no demonstrations and ``FloatingPointError`` for a loss that is not finite.
    """
    if not demonstrations:
        raise ValueError("demonstrations=[]: expected at least one")
    update = UpdateConfig(
        lr=config.lr,
        schedule="linear",
        min_lr_ratio=0.1,
        warmup=config.warmup,
        weight_decay=0.01,
        micro_batch_tokens=micro_batch_tokens,
        max_nonfinite_updates=0,
    )
    policy = Policy(_NAME, model, update, total_steps=config.steps)
    loss = LossConfig(type="reinforce")
    everything = constant_credit(demonstrations)
    rng = np.random.default_rng(seed)
    # Successive rows with the same prompt form a group, which is drawn as a whole.
    groups = [
        list(rows) for _, rows in groupby(range(len(demonstrations)), lambda i: demonstrations[i].prompt_token_ids)
    ]
    # One update per step; shuffle the groups again when the order runs out.
    order: list[int] = []
    last, recent = float("nan"), deque[float](maxlen=_SMOOTHED)
    for step in range(config.steps):
        while len(order) < config.batch_size:
            order.extend(row for group in rng.permutation(len(groups)).tolist() for row in groups[group])
        drawn, order = order[: config.batch_size], order[config.batch_size :]
        try:
            last = update_policy(policy, select(everything, np.array(drawn)), update, loss, rng)["loss"]
        except FloatingPointError as error:
            raise FloatingPointError(f"{error} (step {step}); lower warm_start.lr = {config.lr}") from error
        on_step(step + 1, last)
        recent.append(last)
        if config.target_loss is not None and len(recent) == _SMOOTHED and np.mean(recent) <= config.target_loss:
            break
    model.eval()
    return last


def constant_credit(demonstrations: Sequence[Demonstration]) -> TrainingBatch:
    """Build a batch in which every completion has advantage 1 and reward 1."""
    lengths = np.array([len(row) for row in demonstrations])
    prompts = np.array([len(row.prompt_token_ids) for row in demonstrations])
    starts = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    tokens = [
        token for row in demonstrations for ids in (row.prompt_token_ids, row.completion_token_ids) for token in ids
    ]
    rows = len(demonstrations)
    return TrainingBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        loss_mask=(within >= np.repeat(prompts, lengths)).astype(np.uint8),
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        advantages=np.ones(rows, dtype=np.float32),
        rewards=np.ones(rows, dtype=np.float32),
        temperatures=np.ones(rows, dtype=np.float32),
        actor_index=np.zeros(rows, dtype=np.int64),
        policy_index=np.zeros(rows, dtype=np.int64),
        min_version=np.zeros(rows, dtype=np.int64),
        actors=[_NAME],
        policies=[_NAME],
    )
