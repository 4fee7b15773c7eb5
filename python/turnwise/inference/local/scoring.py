"""Scores given completions with a Hugging Face causal model: one forward pass for a batch of prompts of any length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from turnwise.inference.common.hf_model import token_rows
from turnwise.inference.local.kv_cache import SHARED_PREFIX_MODELS
from turnwise.inference.local.prefill import common_prefix, last_columns, prefix_cache

_BEGINNING, _FEWEST_ALIKE = 16, 8
"""Tokens by which the beginnings of prompts are compared, and the fewest rows that get batches of their own."""


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """One completion to score after its prompt. ``temperature`` 0 counts as 1, as in a greedy response."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    temperature: float

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def completion_logprobs(
    model: Any, rows: Sequence[ScoredSequence], device: torch.device, *, cached: bool = True
) -> list[list[float]]:
    """Compute the float32 log-probability of each completion token, in the order of ``rows``.

    Each row must fit into the model's context. The beginning that all prompts have in common is computed once. A model
    that can't be ``cached`` may not support padding, and takes the rows one by one.
    """
    if not cached and len(rows) > 1:
        return [completion_logprobs(model, [row], device, cached=False)[0] for row in rows]
    shares = cached and model.config.model_type in SHARED_PREFIX_MODELS
    prefix = common_prefix([row.prompt for row in rows]) if shares else 0
    width, kept = max(map(len, rows)) - prefix, max(len(row.completion) for row in rows) + 1
    rests = [[*row.prompt[prefix:], *row.completion] for row in rows]
    ids = torch.tensor([[0] * (width - len(rest)) + rest for rest in rests], device=device)
    pads = torch.tensor([width - len(rest) for rest in rests], device=device)
    columns = torch.arange(width, device=device)
    options: dict[str, Any] = {"use_cache": False}
    if prefix:
        options = {
            "use_cache": True,
            "past_key_values": prefix_cache(model, rows[0].prompt[:prefix], len(rows), device),
        }
    if cached:
        options["position_ids"] = prefix + (columns - pads[:, None]).clamp(min=0)
        options["logits_to_keep"] = last_columns(kept, width, device) if shares else kept
    if bool(pads.any()):
        options["attention_mask"] = torch.cat(
            [columns.new_ones(len(rests), prefix), (columns >= pads[:, None]).long()], dim=1
        )
    output = model(input_ids=ids, **options)
    # The logits in column c - 1 predict the token in column c, so the last column is not needed.
    temperatures = torch.tensor([row.temperature or 1.0 for row in rows], device=device)
    logits = output.logits[:, -kept:-1, : token_rows(model)]
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None, None], dim=-1)
    picked = logprobs.gather(2, ids[:, width - kept + 1 :, None])[..., 0].cpu()
    return [picked[index, kept - 1 - len(row.completion) :].tolist() for index, row in enumerate(rows)]


def length_batches(
    indices: Sequence[int], rows: Sequence[ScoredSequence], max_rows: int, max_tokens: int
) -> list[list[int]]:
    """Group ``indices`` of ``rows`` into batches within both limits.

    Rows of similar length share a batch, and many rows whose prompts begin alike, such as those of one actor.
    """
    begins = {index: rows[index].prompt[:_BEGINNING] for index in indices}
    alike = Counter(begins.values())
    begins = {index: begin if alike[begin] >= _FEWEST_ALIKE else () for index, begin in begins.items()}
    batches: list[list[int]] = []
    for index in sorted(indices, key=lambda index: (begins[index], len(rows[index]))):
        batch = batches[-1] if batches and begins[batches[-1][0]] == begins[index] else []
        if not batch or len(batch) == max_rows or (len(batch) + 1) * len(rows[index]) > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
