"""Compute log-probabilities of tokens directly from hidden states: LM head and softmax, chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import ROUTES, extension, is_dtensor, select_backend
from turnwise.ops.common.layout import transform_reason
from turnwise.ops.logprob import linear_frozen
from turnwise.ops.logprob.checks import as_autocast, check_head, check_id_values, check_max_memory, make_softmax
from turnwise.ops.logprob.choice import head_op
from turnwise.ops.logprob.linear_chunks import backward, forward
from turnwise.ops.logprob.logprob import reference as logprob_reference
from turnwise.ops.logprob.tiles import Softmax


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------
def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    softmax: Softmax,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute all logits at once in plain PyTorch: float32 (float64 for float64 input), any device."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = (hidden if positions is None else hidden[positions]).to(wide)
    ignored = softmax.ignored(targets)
    if ignored is not None:  # before the product, as its gradient multiplies the rows by 0
        rows = rows.masked_fill(ignored[:, None], 0.0)
    logits = rows @ weight.to(wide).T
    if bias is not None:
        logits = logits + bias.to(wide)
    return logprob_reference(logits, targets, softmax, entropy)


# ---------------------------------------------------------------------------------------------------------------------
# torch.library
# ---------------------------------------------------------------------------------------------------------------------
_TWICE = "linear_logprob: this backend has no second derivative; use backend='torch' to differentiate twice"


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, bias, positions, *softmax, entropy, max_memory, keeps, backend = inputs
    _, lse, entropies, kept_or_slope = output
    ctx.mark_non_differentiable(lse, kept_or_slope)
    # The first backward overwrites kept logits.
    ctx.logits, slope = ([kept_or_slope], ()) if keeps is not None else ([], (kept_or_slope,))
    # Autograd can't save tensors made in inference mode. They can't change either, so the context keeps them.
    tensors = hidden, weight, targets, bias, positions
    ctx.sampled = [t if t is not None and t.is_inference() else None for t in tensors]
    kept = [None if t is s else t for t, s in zip(tensors, ctx.sampled, strict=True)]
    ctx.save_for_backward(*kept, lse, entropies, *slope)
    ctx.softmax, ctx.entropy, ctx.max_memory, ctx.backend = softmax, entropy, max_memory, backend
    ctx.set_materialize_grads(False)


def _saved(ctx: Any) -> list[Any]:
    """Return hidden, weight, targets, bias, positions, lse, entropies and, if the weight is frozen, the slope.

    Each backward calls it once: activation checkpointing hands out what is saved a single time.
    """
    saved = ctx.saved_tensors
    count = len(ctx.sampled)
    return [*(t if s is None else s for t, s in zip(saved[:count], ctx.sampled, strict=True)), *saved[count:]]


def _differentiate(
    ctx: Any, grad_logprob: Tensor | None, _: Any, grad_entropy: Tensor | None, __: Any
) -> tuple[Any, ...]:
    return _gradients(ctx, _saved(ctx), grad_logprob, grad_entropy)


def _gradients(ctx: Any, saved: list[Any], grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
    *tensors, lse, entropies = saved[:7]
    need_hidden, need_weight, _, need_bias, *_ = ctx.needs_input_grad
    with_entropy = ctx.entropy and grad_entropy is not None
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(lse)
    # Kept logits are changed in place, which the registered op may not do.
    logits = ctx.logits.pop() if ctx.logits and not torch.is_grad_enabled() else None
    in_place = logits is not None and len(logits) > 0
    registered = torch.ops.turnwise.linear_logprob_backward
    call: Callable[..., Any] = functools.partial(backward, kept=logits) if in_place else registered
    with torch.autocast(lse.device.type, enabled=False):
        grads = call(
            grad_logprob,
            grad_entropy if with_entropy else None,
            *(*tensors, lse),
            entropies if with_entropy else None,
            *(*ctx.softmax, ctx.max_memory, need_hidden, need_weight, need_bias, ctx.backend),
        )
    hidden_grad, weight_grad, bias_grad = (
        value if needed else None for value, needed in zip(grads, (need_hidden, need_weight, need_bias), strict=True)
    )
    return hidden_grad, weight_grad, None, bias_grad, *[None] * 8


def _differentiate_frozen(
    ctx: Any, grad_logprob: Tensor | None, _: Any, grad_entropy: Tensor | None, __: Any
) -> tuple[Any, ...]:
    saved = _saved(ctx)
    if grad_logprob is None or grad_entropy is not None:  # the entropy's gradient needs the logits again
        return _gradients(ctx, saved, grad_logprob, grad_entropy)[:-2]
    hidden, positions, slope = saved[0], saved[4], saved[-1]
    return torch.ops.turnwise.linear_logprob_frozen_backward(grad_logprob, slope, hidden, positions), *[None] * 9


def _reject(ctx: Any, *_: Any) -> None:
    raise RuntimeError(_TWICE)


if extension is not None:
    _op = torch.library.custom_op("turnwise::linear_logprob", forward, mutates_args=())
    _backward_op = torch.library.custom_op("turnwise::linear_logprob_backward", backward, mutates_args=())

    @_op.register_fake
    def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, wide = targets.shape[0], torch.promote_types(hidden.dtype, torch.float32)
        out = [hidden.new_empty(size, dtype=torch.float32) for size in (tokens, tokens, tokens if rest[-4] else 0)]
        # A graph keeps no logits.
        kept = hidden.new_empty((0, weight.shape[0]), dtype=wide if hidden.is_cuda else hidden.dtype)
        return out[0], out[1], out[2], kept

    @_backward_op.register_fake
    def _fake_backward(
        _: Tensor, __: Tensor | None, hidden: Tensor, weight: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        need_hidden, need_weight, need_bias = rest[-4:-1]
        bias = hidden if rest[1] is None else rest[1]
        return (
            hidden.new_empty(hidden.shape if need_hidden else 0),
            weight.new_empty(weight.shape if need_weight else 0),
            bias.new_empty(weight.shape[0] if need_bias else 0),
        )

    _frozen_op = torch.library.custom_op("turnwise::linear_logprob_frozen", linear_frozen.forward, mutates_args=())
    _scale_op = torch.library.custom_op(
        "turnwise::linear_logprob_frozen_backward", linear_frozen.backward, mutates_args=()
    )

    @_frozen_op.register_fake
    def _fake_frozen(hidden: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        made = _fake(hidden, weight, targets, *rest, False, "native")
        return *made[:3], hidden.new_empty(targets.shape[0], hidden.shape[1])

    @_scale_op.register_fake
    def _fake_scale(_: Tensor, __: Tensor, like: Tensor, ___: Tensor | None) -> Tensor:
        return like.new_empty(like.shape)

    _frozen_op.register_autograd(
        _differentiate_frozen, setup_context=lambda ctx, inputs, output: _save(ctx, (*inputs, None, "native"), output)
    )
    _scale_op.register_autograd(_reject, setup_context=lambda ctx, inputs, output: None)
    _op.register_autograd(_differentiate, setup_context=_save)
    _backward_op.register_autograd(_reject, setup_context=lambda ctx, inputs, output: None)


# ---------------------------------------------------------------------------------------------------------------------
# Public function
# ---------------------------------------------------------------------------------------------------------------------
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    bias: Tensor | None = None,
    entropy: bool = False,
    positions: Tensor | None = None,
    max_memory: int | None = None,
    check: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``log_softmax((hidden @ weight.T + bias) / temperature)`` at ``targets`` without all ``[N, V]`` logits.

    ``hidden [N, H]`` and ``weight [V, H]`` (the layout of ``torch.nn.Linear``) are both float32, bfloat16, float16 or
    float64 (reference only). ``targets [N]`` are int64 or int32 in ``[0, V)``; ``bias [V]`` is any float. Under
    autocast, hidden and weight are cast as ``torch.nn.functional.linear`` casts them.
    ``positions [M]`` (int64 or int32 in ``[0, N)``, repeats allowed) picks hidden rows; ``targets`` is then ``[M]``.
    ``softcap`` caps the logits, bias included, as in :func:`logprob`. A token whose target is ``ignore_index`` has
    log-probability 0, entropy 0 and no gradient; its hidden row is not read. On a CPU such tokens cost nothing.

    Returns ``logprob`` float32, ``[N]`` or ``[M]``; with ``entropy=True`` also the entropy of each distribution.
    Gradients flow to hidden, weight and bias if they require one. A chunk of tokens has all its logits in memory at
    once, within ``max_memory`` bytes: by default 256 MiB on a CPU, where most chunks are smaller, and on a GPU a 64th
    of its memory, between 256 MiB and 1 GiB. A chunk has at least one token. With gradients the forward keeps the
    logits of as many tokens as that holds, so these take three products with the backward; the backward recomputes the
    others, in four. A graph of ``torch.compile`` keeps none, nor does Triton. The gradient of a narrow weight is summed
    in its own dtype over up to 24 chunks, and in float32, which takes as much memory as two such weights, over more. If
    weight and bias are frozen, as under LoRA, the native backend makes the slope of hidden ``[M, H]`` in the forward.
    The backward then recomputes nothing, unless the entropy's gradient is requested. Float16 has no such path. Nor has
    Triton, so there ``1 - p[t]`` of a frozen head has the absolute accuracy of float32.

    Log-sum-exps are float64. On a CPU, logits of bfloat16 and float16 are rounded to that type, as
    ``hidden @ weight.T`` rounds them; on a GPU they stay float32. There float32 inputs take Triton's kernels where they
    serve and no backend is named: each product becomes three in TF32, which keep float32's accuracy. An id out of range
    raises on a CPU, and on a GPU only with ``check=True``, which waits for the device; else it gives NaN. Raises
    ``ValueError`` or ``TypeError`` naming the argument, and ``BackendUnavailable`` if the named backend can't serve. A
    second derivative needs ``backend="torch"``.

    Example: ``linear_logprob(model(tokens)[:-1], lm_head.weight, tokens[1:], temperature=0.7)``
    """
    softmax = make_softmax(temperature, softcap, ignore_index)
    options: dict[str, Any] = {
        **softmax._asdict(), "bias": bias, "entropy": entropy, "positions": positions,
        "max_memory": max_memory, "check": check, "backend": backend,
    }  # fmt: skip
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return linear_logprob(as_autocast(hidden, dtype), as_autocast(weight, dtype), targets, **options)
    if is_dtensor(hidden, weight):
        return ROUTES["linear_logprob"](hidden, weight, targets, **options)
    check_head(hidden, weight, targets, bias, positions)
    check_max_memory(max_memory)
    if (hidden.is_cpu or check) and not torch.compiler.is_compiling():
        check_id_values("targets", targets, weight.shape[0], softmax.ignore_index)
        if positions is not None:
            check_id_values("positions", positions, hidden.shape[0])
    narrow = "hidden is float64, and the kernels compute in float32" if hidden.dtype is torch.float64 else ""
    reason = transform_reason(backend, hidden, weight, targets, bias, positions) or narrow
    frozen = linear_frozen.serves(hidden, weight, bias)
    chosen = select_backend(head_op(hidden, frozen), backend, hidden, native=reason, triton=reason)
    if chosen == "torch":
        logprob, entropies = reference(hidden, weight, targets, bias, positions, softmax, entropy)
    elif chosen == "native" and frozen:
        logprob, _, entropies, _ = torch.ops.turnwise.linear_logprob_frozen(
            hidden, weight, targets, bias, positions, *softmax, entropy, max_memory
        )
    else:
        leaves = (hidden, weight, bias)
        trains = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
        keeps = trains and not torch.compiler.is_compiling()
        logprob, _, entropies, _ = torch.ops.turnwise.linear_logprob(
            hidden, weight, targets, bias, positions, *softmax, entropy, max_memory, keeps, chosen
        )
    return (logprob, entropies) if entropy else logprob  # type: ignore[return-value]
