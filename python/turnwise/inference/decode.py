"""Complete one batch of prompts with a Hugging Face causal model: prefill each distinct prompt once, then decode.

The decode loop is written out instead of calling ``model.generate(past_key_values=...)``, which copies the whole cache
for every token, repeats the prompts' part for every sibling, and computes finished rows until the last one is done.
Each row also has a seed, a temperature and a limit of its own.

Legend: ``R`` rows, ``U`` distinct prompts, ``P`` prompt columns, ``T`` new tokens at most, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from turnwise.inference.caches import Decoder, make_decoder
from turnwise.inference.sampling import RowSampler
from turnwise.types import FinishReason, Sampling

_PACK_BELOW = 0.9
"""Finished rows leave the batch once less than this share of it goes on."""


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
    """The tokens of one row (the stop token included), their log-probabilities, and what weights sampled each."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: list[int]


class Fixed:
    """The turn of a batch whose weights stay as they are: no waiting, one version."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def __enter__(self) -> int:
        return self.version

    def __exit__(self, *error: object) -> None:
        return None


def complete(
    model: Any,
    rows: Sequence[Row],
    device: torch.device,
    abandoned: Callable[[], Sequence[int]] = tuple,
    turn: AbstractContextManager[int] | None = None,
) -> tuple[list[Completion], int]:
    """Complete ``rows`` with ``model``, which is in evaluation mode; returns them in order.

    ``abandoned()`` is asked after each token for rows that nobody waits for any more: they stop with ``"abort"``.
    ``turn`` is entered for each forward pass and gives the version of the weights; between two passes they may change.
    The second value counts the prompt tokens that were prefilled (siblings share one prefill).
    """
    turn = turn or Fixed()
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    place = {prompt: index for index, prompt in enumerate(prompts)}
    index = torch.tensor([place[row.prompt] for row in rows], device=device)
    with turn as version:
        logits, cache, mask = _prefill(model, prompts, device)
    decoder = make_decoder(model, cache, mask, index)
    drawn = _decode(decoder, rows, logits[index], version, abandoned, turn)
    return _completions(rows, drawn), sum(map(len, prompts))


def _prefill(model: Any, prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Any, Tensor | None]:
    """Next-token logits ``[U, V]``, the cache, and the mask ``[U, P]`` int64 (``None`` where no prompt is padded)."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    pads = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    columns = torch.arange(width, device=device)
    mask = (columns >= pads[:, None]).long() if bool(pads.any()) else None
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(columns - pads[:, None]).clamp(min=0),
        past_key_values=DynamicCache(config=model.config),
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1], output.past_key_values, mask


@dataclass(slots=True)
class _Drawn:
    """Tokens ``[R, T]`` int64 and log-probabilities ``[R, T]`` float32 on the CPU, the version of the weights behind
    each column that was drawn, and the rows that were aborted."""

    tokens: Tensor
    logprobs: Tensor
    versions: list[int]
    aborted: set[int]


def _decode(
    decoder: Decoder,
    rows: Sequence[Row],
    logits: Tensor,
    version: int,
    abandoned: Callable[[], Sequence[int]],
    turn: AbstractContextManager[int],
) -> _Drawn:
    """Draw and decode until every row has ended; ``version`` is that of the weights that gave ``logits [R, V]``.

    ``alive`` lists the rows in the decoder, ``going`` those of them that have not ended.
    """
    device, width = logits.device, max(row.limit for row in rows)
    sampler = RowSampler.build([row.sampling for row in rows], [row.seed for row in rows], width, device)
    limits = torch.tensor([row.limit for row in rows], device=device)
    lengths = torch.tensor([len(row.prompt) for row in rows], device=device)
    stops = _stop_table(rows, device)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64, device=device)
    logprobs = torch.zeros((len(rows), width), device=device)
    alive, going = torch.arange(len(rows), device=device), torch.ones(len(rows), dtype=torch.bool, device=device)
    aborted: set[int] = set()
    versions: list[int] = []
    for step in range(width):
        drawn, drawn_logprobs = sampler.draw(logits, alive, step)
        tokens[alive, step], logprobs[alive, step] = drawn, drawn_logprobs
        versions.append(version)
        going &= (drawn[:, None] != stops[alive]).all(dim=1) & (step + 1 < limits[alive])
        if left := set(abandoned()) - aborted:
            leaving = torch.isin(alive, torch.tensor(sorted(left), device=device)) & going
            aborted |= set(alive[leaving].tolist())
            going &= ~leaving
        count = int(going.sum())
        if count == 0:
            break
        if count < _PACK_BELOW * len(alive):
            kept = going.nonzero()[:, 0]
            decoder.keep(kept)
            alive, drawn, going = alive[kept], drawn[kept], going[kept]
        with turn as version:
            logits = decoder.step(drawn, lengths[alive] + step)
    return _Drawn(tokens.cpu(), logprobs.cpu(), versions, aborted)


def _stop_table(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Stop ids ``[R, S]`` int64, filled up with -1, which is no token."""
    width = max(1, max(len(row.stop_ids) for row in rows))
    return torch.tensor([[*row.stop_ids, *([-1] * (width - len(row.stop_ids)))] for row in rows], device=device)


def _completions(rows: Sequence[Row], drawn: _Drawn) -> list[Completion]:
    """Cut each row after its first stop token or at its limit."""
    completions = []
    tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
    for index, (row, ids, values) in enumerate(zip(rows, tokens, logprobs, strict=True)):
        if index in drawn.aborted:
            completions.append(Completion([], [], "abort", []))
            continue
        end = next((place for place, token in enumerate(ids[: row.limit]) if token in row.stop_ids), None)
        reason: FinishReason = "length" if end is None else "stop"
        count = row.limit if end is None else end + 1
        completions.append(Completion(ids[:count], values[:count], reason, drawn.versions[:count]))
    return completions
