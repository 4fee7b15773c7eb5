"""Form the gradients of an LM head while its logits are in memory: three products for loss and gradients.

The gradient of a policy loss with respect to a token's log-probability needs log-probabilities alone: the token's own,
or those of its row. So a chunk that holds them all turns its logits into their gradient at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core, stream_of
from turnwise.ops.common.layout import RowLayout, Streams
from turnwise.ops.logprob.choice import Chunks
from turnwise.ops.logprob.linear_chunks import Gradients, Head, spread
from turnwise.ops.logprob.tiles import Upstream
from turnwise.ops.loss.aggregation import find_aggregation
from turnwise.ops.loss.policy_loss import PolicyLoss, prepared_policy_loss
from turnwise.ops.loss.reference import Objective


class HeadLoss(NamedTuple):
    """The result of :func:`linear_policy_loss`: that of :func:`policy_loss`, and the log-probabilities.

    ``logprobs`` are float32 without a gradient, in the shape of ``old_logprobs``, and 0 for tokens that don't train.
    """

    loss: Tensor
    metrics: Any
    actor_metrics: Any
    logprobs: Tensor


def with_logprobs(result: PolicyLoss, logprobs: Tensor, mask: Tensor | None) -> HeadLoss:
    """Add the log-probabilities of the tokens that train."""
    kept = logprobs.detach()
    return HeadLoss(*result, kept if mask is None else kept.masked_fill(mask == 0, 0.0))


# ---------------------------------------------------------------------------------------------------------------------
# Chunks
# ---------------------------------------------------------------------------------------------------------------------
class Chunk(NamedTuple):
    """Some rows of logits, and the tokens that read them."""

    logits: slice
    tokens: slice | Tensor
    row: Tensor | None  # of the logits that each token reads, counted from the first; None: each its own
    bounds: list[int]  # the sequences of the tokens: their first tokens, and the end
    temperature: float | None = None  # of its logits; None: that of the head


def cut_anywhere(count: int, rows: int) -> list[Chunk]:
    """Cut tokens whose losses need no other token. A chunk counts as one sequence."""
    cuts = [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
    return [Chunk(cut, cut, None, [0, cut.stop - cut.start]) for cut in cuts]


def cut_shared(reads: Tensor, counts: list[int], temperatures: list[float | None], rows: int) -> list[Chunk]:
    """Cut rows of logits of which token ``n`` reads ``reads[n]``. The tokens' losses need no other token.

    The first ``counts[0]`` rows have the first of ``temperatures``, and so on; a chunk has one.
    """
    cuts: list[slice] = []
    heats: list[float | None] = []
    begin = 0
    for count, temperature in zip(counts, temperatures, strict=True):
        of_group = [slice(i, min(i + rows, begin + count)) for i in range(begin, begin + count, rows)]
        cuts, heats, begin = [*cuts, *of_group], [*heats, *[temperature] * len(of_group)], begin + count
    order = reads.argsort(stable=True)
    edges = torch.tensor([0, *(cut.stop for cut in cuts)], device=reads.device)
    ends = torch.searchsorted(reads[order].contiguous(), edges).tolist()
    chunks = []
    for cut, heat, start, stop in zip(cuts, heats, ends[:-1], ends[1:], strict=True):
        tokens = order[start:stop]
        chunks.append(Chunk(cut, tokens, reads[tokens] - cut.start, [0, stop - start], heat))
    return chunks


def cut_by_sequence(lengths: list[int], size: Chunks) -> list[Chunk] | None:
    """Cut between sequences, as most losses by sequence need; ``None`` if the memory does not hold the longest."""
    chunks: list[Chunk] = []
    bounds, start = [0], 0
    for length in filter(None, lengths):
        if length > size.most:
            return None
        if bounds[-1] and bounds[-1] + length > size.rows:
            chunks.append(Chunk(slice(start, start + bounds[-1]), slice(start, start + bounds[-1]), None, bounds))
            bounds, start = [0], start + bounds[-1]
        bounds.append(bounds[-1] + length)
    if bounds[-1]:
        chunks.append(Chunk(slice(start, start + bounds[-1]), slice(start, start + bounds[-1]), None, bounds))
    return chunks


def pick(s: Streams, tokens: slice | Tensor) -> Streams:
    """Some tokens of packed streams with an advantage per token."""
    names = ("old_logprobs", "advantages", "mask", "ref_logprobs", "rollout_logprobs", "selected")
    given = {name: stream[tokens] for name in names if (stream := getattr(s, name)) is not None}
    return s._replace(**given)


# ---------------------------------------------------------------------------------------------------------------------
# Plan
# ---------------------------------------------------------------------------------------------------------------------
class Plan(NamedTuple):
    """What one pass computes: the rows of logits that train, their tokens, and how both are cut."""

    head: Head
    streams: Streams  # with an advantage per token
    weights: Tensor  # of each token's loss
    objective: Objective
    chunks: list[Chunk]
    reads: Tensor | None  # the row of logits of each token; None: its own
    keep: Tensor | None  # the tokens among those of the caller; None: all
    entropy_coef: float = 0.0
    scale: Tensor | None = None  # of `weights`, and of the gradients


def make_plan(
    whole: Head,
    s: Streams,
    weights: Tensor,
    objective: Objective,
    reads: Tensor | None = None,
    temperatures: Tensor | None = None,
) -> Plan | None:
    """Plan one pass; ``None`` if the loss needs more tokens at once than the memory holds. On a CPU masked tokens are
    left out. For a loss by sequence it reads ``cu_seqlens``, which makes a GPU wait.

    ``s`` has an advantage and ``weights`` a weight per token; ``reads [N]`` is the row of logits of each token, which
    ``temperatures [M]``, in ascending order, needs.
    """
    if objective.variant.by_batch or (objective.variant.selects and s.selected is None):
        return None
    if objective.by_row and (reads is not None or _capturing(s)):
        return None
    # Leave out what does not train.
    mask, keep = s.mask, None
    if reads is not None and reads.is_cpu:
        read = reads if mask is None else reads[mask != 0]
        mask = torch.zeros(whole.tokens, dtype=torch.bool).index_fill_(0, read.long(), True)
    head, kept_logits = whole.trained(mask)
    lengths = None
    if kept_logits is not None:
        keep = kept_logits
        if reads is not None:
            keep = torch.arange(len(reads), device=reads.device) if s.mask is None else (s.mask != 0).nonzero()[:, 0]
            places = torch.empty(whole.tokens, dtype=torch.long, device=reads.device)
            places[kept_logits] = torch.arange(len(kept_logits), device=reads.device)
            reads = places[reads[keep]]
        if objective.by_row:
            ends = torch.searchsorted(keep, s.cu_seqlens.to(keep.dtype))  # type: ignore[union-attr]
            lengths = ends.diff().tolist()
        s, weights = pick(s, keep)._replace(mask=None), weights[keep]
        temperatures = None if temperatures is None else temperatures[kept_logits]
    # Cut it.
    size = head.size()
    chunks: list[Chunk] | None
    if objective.by_row:
        lengths = s.cu_seqlens.diff().tolist() if lengths is None else lengths  # type: ignore[union-attr]
        chunks = cut_by_sequence(lengths, size)
    elif reads is not None and temperatures is not None:
        distinct, counts = temperatures.unique_consecutive(return_counts=True)
        chunks = cut_shared(reads, counts.tolist(), distinct.tolist(), size.rows)
    elif reads is not None:
        chunks = cut_shared(reads, [head.tokens], [None], size.rows)
    else:
        chunks = cut_anywhere(head.tokens, size.rows)
    return None if chunks is None else Plan(head, s, weights, objective, chunks, reads, keep)


def _capturing(s: Streams) -> bool:
    """True while a CUDA graph is captured, when nothing may wait for the device."""
    return s.old_logprobs.is_cuda and torch.cuda.is_current_stream_capturing()


# ---------------------------------------------------------------------------------------------------------------------
# Computation
# ---------------------------------------------------------------------------------------------------------------------
def _gradient(plan: Plan, logprob: Tensor, chunk: Chunk) -> Tensor:
    """The gradient of the loss with respect to the log-probabilities ``[m]`` of a chunk's rows of logits."""
    if not chunk.bounds[-1]:  # no token reads these rows
        return torch.zeros_like(logprob)
    # The weights have the aggregation: the loss of a chunk is a plain sum.
    aggregation = find_aggregation("token-mean", None, None)
    alone = plan.objective._replace(aggregation=aggregation, num_actors=0, max_length=None)
    device, weights = logprob.device, plan.weights[chunk.tokens]
    leaf = logprob.detach().requires_grad_()
    with torch.enable_grad():
        tokens = pick(plan.streams, chunk.tokens)._replace(
            logprobs=leaf if chunk.row is None else leaf[chunk.row],
            cu_seqlens=_boundaries(chunk.bounds, device),
            normalizer=torch.ones((), device=device),
            actor_ids=None,
        )
        loss = prepared_policy_loss(tokens, alone).loss
    if chunk.row is None:
        return torch.autograd.grad(loss, leaf)[0] * weights
    each = torch.autograd.grad(loss, tokens.logprobs)[0] * weights
    return torch.zeros_like(leaf).index_put_((chunk.row,), each, accumulate=True)  # adds in a fixed order


def _boundaries(bounds: list[int], device: torch.device) -> Tensor:
    if len(bounds) == 2:  # made on the device; copying the numbers to a GPU would wait
        return torch.arange(0, bounds[1] + 1, bounds[1], device=device)
    return torch.tensor(bounds, device=device)


def _entropy_gradient(plan: Plan, entropy: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The entropies ``[m]`` of a chunk's rows of logits, and the gradient of the loss with respect to them."""
    if not plan.entropy_coef:
        return None, None
    each, mask = -plan.entropy_coef * plan.weights[chunk.tokens], plan.streams.mask
    each = each if mask is None else each.masked_fill(mask[chunk.tokens] == 0, 0.0)
    if chunk.row is None:
        return entropy, each
    return entropy, torch.zeros_like(entropy).index_put_((chunk.row,), each, accumulate=True)


def fused(plan: Plan, gradients: Gradients, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Fill ``gradients``, and return ``logprob`` and ``entropy`` of the rows of logits. Holds one chunk's at a time."""
    head = plan.head
    gradients.begin(len(plan.chunks))
    none = torch.empty(0, dtype=torch.float32, device=head.hidden.device)
    logprobs, entropies = [none], [none]
    space = head.space(chunk.logits for chunk in plan.chunks)
    for chunk in plan.chunks:
        rows = head.rows(chunk.logits)
        tile = head.tile(rows, chunk.logits, space)
        if chunk.temperature is not None:
            tile = tile._replace(scale=1.0 / chunk.temperature)
        logprob, lse, entropies_m = head.finish(head.kernels.scan(tile, entropy), chunk.logits, entropy)
        slopes = _gradient(plan, logprob, chunk), *_entropy_gradient(plan, entropies_m, chunk)
        d = head.gradient(tile, Upstream(lse, *slopes))
        gradients.add(chunk.logits, rows, d)
        logprobs.append(logprob)
        entropies.append(entropies_m)
        del tile, d  # before the next ones are made
    gradients.end()
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _compute(
    plan: Plan, leaves: tuple[Tensor | None, ...], tokens: int, entropy: bool, into: Tensor | None
) -> tuple[Gradients, Tensor, Tensor | None]:
    """Compute the gradients of ``leaves`` (hidden, weight, bias), and ``logprob`` and ``entropy [tokens]``."""
    head = plan.head
    needs = [leaf is not None and leaf.requires_grad for leaf in leaves]
    wide = torch.float32 if head.hidden.dtype is torch.float16 else None
    hidden_dtype = wide if head.shard is None else torch.float32
    gradients = Gradients(head, needs[0], needs[1], needs[2], wide, hidden_dtype, into)
    logprob, entropies = fused(plan, gradients, entropy)
    if head.shard is not None and gradients.need_hidden:
        head.shard.member.reduce(gradients.hidden)  # each rank has the part of its own columns

    def of_tokens(values: Tensor) -> Tensor:
        values = values if plan.reads is None else values[plan.reads]
        return values if plan.keep is None else spread(values, plan.keep, tokens)

    return gradients, of_tokens(logprob), None if entropies is None else of_tokens(entropies)


class _AttachGradients(torch.autograd.Function):
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
        ctx.grads, ctx.recompute, ctx.scale, ctx.leaves = grads, recompute, scale, leaves
        ctx.mark_dirty(loss)  # returns the same tensor; the caller could not change a view of it in place
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads: Gradients = ctx.grads.pop() if ctx.grads else ctx.recompute()
        factor = grad_loss if ctx.scale is None else grad_loss / ctx.scale
        if grads.into is not None and factor.is_cpu and factor.item() != 1.0:
            raise RuntimeError(
                f"linear_policy_loss: grad_into holds the gradient of the loss, not of {factor} times it"
            )
        needed = grads.need_hidden, grads.need_weight and grads.into is None, grads.need_bias
        out: list[Tensor | None] = []
        for values, wanted, leaf in zip((grads.hidden, grads.weight, grads.bias), needed, ctx.leaves, strict=True):
            if not wanted:
                out.append(None)
                continue
            with torch.no_grad():
                _scale_in_place(values, factor, grads.head.backend)
                values = values.to(leaf.dtype)
            out.append(_RejectSecond.apply(values, leaf) if torch.is_grad_enabled() else values)
        return None, None, None, None, *out


class _RejectSecond(torch.autograd.Function):
    """Passes a gradient on in a backward that autograd records, and rejects the derivative of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, leaf: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "linear_policy_loss: the gradient can't be differentiated again; use backend='torch' for create_graph"
        )


def _scale_in_place(values: Tensor, factor: Tensor, backend: str) -> None:
    """Multiply by a factor, which is usually 1. On a GPU the kernel reads it and returns at once for 1."""
    device, core = native_core(values)
    if device == "cpu":
        if factor.item() != 1.0:
            values.mul_(factor)
    elif backend != "native":
        values.mul_(factor)
    elif values.numel():
        core.cuda_scale(values, factor.float().contiguous(), stream_of(values))


def plan_loss(
    head: Head,
    s: Streams,
    objective: Objective,
    reads: Tensor | None = None,
    temperatures: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> Plan | None:
    """Plan one pass as :func:`make_plan` does. Float16 gradients are scaled by a power of two until the backward."""
    # A weight and an advantage per token. Both are known before any logit is computed.
    rows = RowLayout(s.old_logprobs, s.cu_seqlens)
    weights, scale = token_weights(s, objective, rows), None
    if head.hidden.dtype is torch.float16:  # brings the largest weight near 1
        scale = torch.ones((), device=weights.device)
        if weights.numel():
            scale = torch.ldexp(torch.ones_like(weights[0]), -torch.frexp(weights.max()).exponent)
        weights = weights * scale
    s = s._replace(advantages=rows.spread(s.advantages))
    plan = make_plan(head, s, weights, objective, reads, temperatures)
    return None if plan is None else plan._replace(entropy_coef=entropy_coef, scale=scale)


def token_weights(s: Streams, objective: Objective, rows: RowLayout | None = None) -> Tensor:
    """The weight ``[N]`` float32 of each token's loss, of masked tokens too."""
    rows = RowLayout(s.old_logprobs, s.cu_seqlens) if rows is None else rows
    lengths = rows.sum((torch.ones_like(s.old_logprobs) if s.mask is None else s.mask != 0).double())
    return rows.spread(objective.row_weights(s, lengths).float())


def with_bonus(result: PolicyLoss, entropy: Tensor | None, s: Streams, objective: Objective, coef: float) -> PolicyLoss:
    """Take ``coef`` times the entropies ``[N]`` from the loss, aggregated as it is."""
    if not coef or entropy is None:
        return result
    weights = token_weights(s, objective).to(entropy.dtype)
    weights = weights if s.mask is None else weights.masked_fill(s.mask == 0, 0.0)
    kept = torch.where(weights == 0, 0.0, entropy)  # a masked token's may be NaN
    return result._replace(loss=result.loss - coef * (weights * kept).sum())


def one_pass_loss(
    plan: Plan,
    leaves: tuple[Tensor, Tensor, Tensor | None],
    s: Streams,
    entropy: bool,
    into: Tensor | None = None,
) -> HeadLoss:
    """Compute loss and gradients of ``leaves`` (hidden, weight, bias) together, chunk by chunk. All is checked."""

    @torch.no_grad()
    def compute() -> tuple[Gradients, Tensor, Tensor | None]:
        return _compute(plan, leaves, s.old_logprobs.shape[0], entropy or plan.entropy_coef != 0, into)

    gradients, logprob, entropies = compute()
    with torch.no_grad():
        made = s._replace(logprobs=logprob, entropy=entropies if entropy else None)
        result: PolicyLoss = prepared_policy_loss(made, plan.objective)
        result = with_bonus(result, entropies, s, plan.objective, plan.entropy_coef)
    attached = _AttachGradients.apply(result.loss, [gradients], lambda: compute()[0], plan.scale, *leaves)
    return with_logprobs(result._replace(loss=attached), logprob, s.mask)
