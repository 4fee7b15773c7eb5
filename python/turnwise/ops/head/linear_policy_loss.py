"""Compute LM head and policy loss together, so that the logits are computed once where the loss allows it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import forced_backend, native_core, select_backend
from turnwise.ops.common.layout import Streams, check_each, is_number, transform_reason
from turnwise.ops.head.one_pass import HeadLoss, one_pass_loss, plan_loss, with_bonus, with_logprobs
from turnwise.ops.logprob.checks import (
    as_autocast,
    check_head,
    check_id_values,
    check_ids,
    check_max_memory,
    make_softmax,
)
from turnwise.ops.logprob.choice import device_of, head_op
from turnwise.ops.logprob.linear_chunks import Head
from turnwise.ops.logprob.linear_logprob import linear_logprob
from turnwise.ops.loss.arguments import LossOptions, check_call, prepare, warn_ambiguous, with_selected
from turnwise.ops.loss.options import KL, Clip, ImportanceCorrection, Variant
from turnwise.ops.loss.policy_loss import prepared_policy_loss
from turnwise.ops.loss.reference import Objective


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------
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


def check_reads(reads: Tensor | None, targets: Tensor) -> None:
    """Check that ``reads`` are indices of ``targets``. Their values are checked on a CPU."""
    if reads is None:
        return
    check_ids("reads", reads, targets.device)
    if reads.dim() != 1:
        raise ValueError(f"reads has shape {tuple(reads.shape)}: expected [N]")
    if reads.is_cpu and not torch.compiler.is_compiling():
        check_id_values("reads", reads, targets.shape[0])


def check_temperatures(temperature: object, targets: Tensor) -> Tensor | None:
    """Check temperatures of each target; ``None`` if there is one number. Their values are checked on a CPU."""
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return None
    if temperature.shape != targets.shape or not temperature.is_floating_point():
        got = f"{temperature.dtype} {tuple(temperature.shape)}"
        raise ValueError(f"temperature is {got}: expected a number, or floats {tuple(targets.shape)}, as targets")
    if temperature.is_cpu and not torch.compiler.is_compiling():
        check_each("temperature", temperature, ~((temperature > 0) & temperature.isfinite()), "a finite number > 0")
    return temperature.detach()


class Places(NamedTuple):
    """The targets of a head, and which tokens read them."""

    targets: Tensor
    positions: Tensor | None
    reads: Tensor | None
    temperatures: Tensor | None

    def sorted(self) -> Places:
        """Order the targets by their temperatures, so that chunks have one."""
        if self.temperatures is None:
            return self
        order = self.temperatures.argsort(stable=True)
        places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        positions = order if self.positions is None else self.positions[order]
        reads = places if self.reads is None else places[self.reads]
        return Places(self.targets[order], positions, reads, self.temperatures[order])


def check_grad_into(into: Tensor | None, hidden: Tensor, weight: Tensor) -> None:
    if into is None:
        return
    if not isinstance(into, Tensor) or into.dtype is not torch.float32:
        raise TypeError(f"grad_into has type {getattr(into, 'dtype', type(into).__name__)}: expected a float32 tensor")
    if into.shape != weight.shape or into.device != weight.device:
        got = f"{tuple(into.shape)} on {into.device}"
        raise ValueError(f"grad_into has shape {got}: expected {tuple(weight.shape)} on {weight.device}, as weight")
    if hidden.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"hidden has dtype {hidden.dtype}: expected float32 or bfloat16, as grad_into is given")


# ---------------------------------------------------------------------------------------------------------------------
# Public function
# ---------------------------------------------------------------------------------------------------------------------
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    cu_seqlens: Tensor,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    reads: Tensor | None = None,
    clip: Clip | None = None,
    variant: Variant | None = None,
    kl: KL | None = None,
    ref_logprobs: Tensor | None = None,
    correction: ImportanceCorrection | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: bool = False,
    entropy_coef: float = 0.0,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    actor_ids: Tensor | None = None,
    num_actors: int | None = None,
    max_length: float | None = None,
    selected: Tensor | None = None,
    grad_into: Tensor | None = None,
    max_memory: int | None = None,
    check: bool = False,
    backend: str | None = None,
) -> HeadLoss:
    """Compute :func:`policy_loss` of :func:`linear_logprob` with one pass over the logits: three matrix products.

    Input is packed: ``cu_seqlens [B+1]``, and all streams ``[N]`` like ``targets`` (``[M]`` with ``positions``).
    ``advantages`` are ``[B]`` or per token. Arguments and errors are those of :func:`linear_logprob` and
    :func:`policy_loss`. ``entropy=True`` adds the metric; ``entropy_coef`` times the entropy, aggregated as the loss
    is, is taken from the loss. ``backend`` names the backend of the head; the loss takes the best one for the device. A
    token whose target is ``ignore_index`` counts as masked. Tokens with equal hidden states and targets can share a
    log-probability: with ``reads [N]`` (int64 or int32 in ``[0, M)``), token ``n`` has that of target ``reads[n]``, and
    the streams are ``[N]``. ``temperature`` may be one for each target, like ``targets``; reading how many there are
    makes a GPU wait.

    The forward computes the gradients chunk by chunk, within ``max_memory`` bytes of logits (as in
    :func:`linear_logprob`); the backward scales and returns them. For PPO, CISPO, GPG, REINFORCE, SAPO, DPPO and DRO a
    token needs no other token's log-probability. For GSPO, LUSPO, GMPO, VESPO and corrections by sequence chunks end
    where sequences end, which reads ``cu_seqlens`` and makes a GPU wait. For Clip-Cov and KL-Cov ``selected`` must be
    given. Masked tokens cost nothing on a CPU. Gradients that are not required are not computed.

    Two passes are needed for sequences that are longer than the memory holds, custom losses, the choice of
    ``selected``, a loss by sequence with ``reads`` or several temperatures, ``torch.compile`` and ``backend="torch"``.
    On a GPU from compute capability 10.0 they are faster in float32, where Triton makes its products in TF32.

    The gradient of a bfloat16 weight is summed in its own dtype over up to 24 chunks, and in float32 over more. With
    ``grad_into [V, H]`` float32 one pass adds it there instead, in the forward, and the weight gets no gradient: the
    loss's own gradient must be 1. A GPU does not check that. Two passes add it in the backward. Gradients of float16
    are kept in float32, and scaled up, until the loss's own gradient has scaled them. A loss scale works as usual.

    Returns loss and metrics as :func:`policy_loss` does, and ``logprobs [N]`` float32 without a gradient, which are 0
    for masked tokens.

    Example: ``linear_policy_loss(states, lm_head.weight, targets, old, advantages, cu_seqlens=cu).loss.backward()``
    """
    check_entropy(entropy)
    if not (is_number(entropy_coef) and abs(entropy_coef) < math.inf):
        raise ValueError(f"entropy_coef={entropy_coef!r}: expected a finite number")
    head: dict[str, Any] = {
        "temperature": temperature, "softcap": softcap, "ignore_index": ignore_index, "bias": bias,
        "positions": positions, "max_memory": max_memory, "check": check, "backend": backend,
    }  # fmt: skip
    streams = Streams(  # targets instead of log-probabilities, which the head makes
        targets, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, None, actor_ids, None,
        selected,
    )  # fmt: skip
    options = LossOptions(clip, variant, kl, correction, aggregation, normalizer, num_actors, max_length)
    rest = reads, grad_into, entropy, float(entropy_coef)
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return _compute(hidden, weight, targets, head, streams, options, *rest)
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        hidden, weight = as_autocast(hidden, dtype), as_autocast(weight, dtype)
        return _compute(hidden, weight, targets, head, streams, options, *rest)


def _backend(hidden: Tensor, frozen: bool, backend: str | None, reason: str) -> str | None:
    """The backend of one pass; ``None`` if two ops serve better, which then choose or reject a backend."""
    if torch.compiler.is_compiling() or reason or hidden.dtype is torch.float64:
        return None
    if "torch" in (backend, forced_backend()):  # which is the reference
        return None
    served = select_backend(head_op(hidden, frozen), backend, hidden)
    faster = served == "triton" and hidden.dtype is torch.float32 and device_of(hidden).capability >= (10, 0)
    return None if hidden.is_cuda and faster else served


def _compute(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    head: dict[str, Any],
    s: Streams,
    options: LossOptions,
    reads: Tensor | None,
    grad_into: Tensor | None,
    entropy: bool,
    entropy_coef: float,
) -> HeadLoss:
    """Choose one pass or two. ``head`` holds the other arguments of :func:`linear_logprob`."""
    # Validate
    bias, positions, check, backend = (head[name] for name in ("bias", "positions", "check", "backend"))
    temperatures = check_temperatures(head["temperature"], targets)
    if temperatures is not None and len(distinct := temperatures.unique()) <= 1:
        head, temperatures = head | {"temperature": distinct[0].item() if len(distinct) else 1.0}, None
    softmax = make_softmax(
        1.0 if temperatures is not None else head["temperature"], head["softcap"], head["ignore_index"]
    )
    check_head(hidden, weight, targets, bias, positions)
    check_max_memory(head["max_memory"])
    check_reads(reads, targets)
    check_grad_into(grad_into, hidden, weight)
    s, objective = prepare_packed(s, options, targets if reads is None else reads, check)
    ignored = softmax.ignored(targets)
    if ignored is not None:
        ignored = ignored if reads is None else ignored[reads]
        s = s._replace(mask=~ignored if s.mask is None else (s.mask != 0) & ~ignored)

    # One pass, if one is planned
    leaves = (hidden, weight, bias)
    wanted = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    served = _backend(hidden, frozen, backend, transform_reason(backend, *leaves, positions, targets, *s))
    if served is not None and (hidden.is_cpu or check):  # else linear_logprob checks the ids
        check_id_values("targets", targets, weight.shape[0], softmax.ignore_index)
        if positions is not None:
            check_id_values("positions", positions, hidden.shape[0])
    if served is not None and wanted:
        with torch.no_grad():
            places = Places(targets, positions, reads, temperatures).sorted()
            at = places.targets, bias, places.positions
            whole = Head(hidden, weight, *at, softmax, served, head["max_memory"])
            plan = plan_loss(whole, s, objective, places.reads, places.temperatures, entropy_coef)
        if plan is not None:
            return one_pass_loss(plan, leaves, s, entropy, grad_into if weight.requires_grad else None)

    # Two passes
    skips = served is not None and s.mask is not None and reads is None and native_core(hidden)[0] == "cpu"
    if skips and s.mask is not None:  # masked tokens cost nothing then; no id is -1, as all were checked
        head = head | {"ignore_index": -1 if softmax.ignore_index is None else softmax.ignore_index}
        targets = targets.masked_fill(s.mask == 0, head["ignore_index"])
    if grad_into is not None and wanted and weight.requires_grad:
        weight = _AddInto.apply(weight, grad_into)
    logprob, entropies = _read(hidden, weight, targets, temperatures, entropy or entropy_coef != 0, head)
    if reads is not None:
        logprob, entropies = logprob[reads], None if entropies is None else entropies[reads]
    exact = backend if backend == "torch" else None  # for a second derivative, both must be the reference
    metric = entropies.detach() if entropy and entropies is not None else None
    result = prepared_policy_loss(s._replace(logprobs=logprob, entropy=metric), objective, backend=exact)
    result = with_bonus(result, entropies, s, objective, entropy_coef)
    return with_logprobs(result, logprob, s.mask)


def _read(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor | None, entropy: bool, head: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities, and entropies if asked, temperature by temperature."""
    if temperatures is None:
        made: Any = linear_logprob(hidden, weight, targets, entropy=entropy, **head)
        return (made[0], made[1]) if entropy else (made, None)
    where = [torch.nonzero(temperatures == value)[:, 0] for value in temperatures.unique()]
    parts, positions = [], head["positions"]
    for index in where:
        at = index if positions is None else positions[index]
        options = head | {"temperature": temperatures[index[0]].item(), "positions": at}
        parts.append(_read(hidden, weight, targets[index], None, entropy, options))
    back = torch.cat(where).argsort()
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs)[back], torch.cat(entropies)[back] if entropy else None


class _AddInto(torch.autograd.Function):
    """Passes a weight on, and adds its gradient to ``into`` instead."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, into: Tensor) -> Tensor:
        ctx.into = into
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.into.add_(grad)
        return None, None
