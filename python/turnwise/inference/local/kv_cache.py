"""Decode one more token for many nodes, given the prefilled key-value cache of their prompts.

A node is a distinct prefix, which one row or several continue (``decode``).

``Paths`` and ``SharedPrefix`` keep each prompt's keys and values once, however many siblings complete it. On CPUs
``Paths`` writes new tokens behind the prompts. Each node lists the places of its own tokens, where a C++ kernel reads
them. Elsewhere ``SharedPrefix`` multiplies the queries of all siblings with their prompt's keys at once, and
writes new tokens into a small buffer per row. ``Repeated`` serves all models that these were not tested on: it repeats
the library's own cache for each row. ``Uncached`` serves those that have no such cache.

Legend: ``R`` nodes, ``G`` groups of at most ``W`` siblings, ``U`` prompts, ``H`` query heads, ``K`` key-value heads,
``P`` prompt columns, ``S`` new tokens so far, ``D`` head size, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from turnwise.inference.local.attention import RESERVE, attended_by
from turnwise.inference.local.paths import Paths
from turnwise.inference.weights.lora import activated

SHARED_PREFIX_MODELS = frozenset({"llama", "qwen2", "qwen3"})
"""Model types that the tests cover, and whose attention is plain softmax over all earlier tokens."""


class Decoder(Protocol):
    """Nodes that grow by one token at a time; those of :class:`Paths` also by several."""

    nodes: Tensor
    """The first node of each row."""

    @property
    def size(self) -> int:
        """Number of nodes."""
        ...

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Append ``tokens [R]`` at ``positions [R]``, and return the next token's logits ``[R, V]``."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep only ``rows``: ascending int64 indices into the current order. A repeated index splits a node."""
        ...


def make_decoder(model: Any, cache: Any, mask: Tensor | None, index: Tensor, prefix: int = 0) -> Decoder:
    """Make a decoder for the prompts in ``cache``, all of which occur: row ``r`` continues prompt ``index[r]``.

    ``mask [U, P]`` is 0 on padding, which follows the first ``prefix`` columns, equal in all prompts.
    """
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    if not plain or model.config.model_type not in SHARED_PREFIX_MODELS:
        return Repeated(model, cache, mask, index)
    if cache.layers[0].keys.device.type == "cpu":
        return Paths(model, cache, mask, index, prefix)
    return SharedPrefix(model, cache, mask, index)


class Repeated:
    """Uses the library's cache, with the prompts' part repeated for each row."""

    def __init__(self, model: Any, cache: Any, mask: Tensor | None, index: Tensor) -> None:
        self._model, self._cache, self._mask = model, cache, mask
        self.nodes = index
        self.size = int(index.max()) + 1

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        return _forward(self._model, tokens, positions, self._cache, attention_mask=self._mask)

    def keep(self, rows: Tensor) -> None:
        self.size = len(rows)
        self._cache.batch_select_indices(rows)
        self._mask = None if self._mask is None else self._mask[rows]


class Uncached:
    """Passes each whole sequence through the model for every token, for models whose cache fails a trial.

    Only sequences of equal length share a pass, as such models may not support padding.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], index: Tensor) -> None:
        self._model, self.nodes = model, index
        self._sequences = [list(prompt) for prompt in prompts]
        last = "logits_to_keep" in inspect.signature(type(activated(model)).forward).parameters
        self._last = {"logits_to_keep": 1} if last else {}

    @property
    def size(self) -> int:
        return len(self._sequences)

    def next_logits(self) -> Tensor:
        """Return the next token's logits ``[R, V]``."""
        same: dict[int, list[int]] = {}
        for row, sequence in enumerate(self._sequences):
            same.setdefault(len(sequence), []).append(row)
        parts = []
        for rows in same.values():
            ids = torch.tensor([self._sequences[row] for row in rows], device=self.nodes.device)
            parts.append(self._model(input_ids=ids, use_cache=False, **self._last).logits[:, -1])
        places = torch.tensor([row for rows in same.values() for row in rows], device=self.nodes.device)
        return torch.cat(parts)[places.argsort()]

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        for sequence, token in zip(self._sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        return self.next_logits()

    def keep(self, rows: Tensor) -> None:
        self._sequences = [list(self._sequences[row]) for row in rows.tolist()]


class SharedPrefix:
    """Keeps prompts once per group of siblings, and new tokens per row.

    ``_table [G, W]`` holds the rows of each group (0 in a free place). ``_place [R]`` is the index of each row in the
    flattened table.
    """

    def __init__(self, model: Any, cache: Any, mask: Tensor | None, index: Tensor) -> None:
        self._model = model
        rows, prompts = len(index), int(index.max()) + 1
        self._width = -(-rows // prompts)
        # Each group begins as one node.
        self.nodes, members = self._group(index)
        self._keys = [layer.keys[members] for layer in cache.layers]
        self._values = [layer.values[members] for layer in cache.layers]
        self._bias = None
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=self._keys[0].dtype, device=mask.device)
            self._bias = bias.masked_fill(mask == 0, float("-inf"))[members, None, None]
        self._new = Cache(layers=[_InPlaceLayer() for _ in cache.layers])
        self._seat(torch.arange(len(members), device=index.device))

    @property
    def size(self) -> int:
        return len(self._place)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        with attended_by(self._model.config):
            return _forward(self._model, tokens, positions, self._new, decoder=self)

    def keep(self, rows: Tensor) -> None:
        self._new.batch_select_indices(rows)
        group = self._group_of[rows]
        used = torch.zeros(len(self._table), dtype=torch.bool, device=rows.device)
        used[group] = True
        if int(used.sum()) <= 0.75 * len(used):  # copying the prompts' part pays only if enough of it is freed
            self._keys = [keys[used] for keys in self._keys]
            self._values = [values[used] for values in self._values]
            self._bias = None if self._bias is None else self._bias[used]
            group = (used.cumsum(0) - 1)[group]
        self._seat(group)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute softmax attention of ``query [R, H, 1, D]`` over its prompt and over ``key``, ``value [R, K, S, D]``.

        Each part has its own softmax. Their log-sum-exps, ``a`` of the prompt and ``b`` of the new tokens, combine
        them: ``out = out_b + sigmoid(a - b) * (out_a - out_b)``. Returns ``[R, 1, H, D]``.
        """
        rows, heads, _, size = query.shape
        kv_heads, (groups, width) = key.shape[1], self._table.shape
        query = (query * scaling).view(rows, kv_heads, heads // kv_heads, size)
        grouped = query[self._table].transpose(1, 2).reshape(groups, kv_heads, -1, size)
        old, old_lse = _softmax_attention(grouped, self._keys[layer], self._values[layer], self._bias)
        new, new_lse = _softmax_attention(query, key, value, None)

        def per_row(part: Tensor) -> Tensor:
            return part.view(groups, kv_heads, width, -1, part.shape[-1]).transpose(1, 2).flatten(0, 1)[self._place]

        share = torch.sigmoid(per_row(old_lse) - new_lse).to(new.dtype)
        return torch.lerp(new, per_row(old), share).view(rows, 1, heads, size)

    def _group(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Form groups of at most ``W`` rows of one prompt. Returns the group of each row, and the prompt of each group
        ``[G]``."""
        seen: dict[int, int] = {}
        groups: dict[tuple[int, int], int] = {}
        group = []
        for prompt in index.tolist():
            nth = seen[prompt] = seen.get(prompt, -1) + 1
            group.append(groups.setdefault((prompt, nth // self._width), len(groups)))
        members = torch.tensor([prompt for prompt, _ in groups], device=index.device)
        return torch.tensor(group, device=index.device), members

    def _seat(self, group: Tensor) -> None:
        """Write the table for rows that belong to ``group [R]``."""
        order = group.argsort(stable=True)
        starts = torch.searchsorted(group[order], torch.arange(len(self._keys[0]), device=group.device))
        nth = torch.empty_like(group)
        nth[order] = torch.arange(len(group), device=group.device) - starts[group[order]]
        width = int(nth.max()) + 1
        self._group_of, self._place = group, group * width + nth
        self._table = torch.zeros((len(self._keys[0]), width), dtype=torch.int64, device=group.device)
        self._table.view(-1)[self._place] = torch.arange(len(group), device=group.device)


class _InPlaceLayer(DynamicLayer):
    """A full-attention cache layer that writes in place. The library's layer copies everything for each token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self._length = 0
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
        start, end = self._length, self._length + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            rows, heads, _, size = key_states.shape
            larger = [buffer.new_empty((rows, heads, end + RESERVE, size)) for buffer in self._buffers]
            for new, old in zip(larger, self._buffers, strict=True):
                new[:, :, :start] = old[:, :, :start]
            self._buffers = larger
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self._length = end
        return self._show()

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            # One copy of whole rows, free columns included, takes less time than one of the columns in use.
            self._buffers = [buffer.index_select(0, indices) for buffer in self._buffers]
            self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self._length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


def _softmax_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of the scaled ``query [..., Q, D]``, and the log-sum-exp of its scores ``[..., Q, 1]`` float32."""
    scores = query @ key.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    # softmax = exp(score - lse), solved for lse at the largest score, where it is most exact
    lse = scores.amax(dim=-1, keepdim=True).float() - weights.amax(dim=-1, keepdim=True).log()
    return weights.to(value.dtype) @ value, lse


def _forward(model: Any, tokens: Tensor, positions: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    output = model(
        input_ids=tokens[:, None],
        position_ids=positions[:, None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **kwargs,
    )
    return output.logits[:, -1]
