"""Complete one batch of prompts with a Hugging Face causal model: prefill each distinct prompt once, then decode.

The decode loop is written out instead of calling ``model.generate(past_key_values=...)``. Measured on one CPU core
(Qwen3 of 0.8M parameters, 256 rows of 100 prompt tokens, 8 siblings each, 20 new tokens), the same result took
1.47 s with plain ``generate``, 0.48 s with ``generate`` on a shared prefill, and {LOOP} s here, because
- the cache writes in place, where the library's own copies all of it for every token, and
- a finished row leaves the batch, where ``generate`` keeps computing it until the last row is done.

Legend: ``R`` rows, ``U`` distinct prompts, ``P`` prompt columns, ``T`` new tokens at most, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from turnwise.inference.sampling import RowSampler
from turnwise.types import FinishReason, Sampling

_RESERVE = 32
"""Columns by which a full key-value buffer grows."""


@dataclass(slots=True)
class Row:
    """One completion to make: ``limit`` tokens at most, ended early by one of ``stop_ids``."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    limit: int
    stop_ids: tuple[int, ...]


@dataclass(slots=True)
class Completion:
    """The tokens of one row (the stop token included) and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


def complete(
    model: Any, rows: Sequence[Row], device: torch.device, abandoned: Callable[[], Sequence[int]] = tuple
) -> tuple[list[Completion], int]:
    """Complete ``rows`` with ``model``, which is in evaluation mode; returns them in order.

    ``abandoned()`` is asked before each token for rows that nobody waits for any more: they stop with ``"abort"``.
    The second value counts the prompt tokens that were prefilled (siblings share one prefill).
    """
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    place = {prompt: index for index, prompt in enumerate(prompts)}
    index_R = torch.tensor([place[row.prompt] for row in rows], device=device)
    logits_UV, cache, mask_UP = _prefill(model, prompts, device)
    _expand(cache, index_R)
    mask = None if mask_UP is None else mask_UP[index_R]
    tokens, logprobs, aborted = _decode(model, rows, logits_UV[index_R], cache, mask, abandoned)
    return _completions(rows, tokens, logprobs, aborted), sum(map(len, prompts))


def _prefill(model: Any, prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Any, Tensor | None]:
    """Next-token logits ``[U, V]``, the cache, and the mask ``[U, P]`` int64 (``None`` where no prompt is padded)."""
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[width - len(prompt) :] = torch.tensor(prompt)
    pads = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    columns = torch.arange(width, device=device)
    padded = bool(pads.any())
    mask = (columns >= pads[:, None]).long() if padded else None
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=ids.to(device),
        attention_mask=mask,
        position_ids=(columns - pads[:, None]).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1], output.past_key_values, mask


def _decode(
    model: Any,
    rows: Sequence[Row],
    logits: Tensor,
    cache: Any,
    mask: Tensor | None,
    abandoned: Callable[[], Sequence[int]],
) -> tuple[Tensor, Tensor, set[int]]:
    """Tokens ``[R, T]`` int64 and log-probabilities ``[R, T]`` float32 on the CPU, and the rows that were aborted.

    The cache holds its rows in the order of ``alive``; finished rows are dropped from it.
    """
    device = logits.device
    width = max(row.limit for row in rows)
    sampler = RowSampler.build([row.sampling for row in rows], [row.seed for row in rows], width, device)
    limits = torch.tensor([row.limit for row in rows], device=device)
    lengths = torch.tensor([len(row.prompt) for row in rows], device=device)
    stops = _stop_table(rows, device)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64, device=device)
    logprobs = torch.zeros((len(rows), width), device=device)
    alive = torch.arange(len(rows), device=device)
    live = torch.ones(len(rows), dtype=torch.bool, device=device)
    aborted: set[int] = set()
    for step in range(width):
        drawn, drawn_logprobs = sampler.draw(logits, alive, step)
        tokens[alive, step] = drawn
        logprobs[alive, step] = drawn_logprobs
        ended = (drawn[:, None] == stops[alive]).any(dim=1) | (step + 1 >= limits[alive])
        live[alive] &= ~ended
        if left := set(abandoned()) - aborted:
            # a row whose caller left is finished, whatever its tokens say
            aborted |= {row for row in left if bool(live[row])}
            live[list(left)] = False
        going = live[alive]
        count = int(going.sum())
        if count == 0:
            break
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if count <= 0.9 * len(alive):
            keep = _packing_order(going, count)
            _keep_rows(cache, keep, count)
            alive, drawn = alive[keep], drawn[keep]
            mask = None if mask is None else mask[keep]
        output = model(
            input_ids=drawn[:, None],
            attention_mask=mask,
            position_ids=(lengths[alive] + step)[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1]
    return tokens.cpu(), logprobs.cpu(), aborted


def _stop_table(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Stop ids ``[R, S]`` int64, filled up with -1, which is no token."""
    width = max((len(row.stop_ids) for row in rows), default=0)
    return torch.tensor([[*row.stop_ids, *([-1] * (width - len(row.stop_ids)))] for row in rows], device=device)


def _completions(rows: Sequence[Row], tokens: Tensor, logprobs: Tensor, aborted: set[int]) -> list[Completion]:
    """Cut each row after its first stop token or at its limit."""
    completions = []
    for index, (row, ids, values) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
        if index in aborted:
            completions.append(Completion([], [], "abort"))
            continue
        end = next((place for place, token in enumerate(ids[: row.limit]) if token in row.stop_ids), None)
        reason: FinishReason = "length" if end is None else "stop"
        count = row.limit if end is None else end + 1
        completions.append(Completion(ids[:count], values[:count], reason))
    return completions


# ---------------------------------------------------------------------------------------------------------------------
# The key-value cache
# ---------------------------------------------------------------------------------------------------------------------
class InPlaceLayer(DynamicLayer):
    """A full-attention cache layer with room to grow, so that a token is written in place.

    ``keys`` and ``values`` ``[R, heads, length, head_dim]`` are views of buffers with ``_RESERVE`` spare columns.
    """

    def __init__(self, keys: Tensor, values: Tensor, index: Tensor) -> None:
        """``keys`` and ``values`` of the prompts are repeated for the rows of ``index``."""
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._length = keys.shape[-2]
        self._buffers = [_with_room(tensor, index) for tensor in (keys, values)]
        self._show()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, end = self._length, self._length + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            self._buffers = [_with_room(buffer, None, end - start) for buffer in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self._length = end
        self._show()
        return self.keys, self.values

    def keep_rows(self, order: Tensor, count: int) -> None:
        """Leave rows ``order [count]``: those that stay in place are not touched, the others fill the gaps."""
        moved = (order != torch.arange(count, device=order.device)).nonzero()[:, 0]
        for place, buffer in enumerate(self._buffers):
            buffer[moved, :, : self._length] = buffer[order[moved], :, : self._length]
            self._buffers[place] = buffer[:count]
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)


def _with_room(tensor: Tensor, index: Tensor | None, more: int = 1) -> Tensor:
    rows, heads, length, size = tensor.shape
    buffer = tensor.new_empty((rows if index is None else len(index), heads, length + max(more, _RESERVE), size))
    buffer[:, :, :length] = tensor if index is None else tensor[index]
    return buffer


def _expand(cache: Any, index: Tensor) -> None:
    """Repeat the prompts' cache ``[U, ...]`` for their siblings ``[R, ...]``."""
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = InPlaceLayer(layer.keys, layer.values, index)
        else:  # sliding windows and the like keep their own storage
            layer.batch_select_indices(index)


def _packing_order(going: Tensor, count: int) -> Tensor:
    """Places of the rows that go on, such that as many as possible stay where they are."""
    order = torch.arange(count, device=going.device)
    order[~going[:count]] = going[count:].nonzero()[:, 0] + count
    return order


def _keep_rows(cache: Any, order: Tensor, count: int) -> None:
    for layer in cache.layers:
        if isinstance(layer, InPlaceLayer):
            layer.keep_rows(order, count)
        else:
            layer.batch_select_indices(order)
