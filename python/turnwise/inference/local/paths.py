"""The decoder on CPUs: one matrix of keys and values per layer, where each node lists the places of its tokens.

Legend: ``R`` nodes, ``U`` prompts, ``H`` query heads, ``K`` key-value heads, ``P`` prompt columns, ``S`` new tokens so
far, ``D`` head size, ``V`` vocabulary, ``M`` places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from turnwise import _C
from turnwise.inference.local.attention import RESERVE, attended_by


class Paths:
    """Keeps the keys and values of all tokens in one matrix per layer: first the prompts', then each step's new ones.

    A node attends to its own prompt, at the places ``_begin [R]`` to ``_end [R]``. It also attends to the places in
    ``_path [R, L + S]``: the first ``L`` tokens of all prompts, and its new tokens; -1 fills the rows of nodes with
    fewer. So a node splits without a copy of keys. The places of nodes that have ended stay in use.

    ``python bench/bench_inference.py --model tiny --client transformers`` samples with its kernel and with PyTorch's
    attention (:class:`SharedPrefix`).
    """

    def __init__(self, model: Any, cache: Any, mask: Tensor | None, index: Tensor, prefix: int = 0) -> None:
        self._model = model
        prompts, _, width, _ = cache.layers[0].keys.shape
        self.nodes = index  # each prompt begins as one node
        self._end = torch.arange(1, prompts + 1) * width
        self._begin = self._end - (width if mask is None else mask.sum(dim=1)) + prefix
        self._path = torch.arange(prefix).repeat(prompts, 1)
        self._packed_width = prefix
        spare = len(index) * RESERVE
        self._layers = [_Places(layer.keys, layer.values, spare) for layer in cache.layers]
        self._cache = Cache(layers=list(self._layers))

    @property
    def size(self) -> int:
        return len(self._path)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.step_runs(tokens, positions, torch.ones_like(tokens))

    def step_runs(self, tokens: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
        """Append to each node its run of ``counts [R]`` tokens, at least one, in one pass.

        ``tokens`` and ``positions`` ``[sum(counts)]`` have the runs one after the other. Returns the logits
        ``[R, V]`` after each run.
        """
        used, single = self._layers[0].used, len(tokens) == len(counts)
        places, last = torch.arange(used, used + len(tokens)), counts.cumsum(0) - 1
        if single:
            self._path = torch.cat([self._path, places[:, None]], dim=1)
            self._attended = self._begin, self._end, self._path
        else:
            node = torch.repeat_interleave(counts)
            nth = torch.arange(len(tokens)) - (last - counts + 1)[node]
            own = torch.full((len(counts), int(counts.max())), -1)
            own[node, nth] = places
            # A token attends to those of its run up to itself.
            seen = torch.where(torch.arange(own.shape[1]) <= nth[:, None], own[node], -1)
            self._attended = self._begin[node], self._end[node], torch.cat([self._path[node], seen], dim=1)
            self._path = self._packed(torch.cat([self._path, own], dim=1))
        shape = (-1, 1) if single else (1, -1)  # one sequence can give the logits of some positions alone
        with attended_by(self._model.config):
            output = self._model(
                input_ids=tokens.view(shape),
                position_ids=positions.view(shape),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1 if single else last,
                decoder=self,
            )
        return output.logits.flatten(0, 1)

    def _packed(self, path: Tensor) -> Tensor:
        """Return ``path`` with the places of each node in front, once it has twice the columns that it needs."""
        if path.shape[1] < 2 * self._packed_width + 64:
            return path
        longest = self._packed_width = int((path >= 0).sum(dim=1).max())
        return path.gather(1, (path < 0).long().argsort(dim=1, stable=True)[:, :longest])

    def keep(self, rows: Tensor) -> None:
        self._begin, self._end, self._path = self._begin[rows], self._end[rows], self._path[rows]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute softmax attention of ``query [B, H, Q, D]``, for ``B * Q`` new tokens. Returns ``[B, Q, H, D]``."""
        sequences, heads, length, size = query.shape
        keys, values = self._layers[layer].rows()
        query = query.transpose(1, 2).reshape(-1, heads * size)
        out = torch.empty_like(query)
        threads = torch.get_num_threads()
        _C.path_attention(query, keys, values, *self._attended, heads, key.shape[1], scaling, out, threads)
        return out.view(sequences, length, heads, size)


class _Places(DynamicLayer):
    """Keys and values ``[U, K, P, D]`` of one layer as rows ``[M, K * D]``, with room for ``spare`` new ones at first.
    They grow by half when they are full."""

    def __init__(self, keys: Tensor, values: Tensor, spare: int) -> None:
        super().__init__()
        prompts, heads, self.steps, size = keys.shape
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.used = prompts * self.steps
        self._buffers = [keys.new_empty((self.used + spare, heads * size)) for _ in range(2)]
        for buffer, states in zip(self._buffers, (keys, values), strict=True):
            buffer[: self.used].view(prompts, self.steps, heads, size).copy_(states.transpose(1, 2))

    def rows(self) -> tuple[Tensor, Tensor]:
        keys, values = self._buffers
        return keys[: self.used], values[: self.used]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self.used = self.used, self.used + key_states.shape[0] * key_states.shape[2]
        self.steps += 1
        if self.used > len(self._buffers[0]):
            size = max(self.used, len(self._buffers[0]) * 3 // 2)
            self._buffers = [torch.cat([b, b.new_empty((size - len(b), b.shape[1]))]) for b in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[start : self.used].view(states.transpose(1, 2).shape).copy_(states.transpose(1, 2))
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.steps
