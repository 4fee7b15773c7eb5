"""Supervised warm start: cross-entropy on demonstrations, the start that RL improves on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from turnwise.train.config import WarmStartConfig

_ROWS_PER_FORWARD = 32


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token ids of one prompt and its completion, the stop token included."""

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]


def warm_start(
    model: nn.Module,
    demonstrations: Sequence[Demonstration],
    config: WarmStartConfig,
    *,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train ``model`` in place for ``config.steps`` on batches drawn without replacement; returns the last loss.

    The loss is the mean cross-entropy per completion token. ``on_step(step, loss)`` sees each step.
    Raises ``ValueError`` for no demonstrations and ``FloatingPointError`` for a loss that is not finite.
    """
    if not demonstrations:
        raise ValueError("demonstrations=[]: expected at least one")
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
    order: list[int] = []
    loss = float("nan")
    model.train()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / max(1, config.warmup)) * (1 - 0.9 * step / config.steps)
        while len(order) < config.batch_size:
            order.extend(rng.permutation(len(demonstrations)).tolist())
        drawn, order = order[: config.batch_size], order[config.batch_size :]
        loss = _accumulate(model, [demonstrations[i] for i in drawn])
        if not np.isfinite(loss):
            raise FloatingPointError(f"warm start: the loss is {loss} at step {step}; lower warm_start.lr={config.lr}")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step + 1, loss)
    model.eval()
    return loss


def _accumulate(model: nn.Module, rows: Sequence[Demonstration]) -> float:
    """Add the gradient of the mean cross-entropy of ``rows``; rows of like length go together, to pad little."""
    rows = sorted(rows, key=lambda row: len(row.prompt_token_ids) + len(row.completion_token_ids))
    tokens = sum(len(row.completion_token_ids) for row in rows)
    total = 0.0
    for start in range(0, len(rows), _ROWS_PER_FORWARD):
        loss = _summed_loss(model, rows[start : start + _ROWS_PER_FORWARD]) / tokens
        loss.backward()
        total += float(loss.detach())
    return total


def _summed_loss(model: nn.Module, rows: Sequence[Demonstration]) -> torch.Tensor:
    width = max(len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), -100)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens = torch.tensor([*row.prompt_token_ids, *row.completion_token_ids])
        input_ids[i, : len(tokens)] = tokens
        attention_mask[i, : len(tokens)] = 1
        labels[i, len(row.prompt_token_ids) : len(tokens)] = tokens[len(row.prompt_token_ids) :]
    first = min(len(row.prompt_token_ids) for row in rows) - 1
    logits = model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=width - first
    ).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, first + 1 :].flatten(), reduction="sum"
    )
