"""Draw one token per row, each row with its own temperature, top-p, top-k, min-p and random stream.

Each row draws one uniform number per token from its own ``PCG64(seed)``. The inverse of the cumulative distribution
turns it into a token. So a row's tokens don't depend on the other rows of the batch.

Legend: ``R`` rows, ``V`` vocabulary, ``T`` new tokens at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise import _C
from turnwise.chat.grammar import GrammarMatcher
from turnwise.inference.common.token_masks import unpack_masks
from turnwise.types import Grammar, Sampling


@dataclass(slots=True)
class RowSampler:
    """The sampling settings of ``R`` rows as columns. ``uniforms [R, T]`` float32, the others ``[R]``.

    ``temperatures`` are 0 in greedy rows, ``filtered`` is true in those with top-p, top-k or min-p. ``filters`` and
    ``greedy`` tell if there is any of them. ``kept`` notes what filtered rows kept in each draw: their numbers ``[r]``,
    the number of their tokens before ``[r]``, the counts of kept tokens ``[r]``, and these tokens, row by row.
    """

    temperatures: Tensor
    uniforms: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    filtered: Tensor
    filters: bool
    greedy: bool
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def build(
        cls, samplings: Sequence[Sampling], seeds: Sequence[int], tokens: int, device: torch.device
    ) -> RowSampler:
        """Draw ``tokens`` uniforms per row in advance. A greedy row draws none."""
        uniforms = np.zeros((len(samplings), tokens), dtype=np.float32)
        for row, sampling, seed in zip(uniforms, samplings, seeds, strict=True):
            if sampling.temperature > 0:
                # numpy wants a non-negative seed
                generator = np.random.Generator(np.random.PCG64(seed & (2**64 - 1)))
                generator.random(dtype=np.float32, out=row)
        filtered = [bool(s.cut) for s in samplings]
        return cls(
            temperatures=torch.tensor([float(s.temperature) for s in samplings], device=device),
            uniforms=torch.from_numpy(uniforms).to(device),
            top_p=torch.tensor([s.top_p for s in samplings], device=device),
            top_k=torch.tensor([s.top_k for s in samplings], device=device),
            min_p=torch.tensor([s.min_p for s in samplings], device=device),
            filtered=torch.tensor(filtered, device=device),
            filters=any(filtered),
            greedy=any(s.temperature == 0 for s in samplings),
        )

    def draw(
        self, logits: Tensor, rows: Tensor, at: Tensor, allowed: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw the next token of each row, its ``at``-th one, and return it with its log-probability.

        ``logits [r, V]`` are floats; ``rows [r]`` int64 are their indices among the ``R`` rows, and ``at [r]`` int64
        counts the tokens that each has. Returns tokens ``[r]``
        int64 and log-probabilities ``[r]`` float32 under ``log_softmax(logits / temperature)`` (greedy: temperature
        1). With masks ``allowed [r, bytes]`` (see ``token_masks``) the distribution is that over the allowed tokens,
        and in filtered rows that over the kept ones. Raises ``ValueError`` for a row with NaN or +inf, or without an
        allowed token.

        On CPUs a kernel draws all rows but the filtered ones, so a row's tokens are the same in any batch.
        """
        uniforms, temperatures = self.uniforms[rows, at], self.temperatures[rows]
        if logits.device.type != "cpu":
            return self._draw_by_torch(logits, rows, at, temperatures, uniforms, allowed)
        if not self.filters:
            return _draw_by_kernel(logits, temperatures, uniforms, allowed)
        filtered = self.filtered[rows]
        tokens, logprobs = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        for mask in (filtered, ~filtered):
            part = mask.nonzero()[:, 0]
            if len(part):
                masks = None if allowed is None else allowed[part.numpy()]
                if mask is filtered:
                    drawn = self._draw_by_torch(
                        logits[part], rows[part], at[part], temperatures[part], uniforms[part], masks
                    )
                else:
                    drawn = _draw_by_kernel(logits[part], temperatures[part], uniforms[part], masks)
                tokens[part], logprobs[part] = drawn
        return tokens, logprobs

    def _draw_by_torch(
        self,
        logits: Tensor,
        rows: Tensor,
        at: Tensor,
        temperatures: Tensor,
        uniforms: Tensor,
        allowed: np.ndarray | None,
    ) -> tuple[Tensor, Tensor]:
        greedy = temperatures == 0
        scaled = logits.float() / (torch.where(greedy, 1.0, temperatures) if self.greedy else temperatures)[:, None]
        if allowed is not None:
            masks = unpack_masks(torch.from_numpy(allowed).to(logits.device), logits.shape[1])
            scaled = torch.where(masks, scaled, -torch.inf)
        logprobs = torch.log_softmax(scaled, dim=-1)
        if self.filters:
            keep = _kept(logprobs, self.top_p[rows, None], self.top_k[rows, None], self.min_p[rows, None])
            filtered = self.filtered[rows]
            logprobs = torch.log_softmax(scaled.masked_fill(~keep & filtered[:, None], -torch.inf), dim=-1)
            counts, ids = (keep & filtered[:, None]).sum(dim=1), (keep & filtered[:, None]).nonzero()[:, 1]
            self.kept.append((rows, at, counts, ids.int()))
        # The place is past the end in a row of NaN, and a GPU would end the whole process for it.
        tokens = _inverse_cdf(logprobs.exp(), uniforms).clamp(max=logits.shape[1] - 1)
        if self.greedy:
            tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
        drawn = logprobs.gather(1, tokens[:, None])[:, 0]
        if not drawn.isfinite().all():
            raise ValueError("logits: a row has NaN, +inf, or no allowed token above -inf")
        return tokens, drawn


def _draw_by_kernel(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, allowed: np.ndarray | None
) -> tuple[Tensor, Tensor]:
    tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    logits = logits.float() if logits.dtype == torch.float64 else logits
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    masks = None if allowed is None else torch.from_numpy(allowed)
    _C.draw_tokens(logits, temperatures, uniforms, masks, tokens, logprobs, torch.get_num_threads())
    return tokens, logprobs


class RowGrammars:
    """The grammars of ``R`` rows, and the tokens that each row may have next: all tokens in rows without one."""

    def __init__(self, grammars: Sequence[Grammar | None], tokenizer: Any, vocabulary: int) -> None:
        self._matchers = {
            row: GrammarMatcher(tokenizer, grammar) for row, grammar in enumerate(grammars) if grammar is not None
        }
        self._vocabulary = vocabulary
        numbers = {grammar: number for number, grammar in enumerate(dict.fromkeys(grammars))}
        self.numbers = torch.tensor([numbers[grammar] for grammar in grammars])
        """The number of each row's grammar ``[R]``: equal grammars have one, as have the rows without any."""
        # The tokenizer may have more or fewer tokens than the model.
        words = max([-(-vocabulary // 32), *(len(matcher.mask) for matcher in self._matchers.values())])
        self._masks = np.full((len(grammars), words), 2**32 - 1, dtype=np.uint32)
        for row, matcher in self._matchers.items():
            self._masks[row] = 0
            matcher.write_to(self._masks[row, : len(matcher.mask)])
        # The tokenizer's tokens that the model doesn't have are never drawn.
        bits = np.packbits(np.arange(words * 32) < vocabulary, bitorder="little")
        self._known = bits.view(np.uint32)
        # The only token that a row may have next, or -1. Its mask is not written.
        self._forced = [-1] * len(grammars)
        self._look_ahead(self._matchers)

    @classmethod
    def of(cls, grammars: Sequence[Grammar | None], tokenizer: Any, vocabulary: int) -> RowGrammars | None:
        """Return the grammars of the rows; ``None`` if no row has one."""
        return cls(grammars, tokenizer, vocabulary) if any(grammars) else None

    def draw(self, sampler: RowSampler, logits: Tensor, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of each row from its allowed ones, as :meth:`RowSampler.draw` does with masks.

        A token without an alternative needs no draw. Its log-probability is 0.
        """
        index, device = rows.tolist(), logits.device
        forced = [self._forced[row] for row in index]
        free = [place for place, token in enumerate(forced) if token < 0]
        if len(free) == len(index):
            return sampler.draw(logits, rows, at, self._allowed(index))
        tokens, logprobs = torch.tensor(forced, device=device), torch.zeros(len(index), device=device)
        if free:
            places, allowed = torch.tensor(free, device=device), self._allowed([index[each] for each in free])
            drawn = sampler.draw(logits[places], rows[places], at[places], allowed)
            tokens.index_copy_(0, places, drawn[0])
            logprobs.index_copy_(0, places, drawn[1])
        return tokens, logprobs

    def accept(self, rows: Tensor, tokens: Tensor, going: Tensor) -> list[int]:
        """Go on past ``tokens [r]`` of the ``rows [r]`` that are ``going``. Return those that no token can continue."""
        ended: list[int] = []
        running: list[int] = []
        for row, token, goes in zip(rows.tolist(), tokens.tolist(), going.tolist(), strict=True):
            if goes and (matcher := self._matchers.get(row)) is not None:
                (running if matcher.accept(token) else ended).append(row)
        return ended + self._look_ahead(running)

    def take_runs(self, rows: Tensor, going: Tensor) -> tuple[dict[int, list[int]], list[int]]:
        """Go on past the run of forced tokens that is ahead of each of the ``rows [r]`` that are ``going``.

        Returns the runs by row, and the rows whose run no token can continue.
        """
        index = zip(rows.tolist(), going.tolist(), strict=True)
        runs = {row: self._matchers[row].take_forced() for row, goes in index if goes and self._forced[row] >= 0}
        return runs, self._look_ahead(runs)

    def in_dead_end(self, row: int) -> bool:
        """True for a row that no token can continue, and that is not complete."""
        return not self._matchers[row].is_complete

    def _look_ahead(self, rows: Iterable[int]) -> list[int]:
        """Find the forced token of each row or else its mask. Return the rows with an empty mask: they draw nothing."""
        written = []
        for row in rows:
            matcher = self._matchers[row]
            self._forced[row] = token = matcher.forced_token()
            if token < 0:
                matcher.write_mask()
                self._masks[row] &= self._known
            elif token >= self._vocabulary:
                self._masks[row] = 0
            else:
                continue
            written.append(row)
        lives = self._masks.take(written, axis=0).any(axis=1) if written else None
        ended = [] if lives is None or lives.all() else [written[at] for at in np.flatnonzero(~lives)]
        for row in ended:  # it may stay in the batch for a while
            self._forced[row] = 0
        return ended

    def _allowed(self, index: list[int]) -> np.ndarray:
        """Return the masks ``[r, bytes]`` uint8 of the rows ``index``."""
        return self._masks.take(index, axis=0).view(np.uint8)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight is above ``uniform * total``; ``weights`` need not sum to 1."""
    cumulative = weights.cumsum(dim=-1)
    # the largest float32 draw is 1 - 2^-24, and its product with a normal number rounds to below that number
    target = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _kept(logprobs: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens ``[r, V]`` min-p, top-k and top-p keep, each of those that the one before kept, as in vLLM.

    The token that crosses ``top_p`` stays; ties keep the sorted order.
    """
    ordered, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = (ordered > 0) & (ordered >= min_p * ordered[:, :1]) & ((rank < top_k) | (top_k == 0))
    ordered = torch.where(keep, ordered, 0.0)
    above = ordered.cumsum(dim=-1) - ordered
    # top_p = 1 must keep even the tokens that rounding puts past a cumulative sum of 1
    keep &= (above < top_p * ordered.sum(dim=-1, keepdim=True)) | (top_p >= 1)
    return torch.zeros_like(keep).scatter_(1, order, keep)
