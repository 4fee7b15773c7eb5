"""Compute LM head and policy loss in one pass.

The gradient of a chunk of tokens is formed while the chunk's logits are in memory, so logits are computed only once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core, select_backend, serves_by_default, stream_of
from turnwise.ops.common.layout import RowLayout, Streams, check_tensors, transform_reason
from turnwise.ops.logprob import linear_frozen
from turnwise.ops.logprob.checks import as_autocast, check_head, check_id_values, make_softmax
from turnwise.ops.logprob.choice import FEW, Chunks, Sizes, choose_chunks, device_of, one_pass, prefers_triton
from turnwise.ops.logprob.linear_logprob import linear_logprob
from turnwise.ops.logprob.linear_native import Gradients, Head, spread
from turnwise.ops.logprob.tiles import Upstream, new_state, scan
from turnwise.ops.loss.aggregation import Aggregation, find_aggregation
from turnwise.ops.loss.arguments import (
    check_call,
    make_normalizer,
    make_objective,
    make_selected,
    warn_if_ambiguous,
)
from turnwise.ops.loss.options import KL, Clip, ImportanceCorrection, Variant
from turnwise.ops.loss.policy_loss import PolicyLoss, policy_loss

# Tokens of a chunk on a CPU: a sixteenth of all tokens, but at least _LEAST (by the bytes of a logit). The chunk's
# logits stay within _BYTES, unless that would leave less than half of _LEAST. Larger chunks would not be faster.
_LEAST, _BYTES = {2: 512, 4: 160}, 1 << 28
_COLUMNS = 2048  # columns of one product on a CPU


# ---------------------------------------------------------------------------------------------------------------------
# Fused
# ---------------------------------------------------------------------------------------------------------------------
class TokenStreams(NamedTuple):
    """Inputs of the loss per token, ``[M]`` each, in the order of ``targets``; ``weight`` is its factor in the sum."""

    weight: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None

    def pick(self, which: slice | Tensor) -> TokenStreams:
        return TokenStreams(*(None if stream is None else stream[which] for stream in self))  # type: ignore[arg-type]


TokenGradient = Callable[[Tensor, TokenStreams], Tensor]  # (logprob [m], its tokens) -> gradient [m] of the loss


def token_gradient(
    clip: Clip | None, variant: Variant | None, kl: KL | None, correction: ImportanceCorrection | None
) -> TokenGradient:
    """Make a function that gives the gradient of a token-level loss. It treats a chunk as one sequence."""

    def gradient(logprob: Tensor, tokens: TokenStreams) -> Tensor:
        leaf = logprob.detach().requires_grad_()
        size = leaf.shape[0]
        with torch.enable_grad():
            result = policy_loss(
                leaf,
                tokens.old_logprobs,
                tokens.advantages,
                mask=tokens.mask,
                cu_seqlens=torch.arange(0, size + 1, size, device=leaf.device),
                clip=clip,
                variant=variant,
                kl=kl,
                ref_logprobs=tokens.ref_logprobs,
                correction=correction,
                rollout_logprobs=tokens.rollout_logprobs,
                normalizer=torch.ones((), device=leaf.device),
            )
        return torch.autograd.grad(result.loss, leaf)[0] * tokens.weight

    return gradient


def _chunks(head: Head) -> Chunks:
    """The chunks of tokens and the columns of a tile, the same on every rank of a head that is split."""
    vocabulary = head.vocabulary if head.shard is None else head.shard.widest
    if head.products.on_gpu:
        return choose_chunks(head.sizes._replace(vocabulary=vocabulary), device_of(head.hidden))
    size = head.products.dtype.itemsize
    least = _LEAST[size]
    return Chunks(min(max(least, head.tokens // 16), max(least // 2, _BYTES // (vocabulary * size), 1)), _COLUMNS)


def fused(
    head: Head, gradients: Gradients, tokens: TokenStreams, loss: TokenGradient, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Fill ``gradients``, and return ``logprob`` and ``entropy [M]``. Holds the logits of one chunk at a time."""
    rows, width = _chunks(head)
    chunks = head.blocks(rows)
    total = gradients.weight
    if gradients.need_weight and len(chunks) > FEW and total.dtype is not torch.float32:
        total = torch.empty_like(total, dtype=torch.float32)
    # Sums over many chunks lose too much in bfloat16, so they run in float32 and are rounded once at the end.
    logprobs, entropies = [], []
    for chunk in chunks:
        logprob, entropy_of_chunk = _chunk(head, gradients, total, tokens.pick(chunk), loss, entropy, chunk, width)
        logprobs.append(logprob)
        entropies.append(entropy_of_chunk)
    if gradients.need_weight:
        if not chunks:
            gradients.weight.zero_()
        elif total is not gradients.weight:
            gradients.weight.copy_(total)
    none = torch.empty(0, dtype=torch.float32, device=tokens.weight.device)
    return torch.cat([none, *logprobs]), torch.cat([none, *entropies]) if entropy else None


def _chunk(
    head: Head,
    gradients: Gradients,
    total: Tensor,
    tokens: TokenStreams,
    loss: TokenGradient,
    entropy: bool,
    chunk: slice,
    width: int,
) -> tuple[Tensor, Tensor]:
    products, rows = head.products, head.rows(chunk)
    state = new_state(rows.shape[0], rows)
    # Scan all tiles of the chunk for its log-probabilities, and keep their logits.
    tiles = []
    for columns in head.columns(width):
        tile = head.tile(rows, chunk, columns)
        scan(tile, state, entropy)
        tiles.append(tile)
    logprob, lse, entropies = head.finish(state, chunk, entropy)
    # With the loss's gradient known, turn each tile of logits into its gradient and multiply it out.
    upstream = Upstream(lse, loss(logprob, tokens), None, None)
    sums = gradients.sums(chunk) if gradients.need_hidden else None
    for tile in tiles:
        columns = slice(tile.first, tile.first + tile.logits.shape[1])
        part = head.weight[columns]
        d = head.gradient(tile, upstream)
        gradients.add_bias(columns, d)
        if sums is not None:
            products.add_hidden(sums, d, part)
        if gradients.need_weight:
            products.weight_gradient(total[columns], d, rows, add=chunk.start > 0)
    if sums is not None:
        gradients.keep_hidden(chunk, sums)
    return logprob, entropies


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------
class _Attach(torch.autograd.Function):
    """Attaches to ``loss`` the gradients that were computed with it. They are gradients of ``scale`` times the loss.

    They are as large as the weight, so the backward scales them in place and hands them to the caller. A second
    backward through the same graph recomputes them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        grads: list[Gradients],
        recompute: Callable[[], Gradients],
        scale: Tensor | None,
        *leaves: Tensor | None,
    ) -> Tensor:
        ctx.grads, ctx.recompute, ctx.scale = grads, recompute, scale
        ctx.mark_dirty(loss)  # returns the same tensor; the caller could not change a view of it in place
        ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_policy_loss: the gradient can't be differentiated again; use backend='torch' for create_graph"
            )
        found = ctx.grads.pop() if ctx.grads else ctx.recompute()
        factor = grad_loss if ctx.scale is None else grad_loss / ctx.scale
        needed = found.need_hidden, found.need_weight, found.need_bias
        out = []
        for values, wanted, dtype in zip((found.hidden, found.weight, found.bias), needed, ctx.dtypes, strict=True):
            if wanted:
                _scale_in_place(values, factor)
            out.append(values.to(dtype) if wanted else None)
        return None, None, None, None, *out


def _scale_in_place(values: Tensor, factor: Tensor) -> None:
    """Multiply by a factor, which is usually 1. On a GPU the kernel reads it and returns at once for 1."""
    device, core = native_core(values)
    if device == "cuda" and values.numel():
        core.cuda_scale(values, factor.float().contiguous(), stream_of(values))
    elif device == "cpu" and factor.item() != 1.0:
        values.mul_(factor)


# ---------------------------------------------------------------------------------------------------------------------
# Public function
# ---------------------------------------------------------------------------------------------------------------------
def needs_rows(variant: Variant | None, correction: ImportanceCorrection | None) -> bool:
    """True if a token's loss depends on other tokens' log-probabilities, so that all of them are needed first."""
    if variant is not None and (variant.by_row or variant.selects):
        return True
    return correction is not None and correction.level == "sequence"


def _serves(hidden: Tensor, backend: str | None, reason: str) -> bool:
    """True if the compiled kernels serve the chunks. Otherwise the two separate ops choose or reject a backend."""
    if hidden.dtype is torch.float64:
        return False
    return select_backend(backend, hidden, native=reason, triton=reason) == "native"


def _is_faster(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: int, copied: bool, backend: str | None
) -> bool:
    """True if one pass is expected to be faster than two ops and to need no more memory."""
    frozen = linear_frozen.serves(hidden, weight, bias)
    triton = prefers_triton(hidden, frozen) and serves_by_default("triton", backend, hidden)
    if frozen and not triton:
        return False  # two ops make no more products, and their logits stay in the cache
    if native_core(hidden)[0] == "cpu":
        return True
    sizes = Sizes(tokens, hidden.shape[1], weight.shape[0], hidden.element_size(), copied)
    device = device_of(hidden)
    return one_pass(sizes, choose_chunks(sizes, device), device, weight.requires_grad, triton)


def _scale_of(tokens: TokenStreams) -> Tensor:
    """The power of two that brings the largest token weight near 1."""
    if not tokens.weight.numel():
        return torch.ones((), device=tokens.weight.device)
    return torch.ldexp(torch.ones_like(tokens.weight[0]), -torch.frexp(tokens.weight.max()).exponent)


def _tokens(old_logprobs: Tensor, advantages: Tensor, aggregation: Aggregation, batch: dict[str, Any]) -> TokenStreams:
    """Build the streams with a weight and an advantage per token. Both are known before any logit is computed."""
    cu_seqlens, mask, actor_ids = batch["cu_seqlens"], batch["mask"], batch["actor_ids"]
    rows = RowLayout(old_logprobs, cu_seqlens)
    lengths = rows.sum((torch.ones_like(old_logprobs) if mask is None else mask != 0).double())
    normalizer = batch["normalizer"]
    if normalizer is None:
        normalizer = aggregation.normalizer(lengths, actor_ids, batch["num_actors"], batch["max_length"])
    weights = aggregation.weights(lengths, normalizer.double(), actor_ids)
    return TokenStreams(
        rows.spread(weights.float()),
        old_logprobs,
        rows.spread(advantages),
        mask,
        batch["ref_logprobs"],
        batch["rollout_logprobs"],
    )


def _one_pass(
    whole: Head, tokens: TokenStreams, loss: TokenGradient, leaves: tuple[Tensor | None, ...], entropy: bool
) -> tuple[Gradients, Tensor, Tensor | None]:
    """Compute the gradients of ``leaves`` (hidden, weight, bias), and ``logprob`` and ``entropy [M]``.

    On a CPU, masked tokens have ``logprob`` and ``entropy`` 0.
    """
    part, keep = whole.trained(tokens.mask)
    streams = tokens if keep is None else tokens.pick(keep)._replace(mask=None)
    needs = [leaf is not None and leaf.requires_grad for leaf in leaves]
    wide = torch.float32 if whole.hidden.dtype is torch.float16 else None
    gradients = Gradients(part, needs[0], needs[1], needs[2], wide, wide if whole.shard is None else torch.float32)
    logprob, entropies = fused(part, gradients, streams, loss, entropy)
    if whole.shard is not None and gradients.need_hidden:
        whole.shard.member.reduce(gradients.hidden)  # each rank has the part of its own columns
    if keep is not None:
        logprob = spread(logprob, keep, whole.tokens)
        entropies = None if entropies is None else spread(entropies, keep, whole.tokens)
    return gradients, logprob, entropies


def checked_normalizer(
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    batch: dict[str, Any],
    objective: dict[str, Any],
    selected: Tensor | None,
    check: bool,
) -> Tensor | None:
    """Convert the normaliser to a tensor, and raise for wrong streams or options before the long work starts."""
    if batch["cu_seqlens"] is None:
        raise TypeError("cu_seqlens: expected a tensor, got NoneType, as all streams are packed")
    nothing = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    names = ("mask", "cu_seqlens", "ref_logprobs", "rollout_logprobs", "actor_ids")
    s = Streams(nothing, old_logprobs, advantages, *(batch[name] for name in names))
    rule = batch["aggregation"], batch["num_actors"], batch["max_length"]
    made = make_objective(s, **objective, aggregation=rule[0], num_actors=rule[1], max_length=rule[2])
    check_tensors(s)
    warn_if_ambiguous(advantages, len(targets), batch["cu_seqlens"])
    normalizer = make_normalizer(batch["normalizer"], made, nothing, rule[1])
    check_call(s, made, normalizer, check)
    if selected is not None:
        make_selected(s, made.variant, selected)
    return normalizer


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    cu_seqlens: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    clip: Clip | None = None,
    variant: Variant | None = None,
    kl: KL | None = None,
    ref_logprobs: Tensor | None = None,
    correction: ImportanceCorrection | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: bool = False,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
    selected: Tensor | None = None,
    check: bool = False,
    backend: str | None = None,
) -> PolicyLoss:
    """Compute :func:`policy_loss` of :func:`linear_logprob` with one pass over the logits.

    Input is packed: ``cu_seqlens [B+1]``, and all streams ``[N]`` like ``targets`` (``[M]`` with ``positions``).
    ``advantages`` are ``[B]`` or per token. Arguments and errors are those of :func:`linear_logprob` and
    :func:`policy_loss`; ``entropy=True`` adds the metric. ``backend`` names the backend of the head; the loss takes the
    best one for the device. A token whose target is ``ignore_index`` counts as masked.

    For some losses a token needs no other token's log-probability: PPO, CISPO, GPG, REINFORCE, SAPO, DPPO and DRO, with
    a correction per token or none. Then the forward computes the gradients chunk by chunk, with at most 256 MiB of
    logits in memory, and the backward scales and returns them. GSPO, LUSPO, GMPO, VESPO, Clip-Cov, KL-Cov and
    corrections by sequence need whole rows first, so they compute the logits twice. So do ``torch.compile``, backends
    other than ``native``, and a GPU where two passes are expected to be faster: with a large vocabulary a chunk has few
    tokens, and each chunk reads and writes the whole weight gradient. With a frozen weight :func:`linear_logprob` makes
    the logits once, for every loss. Masked tokens cost nothing on a CPU. Gradients that are not required are not
    computed.

    The gradient of a bfloat16 weight is summed in its own dtype over up to 24 chunks, and in float32 over more.
    Gradients of float16 are kept in float32, and scaled up, until the loss's own gradient has scaled them. A loss scale
    works as usual.

    Example: ``linear_policy_loss(states, lm_head.weight, targets, old, advantages, cu_seqlens=cu).loss.backward()``
    """
    head: dict[str, Any] = {
        "temperature": temperature, "softcap": softcap, "ignore_index": ignore_index, "bias": bias,
        "positions": positions, "check": check, "backend": backend,
    }  # fmt: skip
    objective: dict[str, Any] = {"clip": clip, "variant": variant, "kl": kl, "correction": correction}
    batch: dict[str, Any] = {
        "mask": mask, "cu_seqlens": cu_seqlens, "ref_logprobs": ref_logprobs, "rollout_logprobs": rollout_logprobs,
        "aggregation": aggregation, "normalizer": normalizer, "actor_ids": actor_ids, "num_actors": num_actors,
        "max_length": max_length,
    }  # fmt: skip
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy: expected True or False, as it is made here, got {type(entropy).__name__}")
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            streams = as_autocast(hidden, dtype), as_autocast(weight, dtype), targets, old_logprobs, advantages
            return linear_policy_loss(  # type: ignore[misc]
                *streams, entropy=entropy, **head, **objective, **batch, selected=selected
            )

    # Validate
    softmax = make_softmax(temperature, softcap, ignore_index)
    check_head(hidden, weight, targets, bias, positions)
    batch["normalizer"] = checked_normalizer(targets, old_logprobs, advantages, batch, objective, selected, check)
    ignored = softmax.ignored(targets)
    if ignored is not None:
        batch["mask"] = mask = ~ignored if mask is None else (mask != 0) & ~ignored

    # Plan: one pass where the loss of a token needs no other token, and that is faster
    leaves = (hidden, weight, bias)
    wanted = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
    once = wanted and not torch.compiler.is_compiling() and not needs_rows(variant, correction)
    others = positions, targets, old_logprobs, advantages, selected, *batch.values()
    reason = transform_reason(backend, *leaves, *others)
    copied = positions is not None or ignore_index is not None
    once = once and _serves(hidden, backend, reason)
    once = once and _is_faster(hidden, weight, bias, targets.shape[0], copied, backend)
    native_cpu = hidden.is_cpu and native_core(hidden)[0] == "cpu" and not torch.compiler.is_compiling()
    skips = not once and mask is not None and native_cpu and _serves(hidden, backend, reason)
    if (once or skips) and (hidden.is_cpu or check):  # else linear_logprob checks the ids
        check_id_values("targets", targets, weight.shape[0], softmax.ignore_index)
        if positions is not None:
            check_id_values("positions", positions, hidden.shape[0])
    if not once:
        if skips and mask is not None:  # masked tokens cost nothing then; no id is -1, as all were checked
            head["ignore_index"] = -1 if ignore_index is None else ignore_index
            targets = targets.masked_fill(mask == 0, head["ignore_index"])
        logprob: Any = linear_logprob(hidden, weight, targets, entropy=entropy, **head)
        logprob, entropies = (logprob[0], logprob[1].detach()) if entropy else (logprob, None)
        exact = backend if backend == "torch" else None  # for a second derivative, both must be the reference
        batch |= {"selected": selected, "entropy": entropies, "backend": exact}
        return policy_loss(logprob, old_logprobs, advantages, **objective, **batch)

    whole = functools.partial(Head, hidden, weight, targets, bias, positions, softmax)
    return one_pass_loss(whole, leaves, old_logprobs, advantages, objective, batch, entropy)


def one_pass_loss(
    head: Callable[[], Head],
    leaves: tuple[Tensor, Tensor, Tensor | None],
    old_logprobs: Tensor,
    advantages: Tensor,
    objective: dict[str, Any],
    batch: dict[str, Any],
    entropy: bool,
) -> PolicyLoss:
    """Compute loss and gradients of ``leaves`` (hidden, weight, bias) together, chunk by chunk. All is checked."""
    # Launch
    found = find_aggregation(batch["aggregation"], batch["actor_ids"], batch["max_length"])
    tokens = _tokens(old_logprobs, advantages, found, batch)
    scale = _scale_of(tokens) if leaves[0].dtype is torch.float16 else None
    if scale is not None:
        tokens = tokens._replace(weight=tokens.weight * scale)

    @torch.no_grad()
    def compute() -> tuple[Gradients, Tensor, Tensor | None]:
        return _one_pass(head(), tokens, token_gradient(**objective), leaves, entropy)

    gradients, logprob, entropies = compute()

    # Wrap
    with torch.no_grad():
        result = policy_loss(logprob, old_logprobs, advantages, entropy=entropies, **objective, **batch)
    attached = _Attach.apply(result.loss, [gradients], lambda: compute()[0], scale, *leaves)
    return result._replace(loss=attached)
