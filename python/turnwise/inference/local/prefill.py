"""Computes the keys and values of prompts: once for the beginning that all have in common, then of the rest of each.

Legend: ``U`` distinct prompts, ``P`` prompt columns, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from turnwise.inference.common.hf_model import last_mlp_at
from turnwise.inference.local.kv_cache import SHARED_PREFIX_MODELS
from turnwise.inference.weights.lora import activated

_LEAST_PREFIX = 8
"""Least tokens of a common prefix that are computed once for all prompts."""


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the number of tokens with which all of several prompts begin, such as the system prompt's; each keeps at
    least one token of its own. A prefix of a few tokens counts as 0, as it isn't worth a pass of its own."""
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    same = next((index for index in range(most) if first[index] != last[index]), most)
    return same if len(prompts) > 1 and same >= _LEAST_PREFIX else 0


def prefix_cache(model: Any, prefix: Sequence[int], count: int, device: torch.device) -> Any:
    """Return a cache with the keys and values of ``prefix`` for ``count`` rows; an empty one without a prefix."""
    cache = DynamicCache(config=model.config)
    if prefix:
        start = torch.tensor([list(prefix)], device=device)
        model(input_ids=start, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(count)
    return cache


def prefill(
    model: Any, prompts: Sequence[tuple[int, ...]], prefix: int, device: torch.device
) -> tuple[Tensor, Any, Tensor | None]:
    """Prefill the prompts, whose first ``prefix`` tokens are the same. Returns next-token logits ``[U, V]``, the cache,
    and the mask ``[U, P]`` int64.

    The padding lies between the prefix and the rest. The mask is ``None`` if no prompt is padded.
    """
    cache = prefix_cache(model, prompts[0][:prefix], len(prompts), device)
    rests = [list(prompt[prefix:]) for prompt in prompts]
    width = max(map(len, rests))
    ids = torch.tensor([[0] * (width - len(rest)) + rest for rest in rests], device=device)
    pads = torch.tensor([width - len(rest) for rest in rests], device=device)
    columns = torch.arange(width, device=device)
    mask = None
    if bool(pads.any()):
        mask = torch.cat([columns.new_ones(len(rests), prefix), (columns >= pads[:, None]).long()], dim=1)
    # Only the last column is read after the last layer's attention.
    last = torch.arange(1, len(prompts) + 1, device=device) * width - 1
    trims = model.config.model_type in SHARED_PREFIX_MODELS
    lm: Any = activated(model)
    with last_mlp_at(lm.get_decoder(), last) if trims else nullcontext():
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=prefix + (columns - pads[:, None]).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last_columns(1, width, device) if trims else 1,
        )
    return output.logits[:, -1], output.past_key_values, mask


def last_columns(count: int, width: int, device: torch.device) -> Tensor:
    """Return the places of the last ``count`` of ``width`` columns.

    A number instead would give the head a slice, for which PyTorch multiplies row by row, and in bfloat16 copies the
    weight for each row.
    """
    return torch.arange(width - count, width, device=device)
