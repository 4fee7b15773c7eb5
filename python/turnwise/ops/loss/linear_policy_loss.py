"""Compute LM head and policy loss in one pass.

The gradient of a chunk of tokens is formed while the chunk's logits are in memory, so logits are computed only once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import native_core, select_backend, stream_of
from turnwise.ops.common.layout import RowLayout, Streams, transform_reason
from turnwise.ops.logprob import linear_frozen
from turnwise.ops.logprob.checks import as_autocast, check_head, check_id_values, make_softmax
from turnwise.ops.logprob.choice import FEW, Chunks, Sizes, choose_chunks, device_of, head_op, one_pass
from turnwise.ops.logprob.linear_logprob import linear_logprob
from turnwise.ops.logprob.linear_native import Gradients, Head, spread
from turnwise.ops.logprob.tiles import Upstream, new_state, scan
from turnwise.ops.loss.aggregation import find_aggregation
from turnwise.ops.loss.arguments import LossOptions, check_call, prepare, warn_ambiguous, with_selected
from turnwise.ops.loss.options import KL, Clip, ImportanceCorrection, Variant
from turnwise.ops.loss.policy_loss import PolicyLoss, prepared_policy_loss
from turnwise.ops.loss.reference import Objective

# Tokens of a chunk on a CPU: a sixteenth of all tokens, but at least _LEAST (by the bytes of a logit). The chunk's
# logits stay within _BYTES, unless that would leave less than half of _LEAST. Larger chunks would not be faster.
_LEAST, _BYTES = {2: 512, 4: 160}, 1 << 28
_COLUMNS = 2048  # columns of one product on a CPU


# ---------------------------------------------------------------------------------------------------------------------
# Fused
# ---------------------------------------------------------------------------------------------------------------------
TokenGradient = Callable[[Tensor, slice], Tensor]  # (logprob [m] of a chunk, chunk) -> gradient [m] of the loss


def pick(s: Streams, tokens: slice | Tensor) -> Streams:
    """Some tokens of packed streams with an advantage per token."""
    names = ("old_logprobs", "advantages", "mask", "ref_logprobs", "rollout_logprobs")
    given = {name: stream[tokens] for name in names if (stream := getattr(s, name)) is not None}
    return s._replace(**given)


def token_gradient(s: Streams, weight: Tensor, objective: Objective) -> TokenGradient:
    """Make the function that gives the gradient of a token-level loss, each token times its ``weight``.

    It treats a chunk as one sequence.
    """
    aggregation = find_aggregation("token-mean", None, None)
    alone = objective._replace(aggregation=aggregation, num_actors=0, max_length=None)

    def gradient(logprob: Tensor, chunk: slice) -> Tensor:
        leaf = logprob.detach().requires_grad_()
        size, device = leaf.shape[0], leaf.device
        tokens = pick(s, chunk)._replace(
            logprobs=leaf,
            cu_seqlens=torch.arange(0, size + 1, size, device=device),
            normalizer=torch.ones((), device=device),
            actor_ids=None,
        )
        with torch.enable_grad():
            loss = prepared_policy_loss(tokens, alone).loss
        return torch.autograd.grad(loss, leaf)[0] * weight[chunk]

    return gradient


def _chunks(head: Head) -> Chunks:
    """The chunks of tokens and the columns of a tile, the same on every rank of a head that is split."""
    vocabulary = head.vocabulary if head.shard is None else head.shard.widest
    if head.products.on_gpu:
        return choose_chunks(head.sizes._replace(vocabulary=vocabulary), device_of(head.hidden))
    size = head.products.dtype.itemsize
    least = _LEAST[size]
    return Chunks(min(max(least, head.tokens // 16), max(least // 2, _BYTES // (vocabulary * size), 1)), _COLUMNS)


def fused(head: Head, gradients: Gradients, loss: TokenGradient, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Fill ``gradients``, and return ``logprob`` and ``entropy [M]``. Holds the logits of one chunk at a time."""
    rows, width = _chunks(head)
    chunks = head.blocks(rows)
    total = gradients.weight
    if gradients.need_weight and len(chunks) > FEW and total.dtype is not torch.float32:
        total = torch.empty_like(total, dtype=torch.float32)
    # Sums over many chunks lose too much in bfloat16, so they run in float32 and are rounded once at the end.
    logprobs, entropies = [], []
    for chunk in chunks:
        logprob, entropy_of_chunk = _chunk(head, gradients, total, loss, entropy, chunk, width)
        logprobs.append(logprob)
        entropies.append(entropy_of_chunk)
    if gradients.need_weight:
        if not chunks:
            gradients.weight.zero_()
        elif total is not gradients.weight:
            gradients.weight.copy_(total)
    none = torch.empty(0, dtype=torch.float32, device=head.hidden.device)
    return torch.cat([none, *logprobs]), torch.cat([none, *entropies]) if entropy else None


def _chunk(
    head: Head,
    gradients: Gradients,
    total: Tensor,
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
    upstream = Upstream(lse, loss(logprob, chunk), None, None)
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
        grads = ctx.grads.pop() if ctx.grads else ctx.recompute()
        factor = grad_loss if ctx.scale is None else grad_loss / ctx.scale
        needed = grads.need_hidden, grads.need_weight, grads.need_bias
        out = []
        for values, wanted, dtype in zip((grads.hidden, grads.weight, grads.bias), needed, ctx.dtypes, strict=True):
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
def _serves(hidden: Tensor, backend: str | None, reason: str) -> bool:
    """True if the compiled kernels serve the chunks. Otherwise the two separate ops choose or reject a backend."""
    if hidden.dtype is torch.float64:
        return False
    return select_backend("linear_logprob", backend, hidden, native=reason, triton=reason) == "native"


def _is_faster(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: int, copied: bool, backend: str | None
) -> bool:
    """True if one pass is expected to be faster than two ops and to need no more memory."""
    frozen = linear_frozen.serves(hidden, weight, bias)
    triton = hidden.is_cuda and select_backend(head_op(hidden, frozen), backend, hidden) == "triton"
    if frozen and not triton:
        return False  # two ops make no more products, and their logits stay in the cache
    if native_core(hidden)[0] == "cpu":
        return True
    sizes = Sizes(tokens, hidden.shape[1], weight.shape[0], hidden.element_size(), copied)
    device = device_of(hidden)
    return one_pass(sizes, choose_chunks(sizes, device), device, weight.requires_grad, triton)


def _one_pass(
    whole: Head, s: Streams, weight: Tensor, objective: Objective, leaves: tuple[Tensor | None, ...], entropy: bool
) -> tuple[Gradients, Tensor, Tensor | None]:
    """Compute the gradients of ``leaves`` (hidden, weight, bias), and ``logprob`` and ``entropy [M]``.

    On a CPU, masked tokens have ``logprob`` and ``entropy`` 0.
    """
    part, keep = whole.trained(s.mask)
    if keep is not None:
        s, weight = pick(s, keep)._replace(mask=None), weight[keep]
    needs = [leaf is not None and leaf.requires_grad for leaf in leaves]
    wide = torch.float32 if whole.hidden.dtype is torch.float16 else None
    gradients = Gradients(part, needs[0], needs[1], needs[2], wide, wide if whole.shard is None else torch.float32)
    logprob, entropies = fused(part, gradients, token_gradient(s, weight, objective), entropy)
    if whole.shard is not None and gradients.need_hidden:
        whole.shard.member.reduce(gradients.hidden)  # each rank has the part of its own columns
    if keep is not None:
        logprob = spread(logprob, keep, whole.tokens)
        entropies = None if entropies is None else spread(entropies, keep, whole.tokens)
    return gradients, logprob, entropies


def prepare_packed(s: Streams, options: LossOptions, targets: Tensor, check: bool) -> tuple[Streams, Objective]:
    """Prepare the streams, and raise for wrong ones before the long work starts. ``logprobs`` are 0 until then."""
    if s.cu_seqlens is None:
        raise TypeError("cu_seqlens: expected a tensor, got NoneType, as all streams are packed")
    zeros = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    s, objective = prepare(s._replace(logprobs=zeros), options)
    warn_ambiguous(s)
    check_call(s, objective, check)
    if s.selected is not None:
        with_selected(s, objective.variant)
    return s, objective


def check_entropy(entropy: object) -> None:
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy: expected True or False, as it is made here, got {type(entropy).__name__}")


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
    check_entropy(entropy)
    head: dict[str, Any] = {
        "temperature": temperature, "softcap": softcap, "ignore_index": ignore_index, "bias": bias,
        "positions": positions, "check": check, "backend": backend,
    }  # fmt: skip
    streams = Streams(  # targets instead of log-probabilities, which the head makes
        targets, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, None, actor_ids, None,
        selected,
    )  # fmt: skip
    options = LossOptions(clip, variant, kl, correction, aggregation, normalizer, num_actors, max_length)
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return _compute(hidden, weight, targets, head, streams, options, entropy)
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        hidden, weight = as_autocast(hidden, dtype), as_autocast(weight, dtype)
        return _compute(hidden, weight, targets, head, streams, options, entropy)


def _compute(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    head: dict[str, Any],
    s: Streams,
    options: LossOptions,
    entropy: bool,
) -> PolicyLoss:
    """Choose one pass or two. ``head`` holds the other arguments of :func:`linear_logprob`."""
    # Validate
    bias, positions, check, backend = (head[name] for name in ("bias", "positions", "check", "backend"))
    softmax = make_softmax(head["temperature"], head["softcap"], head["ignore_index"])
    check_head(hidden, weight, targets, bias, positions)
    s, objective = prepare_packed(s, options, targets, check)
    ignored = softmax.ignored(targets)
    if ignored is not None:
        s = s._replace(mask=~ignored if s.mask is None else (s.mask != 0) & ~ignored)

    # Plan: one pass where the loss of a token needs no other token, and that is faster
    leaves = (hidden, weight, bias)
    wanted = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
    once = wanted and not torch.compiler.is_compiling() and not objective.by_row
    reason = transform_reason(backend, *leaves, positions, targets, *s)
    copied = positions is not None or softmax.ignore_index is not None
    once = once and _serves(hidden, backend, reason)
    once = once and _is_faster(hidden, weight, bias, targets.shape[0], copied, backend)
    native_cpu = hidden.is_cpu and native_core(hidden)[0] == "cpu" and not torch.compiler.is_compiling()
    skips = not once and s.mask is not None and native_cpu and _serves(hidden, backend, reason)
    if (once or skips) and (hidden.is_cpu or check):  # else linear_logprob checks the ids
        check_id_values("targets", targets, weight.shape[0], softmax.ignore_index)
        if positions is not None:
            check_id_values("positions", positions, hidden.shape[0])
    if once:
        whole = functools.partial(Head, hidden, weight, targets, bias, positions, softmax)
        return one_pass_loss(whole, leaves, s, objective, entropy)
    if skips and s.mask is not None:  # masked tokens cost nothing then; no id is -1, as all were checked
        head = head | {"ignore_index": -1 if softmax.ignore_index is None else softmax.ignore_index}
        targets = targets.masked_fill(s.mask == 0, head["ignore_index"])
    logprob: Any = linear_logprob(hidden, weight, targets, entropy=entropy, **head)
    logprob, entropies = (logprob[0], logprob[1].detach()) if entropy else (logprob, None)
    exact = backend if backend == "torch" else None  # for a second derivative, both must be the reference
    return prepared_policy_loss(s._replace(logprobs=logprob, entropy=entropies), objective, backend=exact)


def one_pass_loss(
    head: Callable[[], Head],
    leaves: tuple[Tensor, Tensor, Tensor | None],
    s: Streams,
    objective: Objective,
    entropy: bool,
) -> PolicyLoss:
    """Compute loss and gradients of ``leaves`` (hidden, weight, bias) together, chunk by chunk. All is checked."""
    # A weight and an advantage per token. Both are known before any logit is computed.
    rows = RowLayout(s.old_logprobs, s.cu_seqlens)
    lengths = rows.sum((torch.ones_like(s.old_logprobs) if s.mask is None else s.mask != 0).double())
    weight, scale = rows.spread(objective.row_weights(s, lengths).float()), None
    tokens = s._replace(advantages=rows.spread(s.advantages))
    if leaves[0].dtype is torch.float16:  # the power of two that brings the largest weight near 1
        scale = torch.ones((), device=weight.device)
        if weight.numel():
            scale = torch.ldexp(torch.ones_like(weight[0]), -torch.frexp(weight.max()).exponent)
        weight = weight * scale

    @torch.no_grad()
    def compute() -> tuple[Gradients, Tensor, Tensor | None]:
        return _one_pass(head(), tokens, weight, objective, leaves, entropy)

    gradients, logprob, entropies = compute()
    with torch.no_grad():
        result = prepared_policy_loss(s._replace(logprobs=logprob, entropy=entropies), objective)
    attached = _AttachGradients.apply(result.loss, [gradients], lambda: compute()[0], scale, *leaves)
    return result._replace(loss=attached)
