"""Computes log-probabilities of completion tokens without padding, repeated tokens, or logits beyond one tile.

The rows of a micro-batch pass through the model as one stream: packed one after the other (``packed_attention``) or as
the branches of a prefix tree (``prefix_tree_attention``). :func:`turnwise.ops.linear_logprob` computes the completions'
log-probabilities from the last hidden states. If a model doesn't support streams, rows are padded on the right; if its
head can't be used alone, log-probabilities are read from the logits.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnwise.inference.common.hf_model import (
    context_length,
    last_mlp_at,
    recomputes,
    rope_limit,
    token_rows,
    vocabulary_size,
    without_recomputing,
)
from turnwise.inference.common.routed_experts import Routers, replaying, watch_routers
from turnwise.inference.weights.lora import activated
from turnwise.ops import linear_logprob, logprob
from turnwise.train.model.constrained import MOST_LOGITS, constrained_logprob
from turnwise.train.model.micro_batch import MicroBatch, like_lengths, pad, trial
from turnwise.train.model.support import causal_lm, facts_of, in_mode, softcap_of, stream_inputs

Result = tuple[Tensor, Tensor | None]  # log-probs [n] and, on request, entropies [n]


class ModelInputs(NamedTuple):
    """Inputs of the model: ``input_ids [b, T]`` and other arguments. ``at [n]`` are the positions to read, of
    ``b * T``; in a trie siblings read the same ones (``repeated``). ``experts [b * T, L, K]`` are replayed."""

    input_ids: Tensor
    others: dict[str, Any]
    at: Tensor
    repeated: bool = False
    experts: Tensor | None = None


class _Head(NamedTuple):
    """Reads tokens by their indices: their log-probs, the logits ``[n, V]`` that predict them, or those ``[n, k]`` of
    the given ids ``[n, k]``."""

    read: Callable[[Any, Tensor, float, bool], Result]
    logits: Callable[[Tensor], Tensor]
    logits_of: Callable[[Tensor], Tensor]


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


class Forward:
    """Computes the log-probabilities that a causal LM gives the completion tokens of a micro-batch.

    ``model`` is a Hugging Face causal LM, an :class:`~turnwise.inference.weights.lora.AdaptedModel`, whose adapter each
    call activates, or a ``peft`` model, with its adapters as they are set at each call. The constructor tests with a
    few tokens what the model supports, and stores it in ``packed``, ``trie_share`` and ``fused``. It warns if rows must
    be padded, and if log-probs must be read from logits. It replaces SDPA, the library's default attention, by
    ``"turnwise_tree"``, which equals SDPA outside of a stream, and keeps any other attention.

    ``layout`` is one of ``LAYOUTS``; ``dropout`` means that updates run in training mode. Raises ``ValueError`` for a
    required layout, or a training mode, that the model doesn't support. A model on the meta device can't be tested; it
    needs the :meth:`findings` of another process.
    """

    def __init__(self, model: nn.Module, layout: str = "auto", *, dropout: bool = False) -> None:
        self.model = model
        self.fused = self.packed = self.trims = False
        self.trie_share = 0.0
        self._bytes_per_token: float | None = None
        self._routers: Routers | None = None
        lm, wanted = self.lm, LAYOUTS[layout]
        self._rope_limit = rope_limit(lm.config)
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

    def routers(self) -> Routers:
        """Find the model's routers, so that a pass can replay recorded experts.

        Raises ``ValueError`` for a dense model, and for a mixture of experts whose routers are of no known kind.
        """
        if self._routers is None:
            self._routers = watch_routers(self.lm)
        if self._routers is None:
            raise ValueError(f"{type(self.lm).__name__} is dense: expected a mixture of experts, to replay its experts")
        return self._routers

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
        """Return log-probs ``[N]`` of ``log_softmax(logits / temperature)``; with ``entropy`` also entropies ``[N]``.

        Both are float32 (float64 from a float64 model), with gradients. A temperature of 0 counts as 1, and so does
        that of observed tokens. Under a grammar both are those of the distribution over the allowed tokens.
        """
        results = [(tokens, self._read(head, micro, tokens, entropy)) for head, tokens in self._passes(micro)]
        return results[0][1] if self.packed else _in_order([one for one, _ in results], [one for _, one in results])

    def with_squares(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs ``[N]`` as a call does, and the sums ``[N]`` of squares of all tokens' probabilities.

        With any token's log-probs ``l`` at the temperature and ``h`` at half of it, the sum is ``exp(2 * l - h)``: both
        have the same multiple of its logit, which leaves ``logsumexp(2 * logits) - 2 * logsumexp(logits)``.
        """
        temperatures = torch.where(micro.temperatures_B > 0, micro.temperatures_B, 1.0)
        sharper = replace(micro, temperatures_B=temperatures / 2)
        where: list[Any] = []
        results: list[Result] = []
        for head, tokens in self._passes(micro):
            logprobs, halved = (self._read(head, each, tokens, False)[0] for each in (micro, sharper))
            where.append(tokens)
            results.append((logprobs, (2 * logprobs - halved).exp()))
        logprobs_N, squares_N = results[0] if self.packed else _in_order(where, results)
        assert squares_N is not None
        return logprobs_N, squares_N

    def with_others(self, micro: MicroBatch, ids_Nk: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return log-probs and entropies as a call does, and log-probs ``[N, k]`` of other tokens, ``ids_Nk``.

        Tokens under a grammar get those of no distribution.
        """
        where, results, others = [], [], []
        for head, tokens in self._passes(micro):
            logprobs, entropies = self._read(head, micro, tokens, True)
            ids = torch.cat([micro.targets_N[tokens, None], ids_Nk[tokens]], dim=1)
            # The target's log-prob gives the normalizer, so no logits of the whole vocabulary are held.
            scaled = head.logits_of(ids) / self._temperatures(micro, tokens)[:, None]
            where.append(tokens)
            results.append((logprobs, entropies))
            others.append(scaled[:, 1:] - scaled[:, :1] + logprobs[:, None])
        if self.packed:
            return *results[0], others[0]
        return *_in_order(where, results), torch.cat(others)[torch.cat(where).argsort()]

    @property
    def rows(self) -> int:
        """Number of tokens over which its distributions are."""
        lm = self.lm
        return token_rows(lm) or int(lm.get_output_embeddings().weight.shape[0])

    @torch.no_grad()
    def top(self, micro: MicroBatch, k: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the ids ``[N, k]`` of the most likely tokens at each position, and their log-probs ``[N, k]``.

        With ``rows`` it reads only so many rows, those of a smaller head. The micro-batch may be another policy's, so
        its experts are not replayed.
        """
        where, parts = [], []
        for head, tokens in self._passes(micro.without_experts()):
            temperature = self._temperatures(micro, tokens)
            places = torch.arange(len(temperature), device=temperature.device)
            for part in places.split(max(1, MOST_LOGITS // vocabulary_size(self.lm))):
                scaled = _wide(head.logits(part)[:, :rows]) / temperature[part, None]
                parts.append(torch.log_softmax(scaled, dim=-1).topk(k, dim=-1))
            where.append(places if self.packed else tokens)
        order = torch.cat(where).argsort()
        return torch.cat([part.indices for part in parts])[order], torch.cat([part.values for part in parts])[order]

    def _passes(self, micro: MicroBatch) -> Iterator[tuple[_Head, Any]]:
        """Run the model, and yield its head with the indices of the tokens of ``micro`` that the head reads.

        A stream takes one pass, padded rows one for each group of rows of similar length.
        """
        make = self._from_hidden if self.fused else self._from_logits
        if self._rope_limit is not None and max(micro.lengths, default=0) > self._rope_limit:
            raise ValueError(
                f"a row of {max(micro.lengths)} tokens: {type(self.lm).__name__} changes the frequencies of its "
                f"LongRoPE beyond {self._rope_limit}; expected no longer rows"
            )
        if micro.experts_TLK is not None:
            self.routers().check(micro.experts_TLK, "routed_experts of the batch")
        if self.packed:
            others = stream_inputs(self.lm, micro.position_ids_T, micro.lengths, micro.tree)
            shared = micro.tree is not None
            inputs = ModelInputs(micro.token_ids_T[None], others, micro.source_N, shared, micro.experts_TLK)
            yield make(inputs), slice(None)
            return
        assert micro.tree is None, "a model that needs padded rows got a trie"
        for group in like_lengths(micro.lengths):
            block = pad(micro, group)
            at = block.row * block.input_ids.shape[1] + block.column
            mask = {"attention_mask": block.attention_mask}
            yield make(ModelInputs(block.input_ids, mask, at, experts=block.experts)), block.token

    @staticmethod
    def _temperatures(micro: MicroBatch, tokens: Any) -> Tensor:
        temperature_N = micro.temperatures_B[micro.row_N[tokens]]
        if micro.observed_N is not None:  # which no policy sampled
            temperature_N = torch.where(micro.observed_N[tokens], 1.0, temperature_N)
        return torch.where(temperature_N > 0, temperature_N, 1.0)

    def _read(self, head: _Head, micro: MicroBatch, tokens: Any, entropy: bool) -> Result:
        """Read tokens with ``head``, once per temperature; nearly always there is only one.

        ``tokens`` are the indices of the tokens to read among those of ``micro``. Tokens under a grammar are read by
        :func:`constrained_logprob`.
        """
        targets_N, temperature_N = micro.targets_N[tokens], self._temperatures(micro, tokens)
        if micro.mask_index_N is None or micro.masks_UW is None:
            distinct = temperature_N.unique().tolist() or [1.0]
            if len(distinct) == 1:
                return head.read(slice(None), targets_N, distinct[0], entropy)
            free_N = torch.ones_like(targets_N, dtype=torch.bool)
        else:
            free_N = micro.mask_index_N[tokens] < 0
            distinct = temperature_N[free_N].unique().tolist()
        where = [torch.nonzero(free_N & (temperature_N == value))[:, 0] for value in distinct]
        results = [
            head.read(index, targets_N[index], value, entropy) for index, value in zip(where, distinct, strict=True)
        ]
        if micro.mask_index_N is not None and micro.masks_UW is not None:
            index = torch.nonzero(~free_N)[:, 0]
            rows = micro.mask_index_N[tokens][index]
            where.append(index)
            results.append(
                constrained_logprob(
                    head.logits, index, targets_N[index], temperature_N[index], micro.masks_UW, rows, entropy
                )
            )
        return _in_order(where, results)

    def _from_hidden(self, inputs: ModelInputs) -> _Head:
        lm = self.lm
        decoder, head_layer = lm.get_decoder(), lm.get_output_embeddings()
        # Gradient checkpointing repeats the layers in the backward pass, outside of this block.
        last = inputs.at.unique() if self.trims and not recomputes(lm) else None
        with (
            nullcontext() if last is None else last_mlp_at(decoder, last),
            nullcontext() if inputs.experts is None else replaying(inputs.experts, last),
        ):
            output = decoder(input_ids=inputs.input_ids, use_cache=False, **inputs.others)
        hidden = output.last_hidden_state.flatten(0, 1)

        # Taken here, as a sharded model's head is whole only during its pass.
        weight, bias, softcap = head_layer.weight, head_layer.bias, softcap_of(lm)
        if (rows := token_rows(lm)) is not None:  # the others are no tokens
            weight, bias = weight[:rows], None if bias is None else bias[:rows]

        def logits(which: Tensor) -> Tensor:
            raw = nn.functional.linear(hidden[inputs.at[which]], weight, bias)
            return raw if softcap is None else softcap * torch.tanh(raw / softcap)

        def logits_of(ids: Tensor) -> Tensor:
            raw = (_wide(hidden[inputs.at])[:, None] * _wide(weight[ids])).sum(-1)
            raw = raw if bias is None else raw + bias[ids]
            return raw if softcap is None else softcap * torch.tanh(raw / softcap)

        def read(which: Any, targets: Tensor, temperature: float, entropy: bool) -> Result:
            at, pair_of = inputs.at[which], None
            if inputs.repeated:
                # Siblings that read the same position and have the same target share one log-prob.
                vocabulary = weight.shape[0]
                pairs, pair_of = (at * vocabulary + targets).unique(return_inverse=True)
                at, targets = pairs // vocabulary, pairs % vocabulary
            options = {"bias": bias, "positions": at, "temperature": temperature, "entropy": entropy}
            logprobs, entropies = _pair(linear_logprob(hidden, weight, targets, softcap=softcap, **options))
            if pair_of is None:
                return logprobs, entropies
            return logprobs[pair_of], None if entropies is None else entropies[pair_of]

        return _Head(read, logits, logits_of)

    def _from_logits(self, inputs: ModelInputs) -> _Head:
        """Return a head that reads logits; the model computes only the needed ones if it has ``logits_to_keep``."""
        lm, others, at = self.lm, dict(inputs.others), inputs.at
        if len(inputs.input_ids) == 1 and "logits_to_keep" in inspect.signature(type(lm).forward).parameters:
            others["logits_to_keep"], at = at, torch.arange(len(at))
        with nullcontext() if inputs.experts is None else replaying(inputs.experts):
            output = lm(input_ids=inputs.input_ids, use_cache=False, **others)
        logits_NV = output.logits.flatten(0, 1)[:, : token_rows(lm)]

        def read(which: Any, targets: Tensor, temperature: float, entropy: bool) -> Result:
            return _pair(logprob(logits_NV[at[which]], targets, temperature=temperature, entropy=entropy))

        return _Head(read, lambda which: logits_NV[at[which]], lambda ids: _wide(logits_NV[at].gather(1, ids)))


def _wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32, or as it is in float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _pair(result: Tensor | tuple[Tensor, Tensor]) -> Result:
    return result if isinstance(result, tuple) else (result, None)


def _in_order(where: list[Tensor], results: list[Result]) -> Result:
    """Join parts of a result; ``where`` has the original indices of each part."""
    order = torch.cat(where).argsort()
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs)[order], None if entropies[0] is None else torch.cat(entropies)[order]
