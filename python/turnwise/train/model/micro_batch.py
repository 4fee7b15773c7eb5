"""Stage: a packed batch is cut into minibatches and micro-batches; the cut never changes the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnwise.train.model.prefix_tree import PrefixTree, ranges
from turnwise.train.model.prefix_tree_attention import PrefixTreeMask
from turnwise.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a :class:`TrainingBatch` as torch tensors: one stream of ``T`` tokens without padding.

    ``token_ids_T`` and ``position_ids_T`` int64 are the stream, ``lengths`` the tokens of each row. They stand in it
    row by row, or with a ``tree`` as its branches, so that what rows begin with in common stands there once.
    For each of the ``N`` packed completion tokens, ``source_N`` is the place in the stream of the token before it,
    whose hidden state predicts it; ``row_N`` is its row here, ``token_N`` its place in the batch's own stream;
    ``cu_seqlens [b+1]`` cuts the packed columns ``targets_N, rollout_logprobs_N, mask_N`` by row; ``advantages_B,
    temperatures_B, actor_ids_B`` are per row.
    """

    token_ids_T: Tensor
    position_ids_T: Tensor
    lengths: tuple[int, ...]
    tree: PrefixTreeMask | None
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
        """Tokens that pass through the model, those that rows share once."""
        return self.token_ids_T.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``; itself where it is there."""
        if self.token_ids_T.device == device:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: x.to(device, non_blocking=True) for name, x in values.items() if isinstance(x, Tensor)}
        return MicroBatch(**values | moved)


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


def minibatches(batch: TrainingBatch, rows: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle ``rows [B]`` and cut them into ``count`` parts of nearly equal size, or fewer, none empty.

    Rows with one prompt, the siblings of a tree, stay together, unless there are fewer prompts than parts.
    """
    families = _families(batch, rows)
    shuffled = [families[i] for i in rng.permutation(len(families))]
    if not shuffled:
        return []
    ordered = np.concatenate(shuffled)
    if len(shuffled) < count:
        return [part for part in np.array_split(rng.permutation(ordered), count) if len(part)]
    ends = np.cumsum([len(family) for family in shuffled])
    cuts: list[int] = []
    for part in range(1, count):
        nearest = int(np.abs(ends - len(rows) * part / count).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1 if cuts else 0), len(ends) - 1 - count + part))
    return np.split(ordered, ends[cuts])


def _families(batch: TrainingBatch, rows: np.ndarray) -> list[np.ndarray]:
    """``rows``, those of one prompt together."""
    families: dict[bytes, list[int]] = {}
    for row in rows.tolist():
        start, end = batch.cu_seqlens[row], batch.cu_seqlens[row + 1]
        prompt = batch.token_ids[start : start + _first_set(batch.loss_mask[start:end])]
        families.setdefault(prompt.tobytes(), []).append(row)
    return [np.array(family) for family in families.values()]


def micro_batches(
    batch: TrainingBatch, rows: np.ndarray, max_tokens: int, *, trie_share: float = 0.0
) -> list[MicroBatch]:
    """Cut ``rows`` into micro-batches of at most ``max_tokens`` tokens, nearly equal ones. A longer row goes alone.

    Where a trie of the rows has at most ``trie_share`` of their tokens, micro-batches are tries, of at most
    ``max_tokens`` unique tokens, and rows that share much stay together.
    """
    if trie_share:
        trie = PrefixTree(batch.token_ids, batch.cu_seqlens, rows)
        if len(trie) <= trie_share * trie.num_tokens:
            return [pack(batch, part, trie=its) for part, its in _parts(batch, rows, trie, max_tokens)]
    return [pack(batch, part) for part in _balanced(np.diff(batch.cu_seqlens)[rows], rows, max_tokens)]


def _parts(
    batch: TrainingBatch, rows: np.ndarray, trie: PrefixTree, max_tokens: int
) -> list[tuple[np.ndarray, PrefixTree]]:
    """``rows`` in parts whose tries fit. A part that gives up sharing which no longer pays in it may be cut again."""
    cut = [rows[part] for part in trie.cut(max_tokens)]
    if len(cut) <= 1:
        return [(rows, trie)] if cut else []
    return [
        fit
        for part in cut
        for fit in _parts(batch, part, PrefixTree(batch.token_ids, batch.cu_seqlens, part), max_tokens)
    ]


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


def pack(batch: TrainingBatch, rows: np.ndarray, *, trie: PrefixTree | None = None) -> MicroBatch:
    """Lay ``rows`` out one after the other, or as the ``trie`` of them. The first token of a row has no log-prob, so it
    never trains."""
    starts, ends = batch.cu_seqlens[:-1][rows], batch.cu_seqlens[1:][rows]
    lengths = ends - starts
    first = [max(1, _first_set(batch.loss_mask[start:end])) for start, end in zip(starts, ends, strict=True)]
    firsts = np.minimum(np.array(first, dtype=np.int64), lengths)
    counts = lengths - firsts
    where = ranges(starts + firsts, counts)
    tree = None
    if trie is not None:
        tree, token_ids, position_ids = trie.tree(), trie.token_ids, trie.position_ids
        source = trie.places(np.maximum(firsts - 1, 0), counts)
    else:
        begins = np.cumsum(lengths) - lengths
        token_ids = torch.from_numpy(batch.token_ids[ranges(starts, lengths)])
        position_ids = torch.from_numpy(ranges(np.zeros_like(lengths), lengths))
        source = torch.from_numpy(ranges(begins + firsts - 1, counts))
    return MicroBatch(
        token_ids_T=token_ids,
        position_ids_T=position_ids,
        lengths=tuple(lengths.tolist()),
        tree=tree,
        source_N=source,
        row_N=torch.from_numpy(np.repeat(np.arange(len(lengths)), counts)),
        token_N=torch.from_numpy(where),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        targets_N=torch.from_numpy(batch.token_ids[where]),
        rollout_logprobs_N=torch.from_numpy(batch.rollout_logprobs[where]),
        mask_N=torch.from_numpy(batch.loss_mask[where]),
        advantages_B=torch.from_numpy(batch.advantages[rows]),
        temperatures_B=torch.from_numpy(batch.temperatures[rows]),
        actor_ids_B=torch.from_numpy(batch.actor_index[rows]),
    )


def pad(micro: MicroBatch, rows: Sequence[int]) -> PaddedRows:
    """Return ``rows`` of a micro-batch as a padded block, for models that can't read a packed stream."""
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
