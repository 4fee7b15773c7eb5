"""Rows of tokens as a trie: what they begin with in common passes through the model once.

For a training loop of one's own::

    use_trees(model)  # any Hugging Face causal LM with plain causal attention; once
    trie = PrefixTree(token_ids, cu_seqlens)  # rows [N] one after the other, cut by cu_seqlens [B + 1]
    hidden = model.get_decoder()(**trie.inputs(model.device)).last_hidden_state[0]  # [U, H], U <= N
    logprobs = linear_logprob(hidden, head.weight, trie.targets(lengths), positions=trie.sources(lengths))

``lengths [B]`` are those of the completions at the rows' ends; a source is the place of the token before a target,
whose hidden state predicts it. Loss and gradients are those of the rows one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise._C import TokenTrie
from turnwise.train.model.prefix_tree_attention import PrefixTreeMask
from turnwise.train.model.support import causal_lm, obstacle_to_packing, obstacle_to_trees

LEAST_SAVED = 16
"""A branch costs about as much time as so many tokens: rows that share fewer are kept apart there."""


class PrefixTree:
    """The rows ``token_ids[cu_seqlens[i]:cu_seqlens[i + 1]]`` (int64), for ``i`` in ``rows``, or all.

    ``token_ids [U]`` and ``position_ids [U]`` are the unique tokens in depth-first order and their positions in their
    rows; the layout does not depend on the order of the rows. ``num_tokens`` is the sum of the rows' lengths. Sharing
    that would save fewer than ``least`` tokens is given up.

    Raises ``ValueError`` for offsets that are none.
    """

    def __init__(
        self,
        token_ids: Sequence[int] | np.ndarray | Tensor,
        cu_seqlens: Sequence[int] | np.ndarray | Tensor,
        rows: np.ndarray | None = None,
        *,
        least: int = LEAST_SAVED,
    ) -> None:
        stream, offsets = (np.ascontiguousarray(x, dtype=np.int64) for x in (token_ids, cu_seqlens))
        starts, ends = offsets[:-1], offsets[1:]
        if rows is not None:
            starts, ends = starts[rows], ends[rows]
        self._stream, self._ends, self._lengths = stream, ends, ends - starts
        self.num_tokens = int((ends - starts).sum())
        self._trie = TokenTrie(stream, np.ascontiguousarray(starts), np.ascontiguousarray(ends), least)
        self.token_ids = torch.from_numpy(stream[self._trie.source])
        self.position_ids = torch.from_numpy(self._trie.depth.copy())

    def __len__(self) -> int:
        """The number of unique tokens, ``U``."""
        return len(self.token_ids)

    def tree(self) -> PrefixTreeMask:
        """The layout that :func:`~turnwise.train.model.prefix_tree_attention.tree_attention` takes."""
        return PrefixTreeMask(self._trie.begin.tolist(), self._trie.subtree_end.tolist())

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The arguments for a call of a model on ``device``: the tokens, their positions and the tree."""
        # A mask of four dimensions is taken as it is: none is made, of U x U. The attention itself reads none.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return {
            "input_ids": self.token_ids[None].to(device),
            "position_ids": self.position_ids[None].to(device),
            "attention_mask": mask,
            "tree": self.tree(),
            "use_cache": False,
        }

    def targets(self, lengths: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """``[sum(lengths)]`` int64: the last ``lengths[i]`` tokens of each row ``i``, row after row."""
        counts = self._counts(lengths)
        return torch.from_numpy(self._stream[ranges(self._ends - counts, counts)])

    def sources(self, lengths: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """``[sum(lengths)]`` int64: for each of the :meth:`targets`, the place of the token before it."""
        counts = self._counts(lengths)
        return self.places(np.maximum(self._lengths - counts - 1, 0), counts)

    def _counts(self, lengths: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        counts = np.asarray(lengths, dtype=np.int64)
        if counts.shape != self._lengths.shape or (counts < 0).any() or (counts >= np.maximum(self._lengths, 1)).any():
            raise ValueError(
                f"lengths={counts.tolist()}: expected one per row, at least 0 and below the row's own, "
                f"{self._lengths.tolist()}"
            )
        return counts

    def places(self, firsts: np.ndarray | Tensor, counts: np.ndarray | Tensor) -> Tensor:
        """``[sum(counts)]`` int64: the places of positions ``firsts[i] .. firsts[i] + counts[i] - 1`` of row ``i``."""
        first, count = (np.ascontiguousarray(x, dtype=np.int64) for x in (firsts, counts))
        return torch.from_numpy(self._trie.places(first, count))

    def cut(self, max_tokens: int) -> list[np.ndarray]:
        """The rows in parts of at most ``max_tokens`` unique tokens, with as little computed twice as can be.

        A row that is longer than that has a part of its own.
        """
        order, part, count = self._trie.cut(max_tokens)
        return np.split(order, np.flatnonzero(np.diff(part)) + 1) if count else []


def use_trees(model: nn.Module) -> None:
    """Set a Hugging Face causal LM, or one with ``peft`` adapters, up to take :meth:`PrefixTree.inputs`.

    Its other calls work as before. A few tokens are tried; raises ``ValueError`` for one whose attention can't.
    """
    lm = causal_lm(model)
    if why := obstacle_to_packing(lm) or obstacle_to_trees(lm):
        raise ValueError(f"model: {type(lm).__name__} can't take tries, as {why}")


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` of them, one ``i`` after another."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
