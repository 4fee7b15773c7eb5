"""Complete one batch of prompts with a Hugging Face causal model: prefill each distinct prompt once, then decode.

The module has its own decode loop, because ``model.generate(past_key_values=...)`` copies the whole cache for every
token, repeats the prompts' part for every sibling, and computes finished rows until the last one is done. Here each row
also has its own seed, temperature and limit.

Siblings that have drawn equal tokens so far have equal keys, values and logits. They are one *node* of the decoder,
which computes them once, until they draw different tokens and the node splits. A policy that is nearly sure of its
answer thus decodes little more than one answer per prompt.

Legend: ``R`` rows, ``N`` nodes, ``U`` distinct prompts, ``P`` prompt columns, ``T`` new tokens at most, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.inference.common.hf_model import token_rows
from turnwise.inference.common.routed_experts import Routers, recording
from turnwise.inference.local.kv_cache import SHARED_PREFIX_MODELS, Decoder, Paths, Uncached, make_decoder
from turnwise.inference.local.prefill import common_prefix, prefill
from turnwise.inference.local.sampling import RowGrammars, RowSampler
from turnwise.types import FinishReason, Sampling, SamplingMask

_PACK_BELOW = 0.9
"""Finished rows leave the batch once less than this share of its rows is still running."""


@dataclass(slots=True)
class SequenceSpec:
    """One completion to sample: at most ``limit`` tokens. It ends early with one of ``stop_ids``, or once ``stopped``
    is true of its tokens."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    limit: int
    stop_ids: tuple[int, ...]
    stopped: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Positions that passed through the model: of prompts, and of completions. Each distinct prefix counts once."""

    prefilled: int
    decoded: int


@dataclass(slots=True)
class Completion:
    """The tokens of one row (including the stop token), their log-probabilities and weight versions.

    ``experts`` are those of the prompt and of all but the last token, ``[P + C - 1, layers, K]``, if recorded.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: list[int]
    experts: np.ndarray | None = None
    sampling_mask: SamplingMask | None = None
    """Of rows whose sampling leaves tokens out."""
    dead_end: bool = False
    """Its grammar allows no further token, although it is not complete."""


def complete(
    model: Any,
    rows: Sequence[SequenceSpec],
    device: torch.device,
    abandoned: Callable[[], Sequence[int]] = tuple,
    forward_lock: AbstractContextManager[int] | None = None,
    *,
    cached: bool = True,
    tokenizer: Any = None,
    routers: Routers | None = None,
) -> tuple[list[Completion], Work]:
    """Complete ``rows`` with ``model`` in evaluation mode. Returns the completions in order.

    After each token, ``abandoned()`` returns the rows without a caller; they stop with ``"abort"``. Each forward pass
    enters ``forward_lock``, which returns the version of the weights. The weights may change between two passes. The
    second result counts the computed positions. Without ``cached`` each token passes its whole sequence through.
    Rows with a grammar need the ``tokenizer``. Completions have the experts that ``routers`` choose; this needs
    ``cached``.
    """
    forward_lock = forward_lock or nullcontext(0)
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    number = {prompt: index for index, prompt in enumerate(prompts)}
    index = torch.tensor([number[row.prompt] for row in rows], device=device)
    assert routers is None or (cached and model.config.model_type not in SHARED_PREFIX_MODELS), "a plain mixture"
    with forward_lock as version, recording(routers) as record:
        prefix = common_prefix(prompts) if model.config.model_type in SHARED_PREFIX_MODELS else 0
        decoder: Decoder
        if cached:
            logits, cache, mask = prefill(model, prompts, prefix, device)
            decoder = make_decoder(model, cache, mask, index, prefix)
        else:
            decoder = Uncached(model, prompts, index)
            logits = decoder.next_logits()
    logits = logits[index, : token_rows(model)]
    grammars = RowGrammars.of([row.sampling.grammar for row in rows], tokenizer, logits.shape[1])
    of_prompts = [] if record is None else _of_prompts(record.take().cpu().numpy(), prompts)
    drawn = _decode(decoder, rows, logits, version, abandoned, forward_lock, grammars, routers)
    prefilled = sum(map(len, prompts)) - prefix * (len(prompts) - 1)
    completions = drawn.completions()
    for completion, kept in zip(completions, drawn.sampling_masks(), strict=True):
        completion.sampling_mask = kept
    if routers is not None:
        for place, (row, completion) in enumerate(zip(rows, completions, strict=True)):
            if completion.token_ids:
                new = [step[place, None] for step in drawn.experts[: len(completion.token_ids) - 1]]
                completion.experts = np.concatenate([of_prompts[number[row.prompt]], *new])
    return completions, Work(prefilled, drawn.decoded)


def _of_prompts(experts: np.ndarray, prompts: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Cut the experts ``[U * P, layers, K]`` of a prefill by prompt, without its padding on the left."""
    by_prompt = experts.reshape(len(prompts), -1, *experts.shape[1:])
    return [each[each.shape[0] - len(prompt) :] for each, prompt in zip(by_prompt, prompts, strict=True)]


class _Drawn:
    """What was drawn for ``R`` rows of at most ``T`` tokens, and how they ended.

    ``tokens`` int64 and ``logprobs`` float32 are ``[R, T + 1]``: rows that have ended write into the last column.
    ``counts [R]`` is the number of tokens of each row.
    """

    def __init__(self, rows: Sequence[SequenceSpec], device: torch.device) -> None:
        self.rows, self.width = rows, max(row.limit for row in rows)
        self.tokens = torch.zeros((len(rows), self.width + 1), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros((len(rows), self.width + 1), device=device)
        self.counts = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.versions: list[tuple[int, list[int]]] = []
        """Versions of the weights, and the first token of each row that each gave."""
        self._watches = any(row.stopped is not None for row in rows)
        self.aborted: set[int] = set()
        self.stopped: set[int] = set()
        """The rows that a stop string ended."""
        self.dead_ends: set[int] = set()
        """The rows that their grammar led nowhere."""
        self.decoded = 0
        """Positions that passed through the model."""
        self.experts: list[np.ndarray] = []
        """Experts ``[R, layers, K]`` of each pass, 0 for rows that had left; empty if they aren't recorded."""
        self.sampler = RowSampler.build(
            [row.sampling for row in rows], [row.seed for row in rows], self.width + 1, device
        )

    def alive(self) -> _Alive:
        """Return all rows, before their first token."""
        rows, device = self.rows, self.tokens.device
        stop_width = max(1, max(len(row.stop_ids) for row in rows))
        stops = [[*row.stop_ids, *([-1] * (stop_width - len(row.stop_ids)))] for row in rows]  # -1 is no token id
        return _Alive(
            rows=torch.arange(len(rows), device=device),
            going=torch.ones(len(rows), dtype=torch.bool, device=device),
            count=torch.zeros(len(rows), dtype=torch.int64, device=device),
            length=torch.tensor([len(row.prompt) for row in rows], device=device),
            limit=torch.tensor([row.limit for row in rows], device=device),
            stops=torch.tensor(stops, device=device),
        )

    def add(self, alive: _Alive, tokens: Tensor, logprobs: Tensor, version: int) -> None:
        """Write the next token of each row that is going. It ends at a stop token, with a stop string or at its limit.

        ``version`` belongs to the weights that gave it.
        """
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, self.counts.tolist()))
        at = alive.rows * (self.width + 1) + torch.where(alive.going, alive.count, self.width)
        self.tokens.view(-1).index_copy_(0, at, tokens)
        self.logprobs.view(-1).index_copy_(0, at, logprobs)
        self._grow(alive, alive.count + alive.going)
        going = alive.going & (tokens[:, None] != alive.stops).all(dim=1)
        if self._watches:
            for place in going.nonzero()[:, 0].tolist():
                row = int(alive.rows[place])
                if self._is_stopped(row, self.tokens[row, : int(alive.count[place])].tolist()):
                    going[place] = False
        alive.going = going & (alive.count < alive.limit)

    def add_runs(self, alive: _Alive, runs: Mapping[int, Sequence[int]]) -> list[int]:
        """Write the forced tokens of each row in ``runs``, up to one that ends the row. Return the rows that end."""
        places, tokens, ended, added = [], [], [], [0] * len(alive.rows)
        for place, (row, count) in enumerate(zip(alive.rows.tolist(), alive.count.tolist(), strict=True)):
            spec, run = self.rows[row], runs.get(row, ())
            before = self.tokens[row, :count].tolist() if run and spec.stopped is not None else []
            for nth, token in enumerate(run, 1):
                places.append(row * (self.width + 1) + count + nth - 1)
                tokens.append(token)
                added[place] = nth
                if self._is_stopped(row, [*before, *run[:nth]]) or token in spec.stop_ids or count + nth == spec.limit:
                    ended.append(row)
                    break
        device = self.tokens.device
        self.tokens.view(-1)[torch.tensor(places, device=device)] = torch.tensor(tokens, device=device)
        self._grow(alive, alive.count + torch.tensor(added, device=device))
        return ended

    def _grow(self, alive: _Alive, count: Tensor) -> None:
        alive.count = count
        self.counts.index_copy_(0, alive.rows, count)

    def _is_stopped(self, row: int, tokens: Sequence[int]) -> bool:
        stopped = self.rows[row].stopped
        if stopped is None or not stopped(tokens):
            return False
        self.stopped.add(row)
        return True

    def completions(self) -> list[Completion]:
        """Return the completions of all rows."""
        counts = self.counts.tolist()
        ends = [first for _, first in self.versions[1:]] + [counts]
        completions = []
        for row, (ids, logprobs) in enumerate(zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)):
            if row in self.aborted:
                completions.append(Completion([], [], "abort", []))
                continue
            count, stop_ids = counts[row], self.rows[row].stop_ids
            versions: list[int] = []
            for (version, first), end in zip(self.versions, ends, strict=True):
                versions += [version] * (end[row] - first[row])
            reason: FinishReason = "stop" if row in self.stopped or ids[count - 1] in stop_ids else "length"
            completion = Completion(ids[:count], logprobs[:count], reason, versions, dead_end=row in self.dead_ends)
            completions.append(completion)
        return completions

    def sampling_masks(self) -> list[SamplingMask | None]:
        """Return the kept tokens of each row; ``None`` for rows whose sampling leaves none out."""
        if not self.sampler.kept:
            return [None] * len(self.rows)
        row, at, count, ids = (torch.cat(each).cpu().numpy() for each in zip(*self.sampler.kept, strict=True))
        ends, masks = count.cumsum(), list[SamplingMask | None]()
        for number, length in enumerate(self.counts.tolist()):
            if not self.rows[number].sampling.cut or number in self.aborted:
                masks.append(None)
                continue
            own = np.flatnonzero((row == number) & (at < length))  # a row that has ended may be drawn again
            counts = np.zeros(length, dtype=np.int64)  # tokens that a grammar forces are not drawn
            counts[at[own]] = count[own]
            kept = [ids[ends[each] - count[each] : ends[each]] for each in own[at[own].argsort()]]
            masks.append(SamplingMask(counts, np.concatenate([*kept, ids[:0]])))
        return masks


@dataclass(slots=True)
class _Alive:
    """The rows in the decoder, as columns of ``r`` rows: their numbers, those that have not ended, their tokens so far,
    the lengths of their prompts, their limits, and their stop tokens ``[r, S]``."""

    rows: Tensor
    going: Tensor
    count: Tensor
    length: Tensor
    limit: Tensor
    stops: Tensor

    def take(self, index: Tensor) -> _Alive:
        return _Alive(*(getattr(self, column)[index] for column in self.__slots__))


def _decode(
    decoder: Decoder,
    rows: Sequence[SequenceSpec],
    logits: Tensor,
    version: int,
    abandoned: Callable[[], Sequence[int]],
    forward_lock: AbstractContextManager[int],
    grammars: RowGrammars | None,
    routers: Routers | None,
) -> _Drawn:
    """Draw and decode until every row has ended. ``version`` belongs to the weights that gave ``logits [R, V]``.

    In the loop, ``node`` is the node of each row that is alive; ``None`` once each has a node of its own, in the same
    order. ``begin`` counts the tokens of each row before this turn, which adds one, or several that a grammar forces.
    """
    drawn, vocabulary = _Drawn(rows, logits.device), logits.shape[1]
    alive, sampler = drawn.alive(), drawn.sampler
    node: Tensor | None = decoder.nodes
    paths = decoder if isinstance(decoder, Paths) and grammars is not None else None  # takes runs of tokens
    while True:
        begin = alive.count
        if grammars is None:
            tokens, logprobs = sampler.draw(logits, alive.rows, begin)
            drawn.add(alive, tokens, logprobs, version)
        else:
            tokens, logprobs = grammars.draw(sampler, logits, alive.rows, begin)
            drawn.add(alive, tokens, logprobs, version)
            stuck = grammars.accept(alive.rows, tokens, alive.going)
            ended: list[int] = []
            if paths is not None:
                runs, behind = grammars.take_runs(alive.rows, alive.going)
                ended = drawn.add_runs(alive, runs) if runs else []
                stuck += [row for row in behind if row not in ended]
            drawn.dead_ends.update(filter(grammars.in_dead_end, stuck))
            ended += stuck
            if ended:
                alive.going &= ~torch.isin(alive.rows, torch.tensor(ended, device=logits.device))
        if left := set(abandoned()) - drawn.aborted:
            leaving = torch.isin(alive.rows, torch.tensor(sorted(left), device=logits.device)) & alive.going
            drawn.aborted |= set(alive.rows[leaving].tolist())
            alive.going &= ~leaving
        count = int(alive.going.sum())
        if count == 0:
            return drawn
        # Keep only the rows that go on: always while nodes split, else once enough rows have ended.
        if count < len(begin) and (node is not None or count < _PACK_BELOW * len(begin)):
            kept = alive.going.nonzero()[:, 0]
            if node is None:
                decoder.keep(kept)
            else:
                node = node[kept]
            alive, begin, tokens = alive.take(kept), begin[kept], tokens[kept]
        first = alive  # a row of each node
        if node is not None:  # split the nodes whose rows drew different tokens, or got different runs
            key, keys = tokens, logits.shape[1]
            if paths is not None and grammars is not None:
                key, keys = key * len(rows) + grammars.numbers[alive.rows], keys * len(rows)
            node, order, places = _split(decoder, node, key, keys)
            alive, first, begin, tokens = alive.take(order), alive.take(places), begin[places], tokens[places]
        # A row that has ended stays at its last position.
        positions = first.length + torch.minimum(begin, first.limit - 1)
        with forward_lock as version, recording(routers) as record:
            if paths is not None:
                counts = (first.count - begin).clamp(min=1)
                of = torch.repeat_interleave(counts)
                nth = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]
                tokens = drawn.tokens[first.rows[of], begin[of] + nth]
                logits = paths.step_runs(tokens, positions[of] + nth, counts)
            else:
                logits = decoder.step(tokens, positions)
        if record is not None:
            chosen = record.take()
            of_rows = chosen.new_zeros(len(rows), *chosen.shape[1:])
            of_rows[alive.rows] = chosen if node is None else chosen[node]
            drawn.experts.append(of_rows.cpu().numpy())
        drawn.decoded += len(tokens)
        logits = (logits if node is None else logits[node])[:, :vocabulary]


def _split(decoder: Decoder, node: Tensor, key: Tensor, keys: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Give each distinct pair of ``node [r]`` and ``key [r]`` a node. Keys are below ``keys``.

    Returns the rows' new nodes, ``None`` if each row has its own; the order of the rows, ``[r]``, which then is that of
    their nodes; and a row of each node ``[N]``, by its place in the order of before.
    """
    order = torch.arange(len(node), device=node.device)
    distinct, new = torch.unique(node * keys + key, return_inverse=True)
    parents = torch.div(distinct, keys, rounding_mode="floor")
    if len(parents) != decoder.size or bool((parents[1:] == parents[:-1]).any()):
        decoder.keep(parents)
    if len(distinct) == len(node):
        order = new.argsort()
        return None, order, order
    return new, order, torch.empty_like(distinct).scatter_(0, new, order)


# -- the trial ---------------------------------------------------------------------------------------------------------
def cache_unsupported_reason(model: Any) -> str:
    """Return why ``model`` can't be decoded with a cache; an empty string if it can.

    The trial decodes two tokens after two prompts of unequal lengths, and splits one in between. It compares the
    logits with those of whole passes.
    """
    if model.config.model_type in SHARED_PREFIX_MODELS:
        return ""  # the tests cover these
    weight = model.get_input_embeddings().weight
    ids = [(number * 7919 + 1) % len(weight) for number in range(16)]
    prompts, index = [tuple(ids[:7]), tuple(ids[7:11])], torch.arange(2, device=weight.device)
    whole = Uncached(model, prompts, index)
    try:
        logits, cache, mask = prefill(model, prompts, 0, weight.device)
        decoder = make_decoder(model, cache, mask, index)
        pairs = [(logits, whole.next_logits())]
        for step, rows in enumerate(([0, 1], [0, 0, 1])):
            kept = torch.tensor(rows, device=weight.device)
            tokens = torch.tensor(ids[11 + 2 * step :][: len(rows)], device=weight.device)
            positions = torch.tensor([(7, 4)[row] + step for row in rows], device=weight.device)
            for each in (decoder, whole):
                each.keep(kept)
            pairs.append((decoder.step(tokens, positions), whole.step(tokens, positions)))
    except Exception as error:  # models raise errors of any type; the caller reports the text
        return f"a pass with a cache fails: {type(error).__name__}: {error}"
    off = max(float((got - expected).float().norm() / expected.float().norm()) for got, expected in pairs)
    if off <= (1e-3 if weight.dtype.itemsize >= 4 else 0.1):
        return ""
    return f"passes with a cache come out otherwise, by {off:.2g} of their norm"
