"""Reads a model's head: log-probs of tokens, entropies, other tokens, and what else the terms of a loss need of a pass.

A head reads the last hidden states (:func:`from_hidden`), which the decoder makes (:func:`decode`), or the logits of a
model whose head can't be used alone (:func:`from_logits`). Under a grammar, the distribution is the one from which
constrained tokens are drawn: ``log_softmax(logits / temperature)`` over the allowed tokens alone, so a token without an
alternative has exactly 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnwise.inference.common.hf_model import last_mlp_at, recomputes, token_rows, vocabulary_size
from turnwise.inference.common.token_masks import unpack_masks
from turnwise.ops import HeadLoss, linear_logprob, linear_policy_loss, logprob
from turnwise.train.model.support import softcap_of
from turnwise.types import Column
from turnwise.types.passes import Needs, Read, Restriction

MAX_LOGITS = 1 << 24
"""Logits that a chunk of tokens may have at a time: 64 MiB in float32."""

Result = tuple[Tensor, Tensor | None]  # log-probs [n] and, on request, entropies [n]


class ModelInputs(NamedTuple):
    """Inputs of the model: ``input_ids [b, T]`` and other arguments. ``at [n]`` are the positions to read, of
    ``b * T``. ``columns`` watch the pass."""

    input_ids: Tensor
    others: dict[str, Any]
    at: Tensor
    columns: tuple[Column, ...] = ()


class Head(NamedTuple):
    """Reads tokens by their indices: their log-probs, the logits ``[n, V]`` that predict them, or those ``[n, k]`` of
    the given ids ``[n, k]``, or of pairs ``[P]`` of a token and an id; and the hidden states ``[n, H]`` of all tokens
    before them. ``loss`` reads all tokens at their temperatures into a loss; ``None`` for a head that reads logits."""

    read: Callable[[Any, Tensor, float, bool], Result]
    logits: Callable[[Tensor], Tensor]
    logits_of: Callable[[Tensor], Tensor]
    pairs: Callable[[Tensor, Tensor], Tensor]
    hidden: Callable[[], Tensor]
    vocabulary: int
    loss: Callable[[Tensor, Tensor, Mapping[str, Any]], HeadLoss] | None = None


def read_tokens(
    head: Head,
    targets_n: Tensor,
    temperature_n: Tensor,
    masks_UW: Tensor | None,
    mask_index_n: Tensor | None,
    needs: Needs,
    restrictions: Sequence[Restriction] = (),
) -> Read:
    """Read tokens with ``head``; those of ``restrictions`` over their own tokens, others with an index into
    ``masks_UW`` under their grammars."""
    grammars = (masks_UW, mask_index_n, restrictions)
    read: dict[str, Any] = {"logprobs_N": None}
    in_one = None if restrictions else _loss_in_one(head, targets_n, temperature_n, mask_index_n, needs)
    if in_one is not None:
        read |= {"logprobs_N": in_one.logprobs, "loss": in_one}
    elif needs.logprobs or needs.loss is not None:
        logprobs, entropies = read_targets(head, targets_n, temperature_n, *grammars, entropy=needs.entropy)
        read |= {"logprobs_N": logprobs, "entropies_N": entropies}
    if needs.squares:
        # At half the temperature each logit has the same multiple, so l and h give the sum of squares exp(2 * l - h).
        halved, _ = read_targets(head, targets_n, temperature_n / 2, *grammars, entropy=False)
        read["squares_N"] = (2 * read["logprobs_N"] - halved).exp()
    if needs.hidden:
        read["hidden_N"] = head.hidden()
    if needs.others_Nk is not None:
        # The target's log-prob gives the normalizer, so no logits of the whole vocabulary are held.
        scaled = head.logits_of(torch.cat([targets_n[:, None], needs.others_Nk], dim=1)) / temperature_n[:, None]
        read["others_Nk"] = scaled[:, 1:] - scaled[:, :1] + read["logprobs_N"][:, None]
    if needs.top_k:
        read |= _read_top(head, temperature_n, needs)
    return Read(**read)


def _loss_in_one(
    head: Head, targets_n: Tensor, temperature_n: Tensor, mask_index_n: Tensor | None, needs: Needs
) -> HeadLoss | None:
    """Compute the needed loss with the head's log-probs; ``None`` if tokens are under grammars."""
    if needs.loss is None or needs.logprobs or head.loss is None:
        return None
    if mask_index_n is not None and bool((mask_index_n >= 0).any()):
        return None
    return head.loss(targets_n, temperature_n, needs.loss)


@torch.no_grad()
def _read_top(head: Head, temperature_n: Tensor, needs: Needs) -> dict[str, Tensor]:
    """Return the ids ``[n, k]`` of the most likely tokens and their log-probs, from a chunk of logits at a time."""
    places, parts = torch.arange(len(temperature_n), device=temperature_n.device), []
    for part in places.split(max(1, MAX_LOGITS // head.vocabulary)):
        scaled = wide(head.logits(part)[:, : needs.rows]) / temperature_n[part, None]
        parts.append(torch.log_softmax(scaled, dim=-1).topk(needs.top_k, dim=-1))
    return {
        "top_ids_Nk": torch.cat([part.indices for part in parts]),
        "top_Nk": torch.cat([part.values for part in parts]),
    }


def read_targets(
    head: Head,
    targets_n: Tensor,
    temperature_n: Tensor,
    masks_UW: Tensor | None,
    mask_index_n: Tensor | None,
    restrictions: Sequence[Restriction],
    *,
    entropy: bool,
) -> Result:
    """Return log-probs and entropies, read once per temperature; nearly always there is only one."""
    open_n = torch.ones_like(targets_n, dtype=torch.bool)
    for restriction in restrictions:
        open_n = open_n & ~restriction.where_n
    free_n = open_n if mask_index_n is None else open_n & (mask_index_n < 0)
    distinct = temperature_n[free_n].unique().tolist()
    if mask_index_n is None and not restrictions and len(distinct) <= 1:
        return head.read(slice(None), targets_n, distinct[0] if distinct else 1.0, entropy)
    where = [torch.nonzero(free_n & (temperature_n == value))[:, 0] for value in distinct]
    results = [head.read(index, targets_n[index], value, entropy) for index, value in zip(where, distinct, strict=True)]
    if masks_UW is not None and mask_index_n is not None:
        index = torch.nonzero(open_n & ~free_n)[:, 0]
        rows = mask_index_n[index]
        constrained = constrained_logprob(
            head.logits, index, targets_n[index], temperature_n[index], masks_UW, rows, entropy
        )
        where, results = [*where, index], [*results, constrained]
    for restriction in restrictions:
        index = torch.nonzero(restriction.where_n)[:, 0]
        logprobs, entropies = restriction.read(head.pairs, index, targets_n[index], temperature_n[index])
        where, results = [*where, index], [*results, (logprobs, entropies if entropy else None)]
    return tuple(joined(column, where) for column in zip(*results, strict=True))  # type: ignore[return-value]


def in_order(where: Sequence[Tensor], reads: Sequence[Read]) -> Read:
    """Join parts of a result; ``where`` has the original indices of each part."""
    return Read(*(joined(column, where) for column in zip(*reads, strict=True)))


def joined(parts: Sequence[Tensor | None], where: Sequence[Tensor]) -> Tensor | None:
    """Return the rows of all ``parts`` in their original order; ``None`` if there are none."""
    given = [part for part in parts if part is not None]
    return torch.cat(given)[torch.cat(list(where)).argsort()] if given else None


def decode(lm: Any, inputs: ModelInputs, *, trims: bool) -> Tensor:
    """Run the decoder, and return its last hidden states ``[b * T, H]``. With ``trims`` the last MLP runs only at the
    positions that are read."""
    decoder = lm.get_decoder()
    # Gradient checkpointing repeats the layers in the backward pass, outside of this block.
    last = inputs.at.unique() if trims and not recomputes(lm) else None
    with nullcontext() if last is None else last_mlp_at(decoder, last), watched(lm, inputs.columns, last):
        output = decoder(input_ids=inputs.input_ids, use_cache=False, **inputs.others)
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden


def from_hidden(lm: Any, hidden: Tensor, at_N: Tensor, *, repeated: bool, max_memory: int | None = None) -> Head:
    """Return a head that reads last hidden states ``[M, H]`` at the positions ``at_N``.

    In a trie siblings read the same positions (``repeated``). ``max_memory`` bounds the bytes of logits.
    """
    head_layer = lm.get_output_embeddings()
    # Taken here, as a sharded model's head is whole only during its pass.
    weight, bias, softcap = head_layer.weight, head_layer.bias, softcap_of(lm)
    if (rows := token_rows(lm)) is not None:  # the others are no tokens
        weight, bias = weight[:rows], None if bias is None else bias[:rows]
    options = {"bias": bias, "softcap": softcap, "max_memory": max_memory}

    def logits(which: Tensor) -> Tensor:
        raw = nn.functional.linear(hidden[at_N[which]], weight, bias)
        return raw if softcap is None else softcap * torch.tanh(raw / softcap)

    def logits_of(ids: Tensor) -> Tensor:
        raw = (wide(hidden[at_N])[:, None] * wide(weight[ids])).sum(-1)
        raw = raw if bias is None else raw + bias[ids]
        return raw if softcap is None else softcap * torch.tanh(raw / softcap)

    def pairs(which: Tensor, ids: Tensor) -> Tensor:
        raw = PairLogits.apply(hidden, weight, at_N[which], ids)
        raw = raw if bias is None else raw + bias[ids]
        return raw if softcap is None else softcap * torch.tanh(raw / softcap)

    def places(at: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Siblings that read the same position at the same temperature, and have the same target, share one log-prob:
        return each once, and which of them each token reads."""
        if not repeated:
            return at, targets, heat, None
        distinct, which = heat.unique(return_inverse=True)
        keys, read_by = ((at * weight.shape[0] + targets) * len(distinct) + which).unique(return_inverse=True)
        if len(keys) == len(at):
            return at, targets, heat, None
        pairs, which = keys // max(len(distinct), 1), keys % max(len(distinct), 1)
        return pairs // weight.shape[0], pairs % weight.shape[0], distinct[which], read_by

    def read(which: Any, targets: Tensor, temperature: float, entropy: bool) -> Result:
        at = at_N[which]
        at, targets, _, pair_of = places(at, targets, torch.ones_like(at))
        made = linear_logprob(
            hidden, weight, targets, positions=at, temperature=temperature, entropy=entropy, **options
        )
        logprobs, entropies = _pair(made)
        if pair_of is None:
            return logprobs, entropies
        return logprobs[pair_of], None if entropies is None else entropies[pair_of]

    def loss(targets: Tensor, temperature_N: Tensor, arguments: Mapping[str, Any]) -> HeadLoss:
        at, targets, temperature, pair_of = places(at_N, targets, temperature_N)
        into = arguments.get("grad_into")
        into = None if into is None else {"grad_into": into[: weight.shape[0]]}
        return linear_policy_loss(
            hidden, weight, targets, positions=at, reads=pair_of, temperature=temperature,
            **{**options, **arguments, **(into or {})},
        )  # fmt: skip

    return Head(read, logits, logits_of, pairs, lambda: hidden[at_N], vocabulary_size(lm), loss)


class PairLogits(torch.autograd.Function):
    """Logits ``[P]`` of pairs of a position and a token's id, float32 (float64 from float64).

    A chunk of pairs is computed at a time, also in the backward pass, so that no ``[P, H]`` is held.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, at: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, at, ids)
        made = wide(hidden.new_empty(len(ids)))
        for part in _pair_chunks(hidden, ids):
            made[part] = (wide(hidden[at[part]]) * wide(weight[ids[part]])).sum(-1)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, at, ids = ctx.saved_tensors
        to_hidden, to_weight = (
            wide(torch.zeros_like(each)) if needed else None
            for each, needed in zip((hidden, weight), ctx.needs_input_grad, strict=False)
        )
        for part in _pair_chunks(hidden, ids):
            if to_hidden is not None:
                to_hidden.index_add_(0, at[part], grad[part, None] * wide(weight[ids[part]]))
            if to_weight is not None:
                to_weight.index_add_(0, ids[part], grad[part, None] * wide(hidden[at[part]]))
        made = zip((to_hidden, to_weight), (hidden, weight), strict=True)
        return (*(None if each is None else each.to(like.dtype) for each, like in made), None, None)


def _pair_chunks(hidden: Tensor, ids: Tensor) -> Iterator[slice]:
    size = max(1, MAX_LOGITS // hidden.shape[-1])
    return (slice(start, start + size) for start in range(0, len(ids), size))


@contextmanager
def watched(lm: Any, columns: Sequence[Column], last: Tensor | None = None) -> Iterator[None]:
    """Let ``columns`` watch the pass of the block."""
    with ExitStack() as stack:
        for column in columns:
            stack.enter_context(column.during(lm, last))
        yield


def from_logits(lm: Any, inputs: ModelInputs) -> Head:
    """Run the model, and return a head that reads logits; it computes only the needed ones if the model has
    ``logits_to_keep``."""
    others, at = dict(inputs.others), inputs.at
    if len(inputs.input_ids) == 1 and "logits_to_keep" in inspect.signature(type(lm).forward).parameters:
        others["logits_to_keep"], at = at, torch.arange(len(at))
    outputs: list[Any] = []
    hook = lm.get_decoder().register_forward_hook(lambda module, given, output: outputs.append(output))
    try:
        with watched(lm, inputs.columns):
            output = lm(input_ids=inputs.input_ids, use_cache=False, **others)
    finally:
        hook.remove()
    logits_NV = output.logits.flatten(0, 1)[:, : token_rows(lm)]

    def read(which: Any, targets: Tensor, temperature: float, entropy: bool) -> Result:
        return _pair(logprob(logits_NV[at[which]], targets, temperature=temperature, entropy=entropy))

    return Head(
        read,
        lambda which: logits_NV[at[which]],
        lambda ids: wide(logits_NV[at].gather(1, ids)),
        lambda which, ids: wide(logits_NV[at[which], ids]),
        lambda: outputs[-1].last_hidden_state.flatten(0, 1)[inputs.at],
        vocabulary_size(lm),
    )


def wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32, or as it is in float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _pair(result: Tensor | tuple[Tensor, Tensor]) -> Result:
    return result if isinstance(result, tuple) else (result, None)


def constrained_logprob(
    logits: Callable[[Tensor], Tensor],
    index_n: Tensor,
    targets_n: Tensor,
    temperature_n: Tensor,
    masks_UW: Tensor,
    mask_index_n: Tensor,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs ``[n]``, and with ``entropy`` entropies ``[n]``, of the constrained distributions.

    ``logits(index)`` gives the logits ``[m, V]`` of tokens ``index [m]``. Chunks of tokens are computed again in the
    backward pass, so that only one chunk of logits is held. A target that its mask doesn't allow gets ``-inf``.
    """

    def read(index: Tensor, targets: Tensor, temperature: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        raw = logits(index)
        raw = raw if raw.dtype == torch.float64 else raw.float()
        allowed = unpack_masks(masks_UW[rows], raw.shape[1])
        scaled = (raw / temperature[:, None].to(raw.dtype)).masked_fill(~allowed, -torch.inf)
        logprobs = torch.log_softmax(scaled, dim=-1)
        finite = logprobs.masked_fill(~allowed, 0.0)
        entropies = -(finite.exp().masked_fill(~allowed, 0.0) * finite).sum(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropies

    size = max(1, MAX_LOGITS // (8 * masks_UW.shape[1]))
    chunks = zip(*(column.split(size) for column in (index_n, targets_n, temperature_n, mask_index_n)), strict=True)
    parts = [checkpoint(read, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    logprobs, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, entropies if entropy else None
