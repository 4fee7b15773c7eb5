"""Computes log-probabilities of completion tokens without padding, repeated tokens, or logits beyond one tile.

The rows of a micro-batch pass through the model as one stream: packed one after the other (``packed_attention``) or as
the branches of a prefix tree (``prefix_tree_attention``). :func:`turnwise.train.model.head.from_hidden` reads the
completions' log-probabilities from the last hidden states. If a model doesn't support streams, rows are padded on the
right; if its head can't be used alone, log-probabilities are read from the logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnwise.inference.common.hf_model import (
    context_length,
    recomputes,
    rope_limit,
    token_rows,
    without_recomputing,
)
from turnwise.inference.common.norms import fuse_norms
from turnwise.inference.weights.lora import activated
from turnwise.train.model.head import (
    Head,
    ModelInputs,
    Result,
    decode,
    from_hidden,
    from_logits,
    in_order,
    read_tokens,
)
from turnwise.train.model.micro_batch import MicroBatch, like_lengths, pad, trial
from turnwise.train.model.support import causal_lm, facts_of, in_mode, stream_inputs
from turnwise.types.passes import ENTROPIES, LOGPROBS, Needs, Read


class Layout(NamedTuple):
    """Layout of rows in a model: one ``stream`` or padded rows. A stream becomes a trie if the trie has at most
    ``trie_share`` of the rows' tokens. If ``required``, a model that doesn't support the layout is an error."""

    stream: bool
    trie_share: float
    required: bool


LAYOUTS = {
    "auto": Layout(stream=True, trie_share=0.9, required=False),
    "trie": Layout(stream=True, trie_share=1.0, required=True),
    "packed": Layout(stream=True, trie_share=0.0, required=True),
    "padded": Layout(stream=False, trie_share=0.0, required=False),
}
"""Layouts by the values of ``update.sequence_layout``."""


class Pass(NamedTuple):
    """One pass of the model, and the indices of the tokens of the micro-batch that it reads."""

    inputs: ModelInputs
    token: Any


class Forward:
    """Computes the log-probabilities that a causal LM gives the completion tokens of a micro-batch.

    ``model`` is a Hugging Face causal LM, an :class:`~turnwise.inference.weights.lora.AdaptedModel`, whose adapter each
    call activates, or a ``peft`` model, with its adapters as they are set at each call. The constructor tests with a
    few tokens what the model supports, and stores it in ``packed``, ``trie_share`` and ``fused``. It warns if rows must
    be padded, and if log-probs must be read from logits. It replaces SDPA, the library's default attention, by
    ``"turnwise_tree"``, which equals SDPA outside of a stream, and keeps any other attention. On a CPU RMS norms run in
    one kernel.

    ``layout`` is one of ``LAYOUTS``; ``dropout`` means that updates run in training mode. ``head_memory`` bounds the
    bytes of the head's logits. Raises ``ValueError`` for a
    required layout, or a training mode, that the model doesn't support. A model on the meta device can't be tested; it
    needs the :meth:`findings` of another process.
    """

    def __init__(
        self, model: nn.Module, layout: str = "auto", *, dropout: bool = False, head_memory: int | None = None
    ) -> None:
        self.model, self.head_memory = model, head_memory
        self.fused = self.packed = self.trims = False
        self.trie_share = 0.0
        self._bytes_per_token: float | None = None
        lm, wanted = self.lm, LAYOUTS[layout]
        self._rope_limit = rope_limit(lm.config)
        fuse_norms(lm)
        if lm.get_input_embeddings().weight.is_meta:
            return
        facts = facts_of(model, stream=wanted.stream, shared=wanted.trie_share > 0, dropout=dropout)
        reason_unfused, reason_padded = facts.reason_unfused, facts.reason_padded if wanted.stream else ""
        reason_unshared = reason_padded or (facts.reason_unshared if wanted.trie_share else "")
        if wanted.required and reason_unshared:
            raise ValueError(f"layout={layout!r}: {facts.kind} doesn't support it, as {reason_unshared}")
        self.fused, self.packed = not reason_unfused, wanted.stream and not reason_padded
        self.trie_share = 0.0 if reason_unshared else wanted.trie_share
        self.trims = facts.trims_last_mlp
        if facts.unread:
            text = f"no pass runs {len(facts.unread)} layers with the adapter, such as {facts.unread[0]!r}"
            warnings.warn(f"{facts.kind}: {text}, so it does not train there", RuntimeWarning, stacklevel=2)
        reason_short = "" if self._rope_limit is None else "longer ones would change the frequencies of its LongRoPE"
        fallbacks = {
            "log-probs are read from logits": reason_unfused,
            "rows are padded": reason_padded,
            f"rows have at most {self._rope_limit} tokens": reason_short,
        }
        for fallback, reason in fallbacks.items():
            if reason:
                warnings.warn(f"{facts.kind}: {fallback}, as {reason}", RuntimeWarning, stacklevel=2)

    def findings(self) -> dict[str, Any]:
        """Return the results of the tests, for a process with the same model."""
        tested = {name: getattr(self, name) for name in ("fused", "packed", "trims", "trie_share")}
        return {**tested, "attention": self.lm.config._attn_implementation}

    def adopt(self, findings: dict[str, Any]) -> None:
        """Apply the :meth:`findings` of another process."""
        attention = findings.pop("attention")
        for name, value in findings.items():
            setattr(self, name, value)
        if self.lm.config._attn_implementation != attention:
            self.lm.set_attn_implementation(attention)

    def bytes_per_token(self) -> float:
        """Return the bytes of activations that a pass keeps for its backward pass, per token.

        They are counted in a pass of two short rows, so the number depends only on the model. If layers recompute, one
        of them counts in full.
        """
        if self._bytes_per_token is None:
            kept = self._kept_bytes()
            if recomputes(self.lm):
                with without_recomputing():
                    kept += self._kept_bytes() / max(1, self.lm.config.get_text_config().num_hidden_layers)
            self._bytes_per_token = kept
        return self._bytes_per_token

    def _kept_bytes(self) -> float:
        lm = self.lm
        length = min(32, context_length(lm.config) or 32)
        weights = {weight.untyped_storage().data_ptr() for weight in lm.parameters()}
        tensors: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            tensors[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        micro = trial(self.rows, length, lm.get_input_embeddings().weight.device)
        with in_mode(lm), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = self(micro, entropy=True)
        del result
        kept = sum(x.untyped_storage().nbytes() for key, x in tensors.items() if key not in weights)
        return kept / (2 * length)

    @property
    def lm(self) -> Any:
        """The causal LM, with this model's adapter active."""
        return causal_lm(activated(self.model))

    def __call__(self, micro: MicroBatch, *, entropy: bool = False) -> Result:
        """Return log-probs ``[N]``, and with ``entropy`` entropies ``[N]``."""
        read = self.read(micro, ENTROPIES if entropy else LOGPROBS)
        return read.logprobs_N, read.entropies_N

    def read(self, micro: MicroBatch, needs: Needs = LOGPROBS) -> Read:
        """Return what is needed of each token. A temperature of 0 counts as 1, and so does that of observed tokens.

        Under a grammar, log-probs, entropies and squares are those of the distribution over the allowed tokens, and
        where the sampler left tokens out, over the kept ones.
        """
        passes = self._passes(micro)
        if self.fused:
            return self._read(self._head(micro, passes), micro, slice(None), needs)
        parts = [(x.token, self._read(from_logits(self.lm, x.inputs), micro, x.token, needs)) for x in passes]
        return parts[0][1] if self.packed else in_order(*zip(*parts, strict=True))

    @property
    def rows(self) -> int:
        """Number of tokens over which its distributions are."""
        lm = self.lm
        return token_rows(lm) or int(lm.get_output_embeddings().weight.shape[0])

    def _passes(self, micro: MicroBatch) -> Iterator[Pass]:
        """Yield the passes of the model. A stream takes one, padded rows one for each group of rows of similar
        length."""
        if self._rope_limit is not None and max(micro.lengths, default=0) > self._rope_limit:
            raise ValueError(
                f"a row of {max(micro.lengths)} tokens: {type(self.lm).__name__} changes the frequencies of its "
                f"LongRoPE beyond {self._rope_limit}; expected no longer rows"
            )
        columns = tuple(micro.columns.values())
        if self.packed:
            others = stream_inputs(self.lm, micro.position_ids_T, micro.lengths, micro.tree)
            yield Pass(ModelInputs(micro.token_ids_T[None], others, micro.source_N, columns), slice(None))
            return
        assert micro.tree is None, "a model that needs padded rows got a trie"
        for group in like_lengths(micro.lengths):
            block = pad(micro, group)
            at = block.row * block.input_ids.shape[1] + block.column
            mask = {"attention_mask": block.attention_mask}
            padded = tuple(column.padded(block.place) for column in columns)
            yield Pass(ModelInputs(block.input_ids, mask, at, padded), block.token)

    def _head(self, micro: MicroBatch, passes: Iterable[Pass]) -> Head:
        """Run the decoder, and return a head that reads all tokens of ``micro``."""
        states: list[Tensor] = []
        at_N, count = torch.empty_like(micro.source_N), 0
        for inputs, tokens in passes:
            states.append(decode(self.lm, inputs, trims=self.trims))
            at_N[tokens] = inputs.at + count
            count += len(states[-1])
        hidden = states[0] if len(states) == 1 else torch.cat(states)
        return from_hidden(self.lm, hidden, at_N, repeated=micro.tree is not None, max_memory=self.head_memory)

    def _read(self, head: Head, micro: MicroBatch, tokens: Any, needs: Needs) -> Read:
        """Read ``tokens``, indices among those of ``micro``."""
        masks_UW = index_n = None
        if micro.allowed is not None:
            masks_UW, index_n = micro.allowed.masks, micro.allowed.mask_index[tokens]
        if needs.others_Nk is not None:
            needs = replace(needs, others_Nk=needs.others_Nk[tokens])
        temperature_n = micro.temperatures_N[tokens]
        found = (column.restriction(tokens) for column in micro.columns.values())
        restrictions = [each for each in found if each is not None]
        return read_tokens(head, micro.targets_N[tokens], temperature_n, masks_UW, index_n, needs, restrictions)
