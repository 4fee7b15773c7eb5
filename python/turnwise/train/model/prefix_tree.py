"""Rows of tokens as a trie, so that a shared prefix passes through the model once.

Use it in your own training loop::

    use_trees(model)  # any Hugging Face causal LM with plain causal attention; once
    trie = PrefixTree(token_ids, cu_seqlens)  # rows [N] one after the other, cut by cu_seqlens [B + 1]
    hidden = model.get_decoder()(**trie.inputs(model.device)).last_hidden_state[0]  # [U, H], U <= N
    logprobs = linear_logprob(hidden, head.weight, trie.targets(lengths), positions=trie.sources(lengths))

``lengths [B]`` are those of the completions at the rows' ends. A source is the position of the token before a target,
whose hidden state predicts the target. Loss and gradients equal those of separate rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise._C import TokenTrie
from turnwise.train.model.prefix_tree_attention import PrefixTreeMask
from turnwise.train.model.support import causal_lm, packing_unsupported_reason, trie_unsupported_reason


class PrefixTree:
    """A trie of the rows ``token_ids[cu_seqlens[i]:cu_seqlens[i + 1]]`` (int64), for ``i`` in ``rows``, or for all.

    ``token_ids [U]`` and ``position_ids [U]`` are the unique tokens in depth-first order and their positions in their
    rows; the layout does not depend on the order of the rows. ``num_tokens`` is the sum of the rows' lengths. A prefix
    is shared only if that saves at least ``least`` tokens. With ``last=False`` the trie lacks the last token of each
    row of several, which predicts none.

    Raises ``ValueError`` for invalid offsets.
    """

    def __init__(
        self,
        token_ids: Sequence[int] | np.ndarray | Tensor,
        cu_seqlens: Sequence[int] | np.ndarray | Tensor,
        rows: np.ndarray | None = None,
        *,
        least: int = 1,
        last: bool = True,
    ) -> None:
        stream, offsets = (np.ascontiguousarray(x, dtype=np.int64) for x in (token_ids, cu_seqlens))
        starts, ends = offsets[:-1], offsets[1:]
        if rows is not None:
            starts, ends = starts[rows], ends[rows]
        self._build(stream, starts, ends, least, last)

    @classmethod
    def of_places(cls, stream: np.ndarray, starts: np.ndarray, ends: np.ndarray, *, last: bool = True) -> PrefixTree:
        """Return a trie of the rows ``stream[starts[i]:ends[i]]``, all int64, which may lie on one another."""
        tree = cls.__new__(cls)
        tree._build(stream, starts, ends, 1, last)
        return tree

    def _build(self, stream: np.ndarray, starts: np.ndarray, ends: np.ndarray, least: int, last: bool) -> None:
        self._stream, self._ends, self._lengths = stream, ends, ends - starts
        self.num_tokens = int(self._lengths.sum())
        stops = ends if last else ends - (self._lengths > 1)
        self._trie = TokenTrie(stream, np.ascontiguousarray(starts), np.ascontiguousarray(stops), least)
        self.token_ids = torch.from_numpy(stream[self._trie.source])
        self.position_ids = torch.from_numpy(self._trie.depth.copy())

    def __len__(self) -> int:
        """Return the number of unique tokens, ``U``."""
        return len(self.token_ids)

    def tree(self) -> PrefixTreeMask:
        """Return the layout that :func:`~turnwise.train.model.prefix_tree_attention.tree_attention` takes."""
        return PrefixTreeMask(self._trie.begin.tolist(), self._trie.subtree_end.tolist())

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return the arguments for a call of a model on ``device``: the tokens, their positions and the tree."""
        # With a mask of four dimensions the library doesn't build one of U x U. The attention itself reads no mask.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return {
            "input_ids": self.token_ids[None].to(device),
            "position_ids": self.position_ids[None].to(device),
            "attention_mask": mask,
            "tree": self.tree(),
            "use_cache": False,
        }

    def targets(self, lengths: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Return ``[sum(lengths)]`` int64: the last ``lengths[i]`` tokens of each row ``i``, row after row."""
        counts = self._counts(lengths)
        return torch.from_numpy(self._stream[ranges(self._ends - counts, counts)])

    def sources(self, lengths: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Return ``[sum(lengths)]`` int64: for each of the :meth:`targets`, the place of the token before it."""
        counts = self._counts(lengths)
        return self.places(np.maximum(self._lengths - counts - 1, 0), counts)

    def _counts(self, lengths: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        counts = np.asarray(lengths, dtype=np.int64)
        if counts.shape != self._lengths.shape or (counts < 0).any() or (counts >= np.maximum(self._lengths, 1)).any():
            raise ValueError(
                f"lengths={counts.tolist()}: expected one per row, at least 0 and below the row's length, "
                f"{self._lengths.tolist()}"
            )
        return counts

    def places(self, firsts: np.ndarray | Tensor, counts: np.ndarray | Tensor) -> Tensor:
        """Return ``[sum(counts)]`` int64: the places in the trie of each row ``i``'s positions ``firsts[i]`` to
        ``firsts[i] + counts[i] - 1``."""
        first, count = (np.ascontiguousarray(x, dtype=np.int64) for x in (firsts, counts))
        return torch.from_numpy(self._trie.places(first, count))

    def cut(self, max_tokens: int) -> list[np.ndarray]:
        """Cut the rows into parts of at most ``max_tokens`` unique tokens, so that few tokens are in several parts.

        A row that is longer than ``max_tokens`` is a part by itself.
        """
        order, part, count = self._trie.cut(max_tokens)
        return np.split(order, np.flatnonzero(np.diff(part)) + 1) if count else []


def use_trees(model: nn.Module) -> None:
    """Set up a Hugging Face causal LM, with or without ``peft`` adapters, to take :meth:`PrefixTree.inputs`.

    Its other calls work as before. The function tries a few tokens, and raises ``ValueError`` for a model whose
    attention can't take tries.
    """
    lm = causal_lm(model)
    if reason := packing_unsupported_reason(lm) or trie_unsupported_reason(lm):
        raise ValueError(f"model: {type(lm).__name__} doesn't support tries, as {reason}")


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Join the ranges ``starts[i], starts[i] + 1, ...`` of ``counts[i]`` numbers each, one ``i`` after another."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
