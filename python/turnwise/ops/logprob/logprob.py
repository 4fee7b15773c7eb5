"""Compute log-probabilities of tokens from existing logits: one read of the logits, and no second copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import ROUTES, extension, is_dtensor, select_backend
from turnwise.ops.common.layout import FLOATS, bounded, transform_reason
from turnwise.ops.logprob.checks import check_id_values, check_ids, make_softmax
from turnwise.ops.logprob.steps import kernels
from turnwise.ops.logprob.tiles import Softmax, Tile, Upstream


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------
def reference(logits: Tensor, targets: Tensor, softmax: Softmax, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Compute ``logprob`` and the entropy in plain PyTorch: float32 (float64 for float64 logits), any device."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignored = softmax.ignored(targets)
    if ignored is not None:
        # Ignored rows may hold any value, NaN included, so they become 0 before any arithmetic.
        logits, targets = logits.masked_fill(ignored[..., None], 0.0), targets.masked_fill(ignored, 0)
    if softmax.softcap is not None:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    logs = torch.log_softmax(logits / softmax.temperature, dim=-1)
    targets, outside = bounded(targets.long(), logs.shape[-1])
    logprob = logs.gather(-1, targets[..., None])[..., 0].masked_fill(outside, torch.nan)
    entropies = entropy_of(logs) if entropy else None
    if ignored is not None:
        logprob = logprob.masked_fill(ignored, 0.0)
        entropies = None if entropies is None else entropies.masked_fill(ignored, 0.0)
    return logprob, entropies


def entropy_of(logs: Tensor) -> Tensor:
    """The entropy of log-probabilities. Tokens of probability 0 add nothing to it or to its gradient."""
    return -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Compiled kernels: native or Triton
# ---------------------------------------------------------------------------------------------------------------------
def _matrices(logits: Tensor) -> list[Tensor]:
    """View the logits as matrices without a copy: one, or one per sequence if gaps lie between them (``x[:, :-1]``)."""
    if logits.dim() == 2:
        return [logits]
    if logits.is_contiguous() or logits.shape[0] <= 1:
        return [logits.reshape(-1, logits.shape[-1])]
    return list(logits.unbind(0))


def _with_rows(logits: Tensor) -> Tensor:
    """Copy the logits only if those of a token are not adjacent in memory."""
    return logits if logits.shape[-1] <= 1 or logits.stride(-1) == 1 else logits.contiguous()


def is_writable(logits: Tensor) -> bool:
    """True if no two elements share memory and the kernels can write into it."""
    reach = 1  # elements that the axes with smaller strides span
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += (size - 1) * stride
    return _with_rows(logits) is logits


def _forward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    entropy: bool,
    inplace_backward: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``logprob``, ``lse`` and ``entropy`` (``[0]`` if not requested): float32, in the shape of the targets."""
    matrices = _matrices(_with_rows(logits))
    columns = Softmax(temperature, softcap, ignore_index).columns
    parts = []
    for matrix, row in zip(matrices, targets.reshape(len(matrices), -1), strict=True):
        parts.append(kernels(backend).log_softmax(Tile(matrix, None, row, *columns), entropy))
    if len(parts) == 1:
        logprob, lse, entropies = parts[0]
    else:
        none = (torch.empty(0, dtype=torch.float32, device=logits.device),) * 3
        logprob, lse, entropies = (torch.cat(values) for values in zip(none, *parts, strict=True))
    shape = targets.shape
    return logprob.view(shape), lse.view(shape), entropies.view(shape if entropy else (0,))


def _gradient(
    out: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    softmax: Softmax,
    backend: str,
) -> None:
    """Write the gradient of the logits into ``out``, which may be the logits themselves."""
    matrices = _matrices(logits)
    streams = targets, lse, grad_logprob, entropy, grad_entropy
    count = len(matrices)
    ids, *rest = ([None] * count if s is None else s.reshape(count, -1) for s in streams)
    outs = out.unbind(0) if count > 1 else _matrices(out)
    for matrix, to, row, *upstream in zip(matrices, outs, ids, *rest, strict=True):
        kernels(backend).grad(Tile(matrix, None, row, *softmax.columns), Upstream(*upstream), to)


def _backward(
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    backend: str,
) -> Tensor:
    rows = _with_rows(logits)
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    softmax = Softmax(temperature, softcap, ignore_index)
    _gradient(out, grad_logprob, grad_entropy, rows, targets, lse, entropy, softmax, backend)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# torch.library
# ---------------------------------------------------------------------------------------------------------------------
_TWICE = "logprob: this backend has no second derivative; use backend='torch' to differentiate twice"


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, targets, *softmax, entropy, inplace, backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, targets, output[1], output[2])
    ctx.softmax, ctx.entropy, ctx.inplace, ctx.backend = Softmax(*softmax), entropy, inplace, backend
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_logprob: Tensor | None, _: Any, grad_entropy: Tensor | None) -> tuple[Any, ...]:
    logits, targets, lse, entropies = ctx.saved_tensors
    with_entropy = ctx.entropy and grad_entropy is not None
    upstream = torch.zeros_like(lse) if grad_logprob is None else grad_logprob
    streams = targets, lse, entropies if with_entropy else None
    grad_entropy = grad_entropy if with_entropy else None
    plain = type(logits) in (Tensor, torch.nn.Parameter)  # not a tensor subclass, such as a compiler traces with
    if ctx.inplace and plain and is_writable(logits):
        memory = logits.detach()
        _gradient(memory, upstream, grad_entropy, memory, *streams, ctx.softmax, ctx.backend)
        torch.autograd.graph.increment_version(logits)  # so that autograd rejects later uses of the old logits
        return memory, *[None] * 7
    call = torch.ops.turnwise.logprob_backward
    out = call(upstream, grad_entropy, logits, *streams, *ctx.softmax, ctx.backend)
    return out, *[None] * 7


def _reject(ctx: Any, *_: Any) -> None:
    raise RuntimeError(_TWICE)


if extension is not None:
    _op = torch.library.custom_op("turnwise::logprob", _forward, mutates_args=())
    _backward_op = torch.library.custom_op("turnwise::logprob_backward", _backward, mutates_args=())

    @_op.register_fake
    def _fake(logits: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        shape = targets.shape
        out = [logits.new_empty(s, dtype=torch.float32) for s in (shape, shape, shape if rest[-3] else (0,))]
        return out[0], out[1], out[2]

    @_backward_op.register_fake
    def _fake_backward(_: Tensor, __: Tensor | None, logits: Tensor, *rest: Any) -> Tensor:
        return logits.new_empty(logits.shape)

    _op.register_autograd(_differentiate, setup_context=_save)
    _backward_op.register_autograd(_reject, setup_context=lambda ctx, inputs, output: None)


# ---------------------------------------------------------------------------------------------------------------------
# Public function
# ---------------------------------------------------------------------------------------------------------------------
def check_logits(logits: Tensor, targets: Tensor, name: str = "logits") -> None:
    """Check shapes, dtypes and devices. Raises an error that names the argument."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(logits).__name__}")
    if logits.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {logits.dtype}: expected float32, bfloat16, float16 or float64")
    if logits.dim() not in (2, 3) or logits.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(logits.shape)}: expected [N, V] or [B, T, V], V at least 1")
    check_ids("targets", targets, logits.device)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)}: expected {tuple(logits.shape[:-1])}, as {name}")


def logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    entropy: bool = False,
    inplace_backward: bool = False,
    check: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``log_softmax(logits / temperature)`` at ``targets`` in one read of the logits, without a copy of them.

    ``logits`` are ``[N, V]`` or ``[B, T, V]``: float32, bfloat16, float16 (computed in float32) or float64 (reference
    only). ``targets`` are ``[N]`` or ``[B, T]``, int64 or int32 in ``[0, V)``. Strides may be any. A copy is made only
    if a token's logits are not adjacent in memory; ``logits[:, :-1]`` needs none.

    ``softcap`` replaces the logits by ``softcap * tanh(logits / softcap)`` before the temperature divides them, as the
    Gemma models of Hugging Face do. A token whose target is ``ignore_index`` has log-probability 0, entropy 0 and no
    gradient, and its logits are not read.

    Returns ``logprob`` float32 in the shape of ``targets``; with ``entropy=True`` also the entropy of each
    distribution. The gradient has the dtype of the logits. With ``inplace_backward=True`` the backward writes it over
    the logits, which saves their size in memory. The logits must not be used afterwards, and using them in another
    backward raises. Logits that share memory with each other, as after ``expand``, are not overwritten.

    An id out of range raises on a CPU, and on a GPU only with ``check=True``, which waits for the device; else it gives
    NaN. Raises ``ValueError`` or ``TypeError`` naming the argument, and ``BackendUnavailable`` if the named backend
    can't serve. A second derivative needs ``backend="torch"``.

    Example: ``logprob(model(tokens).logits[:, :-1], tokens[:, 1:], temperature=0.7)``
    """
    softmax = make_softmax(temperature, softcap, ignore_index)
    if is_dtensor(logits):
        options = {**softmax._asdict(), "entropy": entropy, "inplace_backward": inplace_backward}
        return ROUTES["logprob"](logits, targets, **options, check=check, backend=backend)
    check_logits(logits, targets)
    if (logits.is_cpu or check) and not torch.compiler.is_compiling():
        check_id_values("targets", targets, logits.shape[-1], softmax.ignore_index)
    narrow = "logits is float64, and the kernels compute in float32" if logits.dtype is torch.float64 else ""
    reason = transform_reason(backend, logits, targets) or narrow
    chosen = select_backend("logprob", backend, logits, native=reason, triton=reason)
    if chosen == "torch":
        values, entropies = reference(logits, targets, softmax, entropy)
    else:
        call = torch.ops.turnwise.logprob
        values, _, entropies = call(logits, targets, *softmax, entropy, inplace_backward, chosen)
    return (values, entropies) if entropy else values  # type: ignore[return-value]
