"""Stage: a packed batch is cut into minibatches and micro-batches; the cut never changes the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnwise.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a :class:`TrainingBatch` as torch tensors: one stream of ``T`` tokens without padding, row by row.

    ``token_ids_T`` and ``position_ids_T`` int64 are the stream, ``lengths`` the tokens of each row, in its order.
    For each of the ``N`` packed completion tokens, ``source_N`` is the place in the stream of the token before it,
    whose hidden state predicts it; ``row_N`` is its row here, ``token_N`` its place in the batch's own stream;
    ``cu_seqlens [b+1]`` cuts the packed columns ``targets_N, rollout_logprobs_N, mask_N`` by row; ``advantages_B,
    temperatures_B, actor_ids_B`` are per row.
    """

    token_ids_T: Tensor
    position_ids_T: Tensor
    lengths: tuple[int, ...]
    source_N: Tensor
    row_N: Tensor
    token_N: Tensor
    cu_seqlens: Tensor
    targets_N: Tensor
    rollout_logprobs_N: Tensor
    mask_N: Tensor
    advantages_B: Tensor
    temperatures_B: Tensor
    actor_ids_B: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``; itself where it is there."""
        if self.token_ids_T.device == device:
            return self
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "lengths"}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


class PaddedRows(NamedTuple):
    """Rows of a micro-batch padded on the right: ``input_ids [b, T]`` and ``attention_mask [b, T]``, both int64.

    ``token [n]`` numbers those of the packed completion tokens that are in these rows; the logits that predict them
    stand at ``(row, column)``, ``[n]`` each.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token: Tensor
    row: Tensor
    column: Tensor


def minibatches(rows: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle row indices ``[B]`` and cut them into at most ``count`` parts of nearly equal size, none empty."""
    shuffled = rng.permutation(rows)
    return [part for part in np.array_split(shuffled, count) if len(part)]


def micro_batches(batch: TrainingBatch, rows: np.ndarray, max_tokens: int) -> list[MicroBatch]:
    """Cut ``rows`` into micro-batches of at most ``max_tokens`` tokens, nearly equal ones. A longer row goes alone."""
    return [pack(batch, part) for part in _balanced(np.diff(batch.cu_seqlens)[rows], rows, max_tokens)]


def _balanced(lengths: np.ndarray, rows: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """The longest first, each to the part with the fewest tokens so far; one part more until none is too full.

    The first cut that may fit is the one into ``total / max_tokens`` parts (Graham 1969, longest processing time).
    """
    order = np.argsort(-lengths, kind="stable")
    alone, order = order[lengths[order] > max_tokens], order[lengths[order] <= max_tokens]
    count = -(-int(lengths[order].sum()) // max_tokens)
    while True:
        loads = np.zeros(max(count, 1), dtype=np.int64)
        parts: list[list[int]] = [[] for _ in loads]
        for i in order:
            least = int(loads.argmin())
            loads[least] += lengths[i]
            parts[least].append(i)
        if loads.max() <= max_tokens:
            return [rows[part] for part in [*([i] for i in alone), *parts] if part]
        count += 1


def pack(batch: TrainingBatch, rows: Sequence[int] | np.ndarray) -> MicroBatch:
    """Lay ``rows`` out one after the other. The first token of a row has no log-prob, so it never trains."""
    starts, ends = batch.cu_seqlens[:-1][rows], batch.cu_seqlens[1:][rows]
    offsets = np.concatenate([[0], np.cumsum(ends - starts)])
    streams, positions, source, row, packed = [], [], [], [], []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first = start + max(1, _first_set(batch.loss_mask[start:end]))
        streams.append(np.arange(start, end))
        positions.append(np.arange(end - start))
        packed.append(np.arange(first, end))
        source.append(packed[-1] - start + offsets[i] - 1)
        row.append(np.full(len(packed[-1]), i))
    where = np.concatenate(packed)
    return MicroBatch(
        token_ids_T=torch.from_numpy(batch.token_ids[np.concatenate(streams)]),
        position_ids_T=torch.from_numpy(np.concatenate(positions)),
        lengths=tuple((ends - starts).tolist()),
        source_N=torch.from_numpy(np.concatenate(source)),
        row_N=torch.from_numpy(np.concatenate(row)),
        token_N=torch.from_numpy(where),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *map(len, packed)])),
        targets_N=torch.from_numpy(batch.token_ids[where]),
        rollout_logprobs_N=torch.from_numpy(batch.rollout_logprobs[where]),
        mask_N=torch.from_numpy(batch.loss_mask[where]),
        advantages_B=torch.from_numpy(batch.advantages[rows]),
        temperatures_B=torch.from_numpy(batch.temperatures[rows]),
        actor_ids_B=torch.from_numpy(batch.actor_index[rows]),
    )


def pad(micro: MicroBatch, rows: Sequence[int]) -> PaddedRows:
    """Those ``rows`` of a micro-batch as a padded block, for models that can't read a packed stream."""
    streams = micro.token_ids_T.split(micro.lengths)
    starts = np.cumsum([0, *micro.lengths])
    sources = micro.source_N.split(torch.diff(micro.cu_seqlens).tolist())
    firsts = micro.cu_seqlens.tolist()
    ids = [streams[i] for i in rows]
    return PaddedRows(
        input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        attention_mask=torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        token=torch.cat([torch.arange(firsts[i], firsts[i + 1]) for i in rows]),
        row=torch.cat([torch.full_like(sources[i], place) for place, i in enumerate(rows)]),
        column=torch.cat([sources[i] - int(starts[i]) for i in rows]),
    )


def _first_set(mask: np.ndarray) -> int:
    """Index of the first 1 of ``mask``, its length where there is none."""
    hits = np.flatnonzero(mask)
    return int(hits[0]) if len(hits) else len(mask)
