"""Cuts a packed batch into minibatches and micro-batches, and gives these to the ranks that train a policy together.

The cut into micro-batches never changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.train.model.prefix_tree import PrefixTree, ranges
from turnwise.train.model.prefix_tree_attention import PrefixTreeMask
from turnwise.types import AllowedTokens, Column, TokenColumn, TrainingBatch
from turnwise.types.columns import ALLOWED, TOKEN_ADVANTAGES, Places, Stream
from turnwise.utils.memory import is_out_of_memory

T = TypeVar("T")

_PADDING = 1.25  # most positions per token in a block of padded rows


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a :class:`TrainingBatch` as torch tensors: one stream of ``T`` tokens without padding.

    ``token_ids_T`` and ``position_ids_T`` (int64) are the stream, ``lengths`` the tokens of each row. Rows follow one
    another, or with a ``tree`` form its branches, so that a shared prefix is in the stream once.
    For each of the ``N`` packed completion tokens, ``source_N`` is the stream's position of the token before it, whose
    hidden state predicts it. ``row_N`` is its row here, ``token_N`` its place among the batch's ``targets``.
    ``cu_seqlens [b+1]`` cuts the packed columns ``targets_N, rollout_logprobs_N, mask_N`` by row; ``advantages_B,
    temperatures_B, actor_ids_B`` are per row. ``columns`` are those of the batch, each cut and laid out by its kind
    (:class:`~turnwise.types.Column`). Tokens that a column reads too are among the ``N``; ``mask_N`` is 0 there.
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
    columns: Mapping[str, Column] = field(default_factory=dict)

    @property
    def advantages_N(self) -> Tensor:
        """Advantage of each token: its row's, and its own if it has one."""
        own, of_rows_N = self.columns.get(TOKEN_ADVANTAGES), self.advantages_B[self.row_N]
        return of_rows_N + own.values if isinstance(own, TokenColumn) else of_rows_N

    @property
    def temperatures_N(self) -> Tensor:
        """Temperature of each token: its row's, or 1 if that is 0, unless a column changes it."""
        temperature_N = self.temperatures_B[self.row_N]
        for column in self.columns.values():
            temperature_N = column.temperatures(temperature_N)
        return torch.where(temperature_N > 0, temperature_N, 1.0)

    @property
    def allowed(self) -> AllowedTokens | None:
        """The tokens that grammars allowed at each of the ``N``; ``None`` without any grammar."""
        allowed = self.columns.get(ALLOWED)
        assert allowed is None or isinstance(allowed, AllowedTokens)
        return allowed

    @property
    def num_tokens(self) -> int:
        """Number of tokens that pass through the model; tokens that rows share count once."""
        return self.token_ids_T.numel()

    def for_another_model(self) -> MicroBatch:
        """Return the micro-batch for a pass of another model than the one that sampled its rows."""
        return replace(self, columns={name: each for name, each in self.columns.items() if not each.of_sampler})

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on ``device``, or itself if it is already there."""
        if self.token_ids_T.device == device:
            return self
        values = {each.name: getattr(self, each.name) for each in fields(self)}

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        moved: dict[str, Any] = {name: move(x) for name, x in values.items() if isinstance(x, Tensor)}
        columns = {name: column.mapped(move) for name, column in self.columns.items()}
        return replace(self, **moved, columns=columns)


class PaddedRows(NamedTuple):
    """Rows of a micro-batch padded on the right: ``input_ids [b, T]`` and ``attention_mask [b, T]``, both int64.

    ``token [n]`` are the indices of these rows' tokens among the packed completion tokens. The logits that predict them
    are at ``(row, column)``, ``[n]`` each. ``place [b * T]`` are the positions in the stream, -1 for padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token: Tensor
    row: Tensor
    column: Tensor
    place: Tensor


def minibatches(batch: TrainingBatch, rows: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle ``rows [B]`` and cut them into ``count`` parts of nearly equal size, or fewer, none empty.

    Rows with the same prompt, such as siblings of a tree, stay together unless there are fewer prompts than parts.
    """
    families = _families(batch, rows)
    shuffled = [families[i] for i in rng.permutation(len(families))]
    if not shuffled:
        return []
    ordered = np.concatenate(shuffled)
    if len(shuffled) < count:
        return [part for part in np.array_split(rng.permutation(ordered), count) if len(part)]
    # Cut between families, each time at the end that is nearest to an equal share of the rows.
    ends = np.cumsum([len(family) for family in shuffled])
    cuts: list[int] = []
    for part in range(1, count):
        nearest = int(np.abs(ends - len(rows) * part / count).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1 if cuts else 0), len(ends) - 1 - count + part))
    return np.split(ordered, ends[cuts])


def _families(batch: TrainingBatch, rows: np.ndarray) -> list[np.ndarray]:
    """Group ``rows`` by prompt."""
    families: dict[bytes, list[int]] = {}
    for row in rows.tolist():
        start, end = batch.cu_targets[row], batch.cu_targets[row + 1]
        rest = batch.targets[start : start + _first_set(batch.target_mask[start:end])]
        prompt = blake2b(batch.contexts[row].whole(), digest_size=16)
        prompt.update(rest.astype(np.int32).tobytes())
        families.setdefault(prompt.digest(), []).append(row)
    return [np.array(family) for family in families.values()]


def micro_batches(
    batch: TrainingBatch, rows: np.ndarray, max_tokens: int, *, trie_share: float = 0.0, blocks: bool = False
) -> list[MicroBatch]:
    """Cut ``rows`` into nearly equal micro-batches of at most ``max_tokens`` tokens.

    A longer row is a micro-batch by itself.
    If a trie of the rows has at most ``trie_share`` of their tokens, the micro-batches are tries of at most
    ``max_tokens`` unique tokens, and rows that share long prefixes stay together. The tries lack the rows' last tokens.
    With ``blocks`` the rows of each micro-batch fit into one block of padded rows (:func:`like_lengths`).
    """
    if trie_share:
        stream, starts, ends = batch.overlapping(rows)

        def trie_of(part: np.ndarray) -> PrefixTree:
            return PrefixTree.of_places(stream, starts[part], ends[part], last=False)

        whole = np.arange(len(rows))
        trie = trie_of(whole)
        if len(trie) <= trie_share * trie.num_tokens:
            return [pack(batch, rows[part], trie=t) for part, t in _parts(whole, trie, trie_of, max_tokens)]
    lengths = batch.lengths
    parts = _balanced(lengths[rows], rows, max_tokens)
    if blocks:
        parts = [part[group] for part in parts for group in like_lengths(tuple(lengths[part].tolist()))]
    return [pack(batch, part) for part in parts]


def _parts(
    rows: np.ndarray, trie: PrefixTree, trie_of: Callable[[np.ndarray], PrefixTree], max_tokens: int
) -> list[tuple[np.ndarray, PrefixTree]]:
    """Cut ``rows`` into parts whose tries fit. A part's trie may share less than the whole one, so parts are cut again
    until they fit."""
    cut = [rows[part] for part in trie.cut(max_tokens)]
    if len(cut) <= 1:
        return [(rows, trie)] if cut else []
    return [fit for part in cut for fit in _parts(part, trie_of(part), trie_of, max_tokens)]


def _balanced(lengths: np.ndarray, rows: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Assign rows, the longest first, to the part with the fewest tokens so far (Graham 1969, longest processing time).

    It starts with ``total / max_tokens`` parts, and adds a part until none has more than ``max_tokens`` tokens.
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
    """Lay out ``rows`` one after the other, or as their ``trie``. The first token of a row has no log-prob, so it never
    trains."""
    # The targets of each row from the first that is read on: their count, and their places among the batch's targets.
    starts, ends = batch.cu_targets[:-1][rows], batch.cu_targets[1:][rows]
    lengths = batch.lengths[rows]
    read = batch.target_mask
    for column in batch.columns.values():
        read = column.read(read)
    skipped = np.array([_first_set(read[start:end]) for start, end in zip(starts, ends, strict=True)], dtype=np.int64)
    firsts = np.minimum(np.maximum(lengths - (ends - starts) + skipped, 1), lengths)
    counts = lengths - firsts
    where = ranges(ends - counts, counts)
    # The stream, and in it the place before each completion token.
    tree = None
    if trie is not None:
        tree, token_ids, position_ids = trie.tree(), trie.token_ids, trie.position_ids
        source = trie.places(np.maximum(firsts - 1, 0), counts)
    else:
        token_ids = torch.from_numpy(batch.tokens_of(rows))
        position_ids = torch.from_numpy(ranges(np.zeros_like(lengths), lengths))
        source = torch.from_numpy(ranges(np.cumsum(lengths) - lengths + firsts - 1, counts))

    def places(counts: np.ndarray) -> np.ndarray:
        if trie is None:
            return ranges(np.cumsum(lengths) - lengths, counts)
        return trie.places(np.zeros_like(counts), counts).numpy()

    stream, chosen = Stream(lengths, len(token_ids), places), Places(rows, where)
    columns = {name: column.select(chosen).lay_out(stream) for name, column in batch.columns.items()}
    return MicroBatch(
        token_ids_T=token_ids,
        position_ids_T=position_ids,
        lengths=tuple(lengths.tolist()),
        tree=tree,
        source_N=source,
        row_N=torch.from_numpy(np.repeat(np.arange(len(lengths)), counts)),
        token_N=torch.from_numpy(where),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        targets_N=torch.from_numpy(batch.targets[where]),
        rollout_logprobs_N=torch.from_numpy(batch.target_logprobs[where]),
        mask_N=torch.from_numpy(batch.target_mask[where]),
        advantages_B=torch.from_numpy(batch.advantages[rows]),
        temperatures_B=torch.from_numpy(batch.temperatures[rows]),
        actor_ids_B=torch.from_numpy(batch.actor_index[rows]),
        columns={name: each.mapped(torch.from_numpy) for name, each in columns.items() if each is not None},
    )


def trial(vocabulary: int, length: int, device: torch.device) -> MicroBatch:
    """Make two rows of ``length`` tokens, whose second halves are read."""
    count, half = 2 * length, length // 2
    ids = torch.arange(1, count + 1) * 7919 % vocabulary
    row = torch.arange(2).repeat_interleave(half)
    token = torch.cat([torch.arange(start + length - half, start + length) for start in (0, length)])
    blank = torch.zeros(2 * half)
    return MicroBatch(
        token_ids_T=ids,
        position_ids_T=torch.arange(length).repeat(2),
        lengths=(length, length),
        tree=None,
        source_N=token - 1,
        row_N=row,
        token_N=token,
        cu_seqlens=torch.tensor([0, half, 2 * half]),
        targets_N=ids[token],
        rollout_logprobs_N=blank,
        mask_N=blank,
        advantages_B=torch.zeros(2),
        temperatures_B=torch.ones(2),
        actor_ids_B=torch.zeros(2, dtype=torch.int64),
    ).to(device)


@contextmanager
def explain_out_of_memory(micro: MicroBatch) -> Iterator[None]:
    """Add to an out-of-memory error which rows didn't fit, and how to make them fit.

    Raises ``MemoryError``, or torch's ``OutOfMemoryError`` if the block raised that.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else MemoryError
        longest = max(micro.lengths)
        many = "lower update.micro_batch_tokens, or " if len(micro.lengths) > 1 else ""
        raise kind(
            f"a micro-batch of {micro.num_tokens} tokens doesn't fit the memory; its longest row has {longest}: {many}"
            "set gradient_checkpointing, or limit rows with rollout.max_tokens. More ranks shard the weights, but no "
            f"row: torch's context parallelism doesn't take packed rows or tries ({error})"
        ) from error


def joined_cu_seqlens(micros: Sequence[MicroBatch]) -> Tensor:
    """Return the boundaries of the rows of all ``micros``, joined in their order."""
    lengths = torch.cat([torch.diff(micro.cu_seqlens) for micro in micros])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def smallest(micros: Sequence[MicroBatch]) -> MicroBatch:
    """Return the micro-batch with the fewest tokens: the one for a pass that must not count."""
    return min(micros, key=lambda micro: micro.num_tokens)


def pad(micro: MicroBatch, rows: Sequence[int]) -> PaddedRows:
    """Return ``rows`` of a micro-batch as a padded block, for models that can't read a packed stream."""
    streams = micro.token_ids_T.split(micro.lengths)
    starts = np.cumsum([0, *micro.lengths])
    sources = micro.source_N.split(torch.diff(micro.cu_seqlens).tolist())
    firsts = micro.cu_seqlens.tolist()
    ids = [streams[i] for i in rows]
    places = [torch.arange(starts[i], starts[i + 1]) for i in rows]
    return PaddedRows(
        input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        attention_mask=torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        token=torch.cat([torch.arange(firsts[i], firsts[i + 1]) for i in rows]),
        row=torch.cat([torch.full_like(sources[i], row) for row, i in enumerate(rows)]),
        column=torch.cat([sources[i] - int(starts[i]) for i in rows]),
        place=torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1).flatten(),
    )


def like_lengths(lengths: tuple[int, ...]) -> list[list[int]]:
    """Group row indices by similar length: a padded block of a group has at most 1.25 positions per token."""
    groups: list[list[int]] = []
    total = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= _PADDING * (total + lengths[row]):
            groups[-1].append(row)
            total += lengths[row]
        else:
            groups.append([row])
            total = lengths[row]
    return groups


def _first_set(mask: np.ndarray) -> int:
    """Return the index of the first 1 in ``mask``, or its length if there is none."""
    hits = np.flatnonzero(mask)
    return int(hits[0]) if len(hits) else len(mask)


# -- The processes that train one policy together ----------------------------------------------------------------------
class SingleRank:
    """The only process that trains a policy."""

    rank, size = 0, 1
    device: torch.device | None = None
    """Device of the forward pass; by default that of the weights."""
    first_copy = True
    """True if this rank's shards are of the first copy of the weights: only these count in sums over shards."""

    def indices(self, count: int) -> Sequence[int | None]:
        """Return the indices of this rank's micro-batches among ``count``; ``None`` for a pass that must not count.

        All ranks get equally many, because they make each pass of a sharded model together.
        """
        return range(count)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over all ranks, the same bits on each."""
        return tensor

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all ranks in the order of :meth:`indices`."""
        return items


class Ranks(SingleRank):
    """The processes of ``group``; micro-batch ``i`` belongs to rank ``i % size``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, first_copy: bool = True) -> None:
        self.group, self.device, self.first_copy = group, device, first_copy
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def indices(self, count: int) -> Sequence[int | None]:
        indices: list[int | None] = list(range(self.rank, count, self.size))
        return indices + [None] * (-(-count // self.size) - len(indices))

    def total(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts).sum(0)

    def gather(self, items: list[T]) -> list[T]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, items, group=self.group)
        longest = max(len(each) for each in gathered)
        return [each[i] for i in range(longest) for each in gathered if i < len(each)]


SINGLE_RANK = SingleRank()
