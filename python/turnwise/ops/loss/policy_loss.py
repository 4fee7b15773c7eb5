"""Compute policy losses over token streams: loss, gradient and metrics in one pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import ROUTES, is_dtensor, native_core, select_backend, stream_of
from turnwise.ops.common.layout import (
    Streams,
    check_memory,
    check_stream_values,
    check_streams,
    row_count,
    transform_reason,
)
from turnwise.ops.loss.arguments import LossOptions, check_call, named_metrics, prepare, warn_ambiguous, with_selected
from turnwise.ops.loss.options import IS_LEVELS, KL, KL_ESTIMATORS, Clip, ImportanceCorrection, Variant
from turnwise.ops.loss.reference import Objective, metric_names, reference


class PolicyLoss(NamedTuple):
    """The result of :func:`policy_loss`. Metrics carry no gradient and stay on the device.

    ``loss`` is 0-dim. ``metrics`` maps a name to 0-dim float32. ``actor_metrics`` maps a name to ``[num_actors]``
    float32, and is empty without ``actor_ids``.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    actor_metrics: Mapping[str, Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Native and Triton: one pass gives loss, gradient and metrics
# ---------------------------------------------------------------------------------------------------------------------
def unsupported_reason(s: Streams, variant: Variant) -> str:
    """The reason why the compiled kernels can't serve; empty if they can."""
    if not variant.compiled:
        return f"variant is a {type(variant).__name__}, which only the reference in PyTorch computes"
    for stream in s:
        if stream is not None and stream.dtype is torch.float64:
            name = next(name for name, value in s._asdict().items() if value is stream)
            return f"{name} is float64, and the kernels compute in float32"
    return ""


def cast_for_kernel(s: Streams, variant: Variant) -> tuple[Streams, str]:
    """Cast the streams to types that the kernels read. Also returns the reason why the kernels still can't serve.

    float16 can't hold a token's share of the gradient of a large batch, and a loss scale is applied only afterwards.
    So the gradient of float16 stays float32 until it is scaled. float64 streams are computed in float32 unless
    ``logprobs`` itself is float64.
    """
    lp = s.logprobs
    if lp.dtype is torch.float16 and lp.requires_grad and torch.is_grad_enabled():
        s = s._replace(logprobs=lp.float())
    reason = unsupported_reason(s, variant)
    if reason and variant.compiled and lp.dtype is not torch.float64:
        s = s._replace(**{k: x.float() for k, x in s._asdict().items() if x is not None and x.dtype is torch.float64})
        reason = ""
    return s, reason


def _kernel_options(o: Objective) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Encode the options for the kernels as eight numbers and six modes, 0 for "none"."""
    kind, coef, weighted = 0, 0.0, False
    if o.kl:
        kind, coef, weighted = KL_ESTIMATORS.index(o.kl.estimator) + 1, o.kl.coef, o.kl.importance_weighted
    level, cap, bounds = 0, 0.0, None
    if o.correction:
        level, cap, bounds = IS_LEVELS.index(o.correction.level) + 1, o.correction.cap, o.correction.bounds
    below, above = bounds or (-math.inf, math.inf)
    numbers = (*o.variant.bounds, coef, cap, below, above, o.max_length or 0.0)
    modes = (o.variant.kind, kind, level, o.aggregation.index, o.num_actors, int(weighted))
    return tuple(map(float, numbers)), modes


kernel_options = functools.lru_cache(maxsize=256)(_kernel_options)


def allocate_outputs(s: Streams, num_actors: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the loss (0-dim), the gradient (shape of ``logprobs``) and the metrics ``[1 + num_actors, K]``."""
    device = s.logprobs.device  # named, as torch.set_default_device may choose another
    columns = len(metric_names(s.ref_logprobs is not None, s.rollout_logprobs is not None, s.entropy is not None))
    loss = torch.empty((), dtype=torch.float32, device=device)
    grad = torch.empty_like(s.logprobs, memory_format=torch.contiguous_format, requires_grad=False)
    return loss, grad, torch.empty((1 + num_actors, columns), dtype=torch.float32, device=device)


def contiguous_boundaries(s: Streams) -> Streams:
    """The streams in the form of the compiled module, which reads all but ``cu_seqlens`` with any strides."""
    if s.cu_seqlens is None or s.cu_seqlens.is_contiguous():
        return s
    return s._replace(cu_seqlens=s.cu_seqlens.contiguous())


def _compute(s: Streams, numbers: Sequence[float], modes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute loss, gradient and the table of metrics with the compiled module."""
    num_actors = modes[4]
    loss, grad, metrics = allocate_outputs(s, num_actors)
    device, core = native_core(s.logprobs)
    try:
        call = contiguous_boundaries(s), tuple(numbers), tuple(modes), loss, grad, metrics
        if device == "cpu":
            core.policy_loss(*call, torch.get_num_threads())
        else:
            rows, tokens = row_count(s.logprobs, s.cu_seqlens), s.logprobs.numel()
            size = core.cuda_policy_loss_workspace(rows, tokens, num_actors, s.logprobs.get_device())
            workspace = torch.empty(size, dtype=torch.uint8, device=s.logprobs.device)
            core.cuda_policy_loss(*call, workspace, stream_of(s.logprobs))
    except (ValueError, TypeError):
        # The kernel reports only that something is wrong. The slow checks find the value.
        check_streams(s, num_actors)
        if s.logprobs.is_cpu:
            check_stream_values(s, num_actors)
        raise
    return loss, grad, metrics


def _compute_triton(s: Streams, numbers: Sequence[float], modes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    from turnwise.ops.loss.triton import compute

    check_memory(**s._asdict())
    return compute(s, numbers, modes)


_COMPUTE: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {"native": _compute, "triton": _compute_triton}


def _scale_in_place(grad: Tensor, by: Tensor, backend: str) -> None:
    """Multiply the gradient by a factor without waiting for the device. A factor of 1 costs no writes."""
    if backend == "triton":
        from turnwise.ops.loss.triton import scale

        scale(grad, by)
    else:
        native_core(grad)[1].cuda_scale(grad, by.float().contiguous(), stream_of(grad))


_TWICE = "policy_loss: the compiled kernels have no second derivative; use backend='torch' to differentiate twice"


class _Scale(torch.autograd.Function):
    """Multiply the gradient by the loss's own gradient, in a backward that autograd records (``create_graph=True``).

    Takes ``logprobs`` so that a second derivative reaches the error below instead of a graph that ends here.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, grad_loss: Tensor, logprobs: Tensor) -> Tensor:
        return grad * grad_loss

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(_TWICE)


class _AttachGrad(torch.autograd.Function):
    """Attaches to ``loss`` the gradient that was computed with it."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad, logprobs)
        ctx.mark_dirty(loss)  # returns the same tensor; the caller could not change a view of it in place
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        grad, logprobs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _Scale.apply(grad, grad_loss, logprobs), None, None
        # The factor is usually 1, and then the gradient is final already. Reading it costs nothing on a CPU.
        return grad if grad_loss.item() == 1.0 else grad * grad_loss, None, None


class _AttachOnDevice(torch.autograd.Function):
    """Attaches the gradient on a device where reading ``grad_loss`` would wait.

    A kernel scales the gradient in place, or does nothing if the factor is 1. The caller then owns the gradient, so a
    second backward recomputes it.
    """

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, grad: Tensor, *rest: Any) -> Tensor:
        *tensors, ctx.numbers, ctx.modes, ctx.backend = rest
        # Autograd can't save tensors made in inference mode. They can't change either, so the context keeps them.
        ctx.sampled = [t if t is not None and t.is_inference() else None for t in tensors]
        ctx.save_for_backward(logprobs, *(None if t is s else t for t, s in zip(tensors, ctx.sampled, strict=True)))
        ctx.mark_dirty(loss)
        ctx.grad = grad
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        logprobs, *tensors = saved
        tensors = [t if s is None else s for t, s in zip(tensors, ctx.sampled, strict=True)]
        # The first backward hands over the gradient of the forward pass; another one computes it again.
        none = [None] * (len(tensors) + 5)
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            grad = _COMPUTE[ctx.backend](Streams(logprobs.detach(), *tensors), ctx.numbers, ctx.modes)[1]
        if torch.is_grad_enabled():
            return _Scale.apply(grad, grad_loss, logprobs), *none
        _scale_in_place(grad, grad_loss, ctx.backend)
        return grad, *none


def _fused_loss(s: Streams, objective: Objective, backend: str) -> tuple[Tensor, Tensor]:
    # The dispatcher costs more than a small batch does, so plain tensors skip it.
    if type(s.logprobs) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        op = torch.ops.turnwise.policy_loss_triton if backend == "triton" else torch.ops.turnwise.policy_loss
        loss, _, metrics = op(*s, *_kernel_options(objective))
        return loss, metrics
    options = kernel_options(objective)
    loss, grad, metrics = _COMPUTE[backend](s, *options)
    return attach_grad(loss, grad, s, options, backend), metrics


def attach_grad(loss: Tensor, grad: Tensor, s: Streams, options: tuple[Any, Any], backend: str = "native") -> Tensor:
    """Attach the gradient to the loss. ``s`` and ``options`` are those of the computation, for a recompute."""
    if not (s.logprobs.requires_grad and torch.is_grad_enabled()):
        return loss
    if backend == "native" and native_core(grad)[0] == "cpu":
        return _AttachGrad.apply(s.logprobs, loss, grad)
    return _AttachOnDevice.apply(s.logprobs, loss, grad, *s[1:], *options, backend)


# ---------------------------------------------------------------------------------------------------------------------
# torch.library: the same for torch.compile and tensor subclasses
# ---------------------------------------------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, grad, metrics = output
    ctx.mark_non_differentiable(grad, metrics)
    ctx.save_for_backward(grad, inputs[0])
    ctx.rest = len(inputs) - 1


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Any, ...]:
    grad, logprobs = ctx.saved_tensors
    return torch.ops.turnwise.policy_loss_backward(grad, grad_loss, logprobs), *[None] * ctx.rest


def _scale(grad: Tensor, grad_loss: Tensor, logprobs: Tensor) -> Tensor:
    return grad * grad_loss


def _reject(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError(_TWICE)


def _flat(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Take the streams one by one, as an operator must."""
    return lambda *arguments: compute(Streams(*arguments[:-2]), *arguments[-2:])


_TENSORS = (f"Tensor{'?' if name in Streams._field_defaults else ''} {name}" for name in Streams._fields)
_SCHEMA = f"({', '.join(_TENSORS)}, float[] numbers, SymInt[] modes) -> (Tensor, Tensor, Tensor)"
for _name, _function in (("policy_loss", _compute), ("policy_loss_triton", _compute_triton)):
    _op = torch.library.custom_op(
        f"turnwise::{_name}", _flat(_function), mutates_args=(), device_types=("cpu", "cuda"), schema=_SCHEMA
    )
    _op.register_fake(_flat(lambda s, numbers, modes: allocate_outputs(s, modes[4])))
    _op.register_autograd(_backward, setup_context=_save)
_scale_op = torch.library.custom_op("turnwise::policy_loss_backward", _scale, mutates_args=())
_scale_op.register_fake(lambda grad, grad_loss, logprobs: torch.empty_like(grad))
_scale_op.register_autograd(_reject)


# ---------------------------------------------------------------------------------------------------------------------
# Public function
# ---------------------------------------------------------------------------------------------------------------------
def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    clip: Clip | None = None,
    variant: Variant | None = None,
    kl: KL | None = None,
    ref_logprobs: Tensor | None = None,
    correction: ImportanceCorrection | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    selected: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
    check: bool = False,
    backend: str | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped loss (https://arxiv.org/abs/1707.06347, eq. 7) or a variant, with KL and correction.

    Per token, with ``ratio = exp(clamp(logprobs - old_logprobs, -20, 20))``, the loss is
    ``max(-A * ratio, -A * clamp(ratio, 1 - clip.low, 1 + clip.high))``. For ``A < 0`` it is at most
    ``-A * clip.dual_clip``. The weight of ``correction`` multiplies it, and ``kl.coef`` times the KL estimate is added.

    Streams, padded ``[B, T]`` with ``mask``, or packed ``[N]`` with ``cu_seqlens``:

    - ``logprobs``, ``old_logprobs``: of the current and of the old policy. Also ``ref_logprobs`` (needed by ``kl``),
      ``rollout_logprobs`` (needed by ``correction``) and ``entropy`` (for its metric only).
    - ``advantages``: ``[B]``, one per sequence, or one per token. A shape that fits both counts as one per sequence.
    - ``mask``: bool, integer or 0/1 float. A token trains where it is not 0. Other tokens may hold any value, even NaN.
    - ``cu_seqlens [B+1]``: int32 or int64, from 0 to N.
    - ``actor_ids [B]`` with ``num_actors``: adds metrics for each actor.

    Floats are float32, bfloat16, float16 or float64. float16 is computed in float32, and its gradient stays float32
    until the loss's own gradient has scaled it. float64 ``logprobs`` need the reference; another float64 stream is
    computed in float32.

    Options:

    - ``clip``, or ``variant`` instead of it: :class:`GSPO`, :class:`LUSPO`, :class:`CISPO`, :class:`GPG`,
      :class:`Reinforce`, :class:`SAPO`, :class:`GMPO`, :class:`ClipCov`, :class:`KLCov`, or one that the ``"torch"``
      backend computes: :class:`DPPO`, :class:`DRO`, :class:`VESPO`, a :class:`Custom` one.
    - ``selected``: the result of :func:`select_tokens` over a whole optimizer step. It replaces the choice of tokens
      that :class:`ClipCov` and :class:`KLCov` make in this batch.
    - ``aggregation``: ``"token-mean"``, ``sum(l) / tokens``; ``"seq-mean-token-sum"``, the sum of row sums over the
      number of non-empty rows; ``"seq-mean-token-mean"``, the same with row means; ``"seq-mean-token-sum-norm"``,
      ``sum(l) / max_length``; ``"agent-mean"``, the token mean of each actor, then the mean over actors with tokens.
    - ``normalizer``: the result of :func:`loss_normalizer` over a whole optimizer step. It replaces the count of this
      batch, so that micro-batches add up to the gradient of the whole. A number or 0-dim tensor, or ``[num_actors]``
      for ``"agent-mean"``.
    - ``check=True``: checks values (masks, ids, ``cu_seqlens``, ``normalizer``) on a GPU too, which waits for it.

    Metrics are token means: clip fractions low (``A < 0``), high (``A > 0``) and dual (``ClipCov``, ``KLCov``: the
    share selected); ``approx_kl_k1``, ``approx_kl_k3``, ``ratio_mean`` and ``ratio_max`` of the tokens' own ratios;
    ``tokens``; ``entropy``; ``kl`` with ``ref_logprobs``. With ``rollout_logprobs``: ``mismatch_kl``, the mean of
    ``rollout - old``; ``ess``, the effective sample size as a share, ``(sum w)**2 / (n * sum w**2)`` over the tokens,
    with the weight ``w`` that multiplies each token's loss (of the token or its sequence, with cap and bounds; without
    ``correction`` it is ``exp(old - rollout)``); ``rejected``, the share of tokens whose weight the bounds of
    ``correction`` set to 0.

    The gradient flows to ``logprobs`` only. It can be taken once; a second derivative needs ``backend="torch"``. A
    batch without trained tokens has loss 0. Raises ``ValueError`` or ``TypeError`` naming the argument, and
    ``BackendUnavailable`` if the named backend can't serve.

    Example: ``policy_loss(logprobs, old, advantages, mask=mask, clip=Clip(0.2, 0.28), kl=KL("k3"), ref_logprobs=ref)``
    """
    streams = Streams(
        logprobs, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, None, actor_ids, entropy,
        selected,
    )  # fmt: skip
    options = LossOptions(clip, variant, kl, correction, aggregation, normalizer, num_actors, max_length)
    return compute_policy_loss(streams, options, check, backend)


def compute_policy_loss(s: Streams, options: LossOptions, check: bool, backend: str | None) -> PolicyLoss:
    """Check the arguments of :func:`policy_loss`, and compute it."""
    if is_dtensor(s.logprobs):
        return ROUTES["policy_loss"](s, options, check, backend)
    s, objective = prepare(s, options)
    warn_ambiguous(s)
    return prepared_policy_loss(s, objective, check, backend)


def prepared_policy_loss(
    s: Streams, objective: Objective, check: bool = False, backend: str | None = None
) -> PolicyLoss:
    """Choose the backend for prepared streams, and compute the loss."""
    if check:
        check_call(s, objective, check)
    s, reason = cast_for_kernel(s, objective.variant)
    reason = transform_reason(backend, *s) or reason
    served = select_backend("policy_loss", backend, s.logprobs, native=reason, triton=reason)
    if served != "native" or objective.variant.selects:  # the native kernels make their own checks
        check_call(s, objective)
    s = with_selected(s, objective.variant)
    loss, table = reference(s, objective) if served == "torch" else _fused_loss(s, objective, served)
    return PolicyLoss(loss, *named_metrics(s, table))
