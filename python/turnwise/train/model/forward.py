"""Log-probabilities of completion tokens: no padding, no token twice, and no logits beyond a tile.

The rows of a micro-batch pass through the model as one stream: packed one after the other (``packed_attention``) or as
the branches of a prefix tree (``prefix_tree_attention``). :func:`turnwise.ops.linear_logprob` reads the completions'
log-probabilities off the last hidden states. For a model that supports neither, rows are padded on the right and
log-probabilities are read from the logits.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnwise.inference.weights.lora import activated
from turnwise.ops import linear_logprob, logprob
from turnwise.train.model.micro_batch import MicroBatch, pad
from turnwise.train.model.support import (
    causal_lm,
    obstacle_to_fusing,
    obstacle_to_packing,
    obstacle_to_trees,
    stream_inputs,
)

_PADDING = 1.25  # padded tokens per real one, at most, where rows have to be padded

Result = tuple[Tensor, Tensor | None]  # log-probs [n] and, where asked for, entropies [n]


class Rows(NamedTuple):
    """Inputs of the model: ``input_ids [b, T]`` and what goes with them; ``at [n]`` picks places of ``b * T``."""

    input_ids: Tensor
    inputs: dict[str, Any]
    at: Tensor


class Layout(NamedTuple):
    """Layout of rows in a model: in one ``stream`` or padded, and as a trie where that has at most ``trie_share``
    of their tokens. What ``must`` be and can't is an error."""

    stream: bool
    trie_share: float
    must: bool


LAYOUTS = {
    "auto": Layout(stream=True, trie_share=0.9, must=False),
    "trie": Layout(stream=True, trie_share=1.0, must=True),
    "packed": Layout(stream=True, trie_share=0.0, must=True),
    "padded": Layout(stream=False, trie_share=0.0, must=False),
}
"""Layouts by the values of ``update.sequence_layout``."""


class Forward:
    """The log-probabilities that a causal LM gives the completion tokens of a micro-batch.

    ``model`` is a Hugging Face causal LM, an :class:`~turnwise.inference.weights.lora.AdaptedModel`, whose adapter each
    call makes the active one, or a ``peft`` model, with adapters as they are set at each call. A few tokens show, once,
    what it allows; ``packed``, ``trie_share`` and ``fused`` keep the finding, and what can't be is told in one warning
    each. Where the model runs SDPA, the library's default, its attention is set to ``"turnwise_tree"``, which without a
    stream is SDPA; another attention was chosen by someone and stays.

    ``layout`` is one of ``LAYOUTS``. Raises ``ValueError`` where it asks for what the model does not allow.
    """

    def __init__(self, model: nn.Module, layout: str = "auto") -> None:
        self.model = model
        lm, wanted = self.lm, LAYOUTS[layout]
        why_logits = obstacle_to_fusing(lm)
        why_padded = obstacle_to_packing(lm) if wanted.stream else ""
        why_twice = why_padded or (obstacle_to_trees(lm) if wanted.trie_share else "")
        if wanted.must and (why := why_twice):
            raise ValueError(f"layout={layout!r}: {type(lm).__name__} can't have it, as {why}")
        self.fused, self.packed = not why_logits, wanted.stream and not why_padded
        self.trie_share = 0.0 if why_twice else wanted.trie_share
        for way, why in (("log-probs are read from logits", why_logits), ("rows are padded", why_padded)):
            if why:
                warnings.warn(f"{type(lm).__name__}: {way}, as {why}", RuntimeWarning, stacklevel=2)

    @property
    def lm(self) -> Any:
        """The causal LM that runs, with this model's adapter active."""
        return causal_lm(activated(self.model))

    def __call__(self, micro: MicroBatch, *, entropy: bool = False) -> Result:
        """Log-probs ``[N]`` of ``log_softmax(logits / temperature)``, and with ``entropy`` that of each distribution.

        Both float32 (float64 from a float64 model), with gradients. A temperature of 0 counts as 1.
        """
        if self.packed:
            inputs = stream_inputs(self.lm, micro.position_ids_T, micro.lengths, micro.tree)
            rows = Rows(micro.token_ids_T[None], inputs, micro.source_N)
            return self._read(rows, micro.targets_N, micro.temperatures_B[micro.row_N], entropy)
        assert micro.tree is None, "a model that takes padded rows was given a trie"
        where, results = [], []
        for group in like_lengths(micro.lengths):
            block = pad(micro, group)
            at = block.row * block.input_ids.shape[1] + block.column
            rows = Rows(block.input_ids, {"attention_mask": block.attention_mask}, at)
            temperature_N = micro.temperatures_B[micro.row_N[block.token]]
            where.append(block.token)
            results.append(self._read(rows, micro.targets_N[block.token], temperature_N, entropy))
        return _in_order(where, results)

    def _read(self, rows: Rows, targets_N: Tensor, temperature_N: Tensor, entropy: bool) -> Result:
        """One pass through the model, then the head: once where all rows have one temperature, as nearly always."""
        head = self._from_hidden(rows) if self.fused else self._from_logits(rows)
        temperature_N = torch.where(temperature_N > 0, temperature_N, 1.0)
        distinct = temperature_N.unique().tolist() or [1.0]
        if len(distinct) == 1:
            return head(slice(None), targets_N, distinct[0], entropy)
        where = [torch.nonzero(temperature_N == value)[:, 0] for value in distinct]
        results = [head(index, targets_N[index], value, entropy) for index, value in zip(where, distinct, strict=True)]
        return _in_order(where, results)

    def _from_hidden(self, rows: Rows) -> Any:
        lm = self.lm
        decoder, output = lm.get_decoder(), lm.get_output_embeddings()
        hidden = decoder(input_ids=rows.input_ids, use_cache=False, **rows.inputs).last_hidden_state.flatten(0, 1)

        def head(which: Any, targets: Tensor, temperature: float, entropy: bool) -> Result:
            return _pair(
                linear_logprob(
                    hidden,
                    output.weight,
                    targets,
                    bias=output.bias,
                    positions=rows.at[which],
                    temperature=temperature,
                    entropy=entropy,
                )
            )

        return head

    def _from_logits(self, rows: Rows) -> Any:
        """Logits of the places that are read alone, where the model can leave out others."""
        lm, inputs, at = self.lm, dict(rows.inputs), rows.at
        if len(rows.input_ids) == 1 and "logits_to_keep" in inspect.signature(type(lm).forward).parameters:
            inputs["logits_to_keep"], at = at, torch.arange(len(at))
        logits_NV = lm(input_ids=rows.input_ids, use_cache=False, **inputs).logits.flatten(0, 1)

        def head(which: Any, targets: Tensor, temperature: float, entropy: bool) -> Result:
            return _pair(logprob(logits_NV[at[which]], targets, temperature=temperature, entropy=entropy))

        return head


def like_lengths(lengths: tuple[int, ...]) -> list[list[int]]:
    """Rows of like length together: a padded block of them holds at most 1.25 places per token."""
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


def _pair(result: Tensor | tuple[Tensor, Tensor]) -> Result:
    return result if isinstance(result, tuple) else (result, None)


def _in_order(where: list[Tensor], results: list[Result]) -> Result:
    """Parts of a result put back where they belong."""
    order = torch.cat(where).argsort()
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs)[order], None if entropies[0] is None else torch.cat(entropies)[order]
