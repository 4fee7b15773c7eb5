"""Log-probabilities where each rank of a group holds some columns of the logits, or some rows of the LM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.ops.common.dispatch import select_backend
from turnwise.ops.common.layout import whole_number
from turnwise.ops.logprob.checks import as_autocast, check_head, check_id_values, check_max_memory, make_softmax
from turnwise.ops.logprob.linear_chunks import Gradients, Head, fill, scan_chunks, spread
from turnwise.ops.logprob.logprob import check_logits, is_writable
from turnwise.ops.logprob.steps import kernels
from turnwise.ops.logprob.tiles import Softmax, Tile, Upstream
from turnwise.ops.parallel.group import GroupRank, checksum, exchange, member_of, start_of
from turnwise.ops.parallel.shards import Shard, combine, shift


# ---------------------------------------------------------------------------------------------------------------------
# From logits
# ---------------------------------------------------------------------------------------------------------------------
class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: Shard, inplace: bool) -> tuple[Tensor, Tensor]:
        tile = _tile(logits, targets, shard)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprob, lse, entropy = combine(kernels(shard.backend).scan(tile, shard.entropy), tile.targets, shard, dtype)
        ctx.shard, ctx.inplace = shard, inplace
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.set_materialize_grads(False)
        return logprob.view(targets.shape), entropy.view(targets.shape if shard.entropy else (0,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, lse, entropy = ctx.saved_tensors
        upstream = _upstream(lse, grad_logprob, entropy, grad_entropy if ctx.shard.entropy else None)
        tile, backend = _tile(logits, targets, ctx.shard), ctx.shard.backend
        inplace = ctx.inplace and backend != "torch" and is_writable(logits)
        out = tile.logits if inplace else torch.empty_like(tile.logits, memory_format=torch.contiguous_format)
        kernels(backend).grad(tile, upstream, out)
        out = out.view(logits.shape)
        if out.data_ptr() == logits.data_ptr() and out.numel():
            torch.autograd.graph.increment_version(logits)  # so that autograd rejects later uses of the old logits
        return out, None, None, None


def _tile(logits: Tensor, targets: Tensor, shard: Shard) -> Tile:
    matrix = logits.detach().reshape(-1, shard.width)
    matrix = matrix if matrix.stride(-1) == 1 or shard.width <= 1 else matrix.contiguous()
    return Tile(matrix, None, targets.reshape(-1), *shard.softmax.columns)


def _upstream(lse: Tensor, grad_logprob: Tensor | None, entropy: Tensor, grad_entropy: Tensor | None) -> Upstream:
    g = torch.zeros_like(lse) if grad_logprob is None else grad_logprob.reshape(-1)
    return Upstream(lse, g, *((None, None) if grad_entropy is None else (entropy, grad_entropy.reshape(-1))))


def vocab_parallel_logprob(
    logits_shard: Tensor,
    targets: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    entropy: bool = False,
    inplace_backward: bool = False,
    check: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute :func:`logprob` of logits whose columns are split over the ranks of ``group``.

    ``logits_shard [N, V_r]`` or ``[B, T, V_r]`` are this rank's columns of the vocabulary, in the order of the ranks;
    the ``V_r`` may differ. ``targets [N]`` or ``[B, T]`` are ids of the whole vocabulary, the same on every rank.
    ``group`` is a ``torch.distributed`` process group, by default the default group. Every rank calls, and gets the
    same result as one process with all logits; the other arguments are those of :func:`logprob`.

    The gradient of ``logits_shard`` is this rank's part of the gradient of one loss, which every rank computes from the
    same result. Only numbers per token cross ranks: an all-reduce of maxima, and one of sums of exponentials and of the
    target's logit. The backward needs none.

    ``vocab_start`` is the first column of the shard. By default the ranks exchange their widths. On a CPU, or
    with ``check=True``, they also compare shapes, options and targets; on a GPU both wait for the device.

    Raises ``ValueError`` or ``TypeError`` naming the argument, on every rank if the ranks compare, ``RuntimeError``
    without a process group, and ``BackendUnavailable`` if the named backend can't serve.

    Example: ``vocab_parallel_logprob(logits[:, rank * 4000 : (rank + 1) * 4000], targets)``
    """
    member = member_of(group)

    def validate(compare: bool) -> tuple[dict[str, Any], int]:
        softmax = make_softmax(temperature, softcap, ignore_index)
        check_logits(logits_shard, targets, "logits_shard")
        _check_start(vocab_start)
        facts = _facts("vocab_parallel_logprob", softmax, entropy, backend, targets) if compare else {}
        return {**facts, "dtype of logits_shard": logits_shard.dtype}, logits_shard.shape[-1]

    start, _ = _locate(member, logits_shard, targets, vocab_start, ignore_index, check, validate)
    softmax, shifted = shift(make_softmax(temperature, softcap, ignore_index), targets, start)
    width, chosen = logits_shard.shape[-1], _backend(backend, logits_shard)
    shard = Shard(member, width, width, softmax, entropy, chosen)
    values, entropies = _Logprob.apply(logits_shard, shifted, shard, inplace_backward)
    return (values, entropies) if entropy else values


# ---------------------------------------------------------------------------------------------------------------------
# Comparison of the ranks' arguments
# ---------------------------------------------------------------------------------------------------------------------
def _facts(function: str, softmax: Softmax, entropy: bool, backend: str | None, targets: Tensor) -> dict[str, Any]:
    return {
        "function": function,
        "temperature": softmax.temperature,
        "softcap": softmax.softcap,
        "ignore_index": softmax.ignore_index,
        "entropy": entropy,
        "backend": backend,
        "targets": checksum(targets),
    }


def _check_start(vocab_start: object) -> None:
    if vocab_start is not None and (whole_number(vocab_start) is None or int(vocab_start) < 0):  # type: ignore[call-overload]
        raise ValueError(f"vocab_start={vocab_start!r}: expected a whole number >= 0, or None")


def _locate(
    member: GroupRank,
    shard: Any,
    targets: Any,
    vocab_start: int | None,
    ignore_index: int | None,
    check: bool,
    validate: Callable[[bool], Any],
) -> tuple[int, int | None]:
    """Check the arguments, and find the first column of this rank's shard and the width of the widest.

    On a GPU, without ``check`` and with ``vocab_start``, the ranks exchange nothing and the second is ``None``.
    """
    if vocab_start is not None and isinstance(shard, Tensor) and shard.is_cuda and not check:
        validate(False)
        return int(vocab_start), None
    widths = exchange(member, lambda: validate(True))
    start = start_of(member, widths)
    if vocab_start is not None and int(vocab_start) != start:
        raise ValueError(f"vocab_start={vocab_start}: expected {start}, the sum of the widths of the ranks before")
    if targets.is_cpu or check:
        check_id_values("targets", targets, sum(widths), ignore_index)
    return start, max(widths)


def _backend(name: str | None, tensor: Tensor) -> str:
    reason = "the input is float64, and the kernels compute in float32" if tensor.dtype is torch.float64 else ""
    return select_backend("logprob", name, tensor, native=reason, triton=reason)


# ---------------------------------------------------------------------------------------------------------------------
# From hidden states
# ---------------------------------------------------------------------------------------------------------------------
class LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        positions: Tensor | None,
        shard: Shard,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            head, keep = head_of(hidden, weight, targets, bias, positions, shard).trained()
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            results: tuple[Tensor, ...] = combine(scan_chunks(head, shard.entropy), head.targets, shard, dtype)
        if keep is not None:
            tokens = targets.shape[0]
            results = tuple(spread(x, keep, tokens) if len(x) == len(keep) else x for x in results)
        logprob, lse, entropy = results
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, bias, targets, positions, lse, entropy)
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, positions, lse, entropy = ctx.saved_tensors
        shard, needs = ctx.shard, ctx.needs_input_grad[:3]
        upstream = _upstream(lse, grad_logprob, entropy, grad_entropy if shard.entropy else None)
        with torch.autocast(hidden.device.type, enabled=False):
            head, keep = head_of(hidden, weight, targets, bias, positions, shard).trained()
            wide = torch.promote_types(hidden.dtype, torch.float32)
            gradients = Gradients(head, needs[0], needs[1], needs[2], hidden_dtype=wide)
            upstream = upstream if keep is None else upstream.rows(keep)
            fill(head, gradients, upstream)
            if gradients.need_hidden:  # each rank has the part of its own columns
                shard.member.reduce(gradients.hidden)
        leaves = (hidden, weight, bias)
        filled = (gradients.hidden, gradients.weight, gradients.bias)
        grads = (g.to(x.dtype) if need else None for g, x, need in zip(filled, leaves, needs, strict=True))
        return *grads, None, None, None


def head_of(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, positions: Tensor | None, shard: Shard
) -> Head:
    """This rank's part of the head."""
    return Head(hidden, weight, targets, bias, positions, shard.softmax, shard.backend, shard.max_memory, shard)


def vocab_parallel_linear_logprob(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    bias_shard: Tensor | None = None,
    entropy: bool = False,
    positions: Tensor | None = None,
    max_memory: int | None = None,
    check: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute :func:`linear_logprob` of an LM head whose rows are split over the ranks of ``group``.

    ``weight_shard [V_r, H]`` and ``bias_shard [V_r]`` are this rank's rows, in the order of the ranks; the ``V_r`` may
    differ. ``hidden [N, H]``, ``targets`` and ``positions`` are the same on every rank. Every rank calls, and gets the
    same result as one process with the whole head. The logits ``[N, V_r]`` exist chunk by chunk, forward and backward.

    Gradients are those of one loss, which every rank computes from the same result: ``weight_shard`` and ``bias_shard``
    get their own part, and ``hidden`` gets the whole, which the backward sums over the group in float32. ``group``,
    ``vocab_start``, ``check`` and errors are as in :func:`vocab_parallel_logprob`, the rest as in
    :func:`linear_logprob`.

    Example: ``vocab_parallel_linear_logprob(states, lm_head.weight_shard, targets, group=tensor_parallel)``
    """
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "ignore_index": ignore_index}
    options |= {"group": group, "vocab_start": vocab_start, "max_memory": max_memory, "check": check}
    options |= {"backend": backend}
    sharded = shard_head(hidden, weight_shard, targets, bias_shard, positions, entropy, **options)
    values, entropies = LinearLogprob.apply(*sharded)
    return (values, entropies) if entropy else values


def shard_head(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    bias_shard: Tensor | None,
    positions: Tensor | None,
    entropy: bool,
    group: Any,
    vocab_start: int | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    max_memory: int | None,
    check: bool,
    backend: str | None,
    also: Callable[[bool], dict[str, Any]] = lambda compare: {},
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Shard]:
    """Check a head that is split over the group, and find this rank's place: the inputs of :class:`LinearLogprob`.

    ``also`` makes more checks, and returns facts for the ranks to compare if they do so.
    """
    member = member_of(group)
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight_shard = as_autocast(hidden, dtype), as_autocast(weight_shard, dtype)

    def validate(compare: bool) -> tuple[dict[str, Any], int]:
        softmax = make_softmax(temperature, softcap, ignore_index)
        check_head(hidden, weight_shard, targets, bias_shard, positions, suffix="_shard")
        check_max_memory(max_memory)
        _check_start(vocab_start)
        if not compare:
            also(False)
            return {}, 0
        if positions is not None:
            check_id_values("positions", positions, hidden.shape[0])
        leaves = (hidden, weight_shard, bias_shard)
        facts = _facts("vocab_parallel_linear_logprob", softmax, entropy, backend, targets)
        facts["max_memory"] = max_memory
        facts |= {"hidden": (tuple(hidden.shape), hidden.dtype, hidden.requires_grad), "positions": checksum(positions)}
        facts["requires_grad"] = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
        return facts | also(True), weight_shard.shape[0]

    start, widest = _locate(member, weight_shard, targets, vocab_start, ignore_index, check, validate)
    softmax, shifted = shift(make_softmax(temperature, softcap, ignore_index), targets, start)
    width = weight_shard.shape[0]
    shard = Shard(member, width, widest or width, softmax, entropy, _backend(backend, hidden), max_memory)
    return hidden, weight_shard, bias_shard, shifted, positions, shard
