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

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from turnwise.inference.common.hf_model import last_mlp_at
from turnwise.inference.common.routed_experts import Routers, recording
from turnwise.inference.local.kv_cache import SHARED_PREFIX_MODELS, Decoder, Uncached, make_decoder
from turnwise.inference.local.sampling import RowGrammars, RowSampler
from turnwise.inference.weights.lora import activated
from turnwise.types import FinishReason, Sampling

_BEGINNING, _FEWEST_ALIKE = 16, 8
"""Tokens by which the beginnings of prompts are compared, and the fewest rows that get batches of their own."""

_LEAST_PREFIX = 8
"""Least tokens of a common prefix that are computed once for all prompts."""
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
        prefix = _common_prefix(prompts) if model.config.model_type in SHARED_PREFIX_MODELS else 0
        decoder: Decoder
        if cached:
            logits, cache, mask = _prefill(model, prompts, prefix, device)
            decoder = make_decoder(model, cache, mask, index, prefix)
        else:
            decoder = Uncached(model, prompts, index)
            logits = decoder.next_logits()
    logits = logits[index]
    grammars = RowGrammars.of([row.sampling.grammar for row in rows], tokenizer, logits.shape[1])
    of_prompts = [] if record is None else _of_prompts(record.take().cpu().numpy(), prompts)
    drawn = _decode(decoder, rows, logits, version, abandoned, forward_lock, grammars, routers)
    prefilled = sum(map(len, prompts)) - prefix * (len(prompts) - 1)
    completions = _completions(rows, drawn)
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


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the number of tokens with which all of several prompts begin, such as the system prompt's; each keeps at
    least one token of its own. A prefix of a few tokens counts as 0, as it isn't worth a pass of its own."""
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    same = next((index for index in range(most) if first[index] != last[index]), most)
    return same if len(prompts) > 1 and same >= _LEAST_PREFIX else 0


def _prefilled(model: Any, prefix: Sequence[int], count: int, device: torch.device) -> Any:
    """Return a cache with the keys and values of ``prefix`` for ``count`` rows; an empty one without a prefix."""
    cache = DynamicCache(config=model.config)
    if prefix:
        start = torch.tensor([list(prefix)], device=device)
        model(input_ids=start, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(count)
    return cache


def _prefill(
    model: Any, prompts: Sequence[tuple[int, ...]], prefix: int, device: torch.device
) -> tuple[Tensor, Any, Tensor | None]:
    """Prefill the prompts, whose first ``prefix`` tokens are the same. Returns next-token logits ``[U, V]``, the cache,
    and the mask ``[U, P]`` int64.

    The padding lies between the prefix and the rest. The mask is ``None`` if no prompt is padded.
    """
    cache = _prefilled(model, prompts[0][:prefix], len(prompts), device)
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
            logits_to_keep=1,
        )
    return output.logits[:, -1], output.past_key_values, mask


@dataclass(slots=True)
class _Drawn:
    """Tokens ``[R, T]`` int64 and log-probabilities ``[R, T]`` float32 on the CPU, the version of the weights that gave
    each drawn column, the aborted rows, and the number of decoded positions."""

    tokens: Tensor
    logprobs: Tensor
    versions: list[int]
    aborted: set[int]
    stopped: dict[int, int]
    """Number of tokens of the rows that a stop string ended."""
    stuck: dict[int, int]
    """Number of tokens of the rows whose grammar allowed no further token."""
    decoded: int
    experts: list[np.ndarray]
    """Experts ``[R, layers, K]`` of each column that passed through the model, 0 for rows that had left; empty if they
    aren't recorded."""


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

    In the loop, ``alive`` lists the rows in the decoder, ``going`` marks those that have not ended, and ``node`` is the
    node of each; ``None`` once each row has a node of its own, in the order of ``alive``.
    """
    device, width = logits.device, max(row.limit for row in rows)
    sampler = RowSampler.build([row.sampling for row in rows], [row.seed for row in rows], width, device)
    limits = torch.tensor([row.limit for row in rows], device=device)
    lengths = torch.tensor([len(row.prompt) for row in rows], device=device)
    stop_width = max(1, max(len(row.stop_ids) for row in rows))
    padded = [[*row.stop_ids, *([-1] * (stop_width - len(row.stop_ids)))] for row in rows]  # -1 is no token id
    stops = torch.tensor(padded, device=device)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64, device=device)
    logprobs = torch.zeros((len(rows), width), device=device)
    alive, going = torch.arange(len(rows), device=device), torch.ones(len(rows), dtype=torch.bool, device=device)
    node: Tensor | None = decoder.nodes
    aborted: set[int] = set()
    watched = {row: spec.stopped for row, spec in enumerate(rows) if spec.stopped is not None}
    stopped: dict[int, int] = {}
    stuck: dict[int, int] = {}
    versions: list[int] = []
    experts: list[np.ndarray] = []
    decoded = 0
    for step in range(width):
        if grammars is None:
            drawn, drawn_logprobs = sampler.draw(logits, alive, step)
        else:
            drawn, drawn_logprobs = grammars.draw(sampler, logits, alive, step)
        # A row ends at a stop token, with a stop string, at its limit, or when its caller has left.
        tokens[alive, step], logprobs[alive, step] = drawn, drawn_logprobs
        versions.append(version)
        going &= (drawn[:, None] != stops[alive]).all(dim=1)
        if watched:
            for index in going.nonzero()[:, 0].tolist():
                row = int(alive[index])
                if row in watched and watched[row](tokens[row, : step + 1].tolist()):
                    stopped[row], going[index] = step + 1, False
        going &= step + 1 < limits[alive]
        if grammars is not None and (ended := grammars.accept(alive, drawn, going)):
            stuck |= dict.fromkeys(ended, step + 1)
            going &= ~torch.isin(alive, torch.tensor(ended, device=device))
        if left := set(abandoned()) - aborted:
            leaving = torch.isin(alive, torch.tensor(sorted(left), device=device)) & going
            aborted |= set(alive[leaving].tolist())
            going &= ~leaving
        count = int(going.sum())
        if count == 0:
            break
        # Keep only the rows that go on: always while nodes split, else once enough rows have ended.
        if count < len(alive) and (node is not None or count < _PACK_BELOW * len(alive)):
            kept = going.nonzero()[:, 0]
            if node is None:
                decoder.keep(kept)
            else:
                node = node[kept]
            alive, drawn, going = alive[kept], drawn[kept], going[kept]
        # Split the nodes whose rows drew different tokens.
        if node is not None:
            node, order, drawn = _split(decoder, node, drawn, logits.shape[1])
            alive, going = alive[order], going[order]
        positions = lengths[alive] + step
        if node is not None:
            positions = positions.new_empty(len(drawn)).scatter_(0, node, positions)
        with forward_lock as version, recording(routers) as record:
            logits = decoder.step(drawn, positions)
        if record is not None:
            chosen = record.take()
            of_rows = chosen.new_zeros(len(rows), *chosen.shape[1:])
            of_rows[alive] = chosen if node is None else chosen[node]
            experts.append(of_rows.cpu().numpy())
        decoded += len(drawn)
        logits = logits if node is None else logits[node]
    return _Drawn(tokens.cpu(), logprobs.cpu(), versions, aborted, stopped, stuck, decoded, experts)


def _split(decoder: Decoder, node: Tensor, drawn: Tensor, vocabulary: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Give each distinct pair of ``node [r]`` and ``drawn [r]`` a node.

    Returns the rows' new nodes, ``None`` if each row has its own; the order of the rows, ``[r]``, which then is that of
    their nodes; and the token of each node ``[N]``.
    """
    order = torch.arange(len(node), device=node.device)
    distinct, new = torch.unique(node * vocabulary + drawn, return_inverse=True)
    parents = torch.div(distinct, vocabulary, rounding_mode="floor")
    if len(parents) != decoder.size or bool((parents[1:] == parents[:-1]).any()):
        decoder.keep(parents)
    if len(distinct) == len(node):
        return None, new.argsort(), distinct - parents * vocabulary
    return new, order, distinct - parents * vocabulary


def _completions(rows: Sequence[SequenceSpec], drawn: _Drawn) -> list[Completion]:
    """Cut each row after its first stop token, at its stop string or at its limit."""
    completions = []
    tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
    for number, (row, ids, values) in enumerate(zip(rows, tokens, logprobs, strict=True)):
        if number in drawn.aborted:
            completions.append(Completion([], [], "abort", []))
            continue
        end = next((index for index, token in enumerate(ids[: row.limit]) if token in row.stop_ids), None)
        if end is None and number in drawn.stopped:
            end = drawn.stopped[number] - 1
        reason: FinishReason = "length" if end is None else "stop"
        count = drawn.stuck.get(number, row.limit) if end is None else end + 1
        completions.append(Completion(ids[:count], values[:count], reason, drawn.versions[:count]))
    return completions


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
        logits, cache, mask = _prefill(model, prompts, 0, weight.device)
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


# -- scores ------------------------------------------------------------------------------------------------------------
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
    prefix = _common_prefix([row.prompt for row in rows]) if shares else 0
    width, kept = max(map(len, rows)) - prefix, max(len(row.completion) for row in rows) + 1
    rests = [[*row.prompt[prefix:], *row.completion] for row in rows]
    ids = torch.tensor([[0] * (width - len(rest)) + rest for rest in rests], device=device)
    pads = torch.tensor([width - len(rest) for rest in rests], device=device)
    columns = torch.arange(width, device=device)
    options: dict[str, Any] = {"use_cache": False}
    if prefix:
        options = {"use_cache": True, "past_key_values": _prefilled(model, rows[0].prompt[:prefix], len(rows), device)}
    if cached:
        options |= {"position_ids": prefix + (columns - pads[:, None]).clamp(min=0), "logits_to_keep": kept}
    if bool(pads.any()):
        options["attention_mask"] = torch.cat(
            [columns.new_ones(len(rests), prefix), (columns >= pads[:, None]).long()], dim=1
        )
    output = model(input_ids=ids, **options)
    # The logits in column c - 1 predict the token in column c, so the last column is not needed.
    temperatures = torch.tensor([row.temperature or 1.0 for row in rows], device=device)
    logprobs = torch.log_softmax(output.logits[:, -kept:-1].float() / temperatures[:, None, None], dim=-1)
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
