"""The ops on DTensors: their local shards go to the plain ops, or to those of a group.

Each dimension of the mesh may shard the tokens or the vocabulary. Tensors that are sharded over tokens stay sharded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.dispatch import ROUTES, extension, is_dtensor
from turnwise.ops.common.layout import Streams, row_count
from turnwise.ops.logprob.linear_logprob import linear_logprob
from turnwise.ops.logprob.logprob import logprob
from turnwise.ops.loss.arguments import LossOptions
from turnwise.ops.loss.policy_loss import PolicyLoss, compute_policy_loss
from turnwise.ops.parallel.sequence_policy_loss import compute_sequence_parallel
from turnwise.ops.parallel.vocab_logprob import vocab_parallel_linear_logprob, vocab_parallel_logprob


# ---------------------------------------------------------------------------------------------------------------------
# Placements
# ---------------------------------------------------------------------------------------------------------------------
def _placed(name: str, tensor: Any, mesh: Any, placements: list[Any]) -> Any:
    """Redistribute a DTensor. Raises for another mesh or no DTensor."""
    if not is_dtensor(tensor):
        raise TypeError(f"{name}: expected a DTensor, as other arguments are, got {type(tensor).__name__}")
    if tensor.device_mesh != mesh:
        raise ValueError(f"{name} is on {tensor.device_mesh}: expected {mesh}, as the other arguments")
    return tensor.redistribute(mesh, placements)


def _local(name: str, tensor: Any, mesh: Any, placements: list[Any]) -> Tensor:
    return _placed(name, tensor, mesh, placements).to_local()


def _whole(name: str, tensor: Any, mesh: Any) -> Any:
    """The local copy of a DTensor that every rank needs whole. Other arguments pass."""
    from torch.distributed.tensor import Replicate

    return _local(name, tensor, mesh, [Replicate()] * mesh.ndim) if is_dtensor(tensor) else tensor


def _vocabulary_group(placements: list[Any], axis: int, name: str, mesh: Any) -> tuple[int | None, Any]:
    """The dimension of the mesh that shards the vocabulary, and its group; ``None`` if there is none."""
    dimensions = [i for i, placement in enumerate(placements) if placement.is_shard(axis)]
    if len(dimensions) > 1:
        raise ValueError(f"{name} has placements {tuple(placements)}: expected the vocabulary on one mesh dimension")
    return (dimensions[0], mesh.get_group(dimensions[0])) if dimensions else (None, None)


def _distributed(local: Tensor, like: Any, mesh: Any, placements: list[Any]) -> Any:
    """The DTensor of local results in the shape of ``like``, which uneven shards don't show."""
    from torch.distributed.tensor import DTensor

    shape = like.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


# ---------------------------------------------------------------------------------------------------------------------
# Ops
# ---------------------------------------------------------------------------------------------------------------------
def _logprob(logits: Any, targets: Any, *, entropy: bool, **options: Any) -> Any:
    from torch.distributed.tensor import Replicate

    register_shardings()
    mesh, last = logits.device_mesh, logits.dim() - 1
    # A shard of tokens or vocabulary stays; partial sums are reduced.
    inputs = [p if p.is_shard() and p.dim <= last else Replicate() for p in logits.placements]
    dimension, group = _vocabulary_group(inputs, last, "logits", mesh)
    rows = [Replicate() if i == dimension else p for i, p in enumerate(inputs)]
    local = _local("logits", logits, mesh, inputs), _local("targets", targets, mesh, rows)
    out: Any
    if dimension is None:
        out = logprob(*local, entropy=entropy, **options)
    else:
        out = vocab_parallel_logprob(*local, group=group, entropy=entropy, **options)
    values = [_distributed(x, targets, mesh, rows) for x in (out if entropy else (out,))]
    return tuple(values) if entropy else values[0]


def _linear_logprob(
    hidden: Any, weight: Any, targets: Any, *, bias: Any, positions: Any, entropy: bool, **options: Any
) -> Any:
    from torch.distributed.tensor import Partial, Replicate

    register_shardings()
    if positions is not None:
        raise ValueError("positions: expected None, as hidden or weight is a DTensor; gather the rows of hidden before")
    mesh = (hidden if is_dtensor(hidden) else weight).device_mesh
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        _placed(name, tensor, mesh, list(getattr(tensor, "placements", ())))
    heads = [p if p.is_shard(0) else Replicate() for p in weight.placements]
    dimension, group = _vocabulary_group(heads, 0, "weight", mesh)
    # Where the vocabulary is sharded, every rank needs all tokens.
    rows = [p if p.is_shard(0) and i != dimension else Replicate() for i, p in enumerate(hidden.placements)]
    # Each rank's tokens give a part of the gradient of the weight.
    partial = [Partial() if row.is_shard() else head for row, head in zip(rows, heads, strict=True)]
    local_weight = _placed("weight", weight, mesh, heads).to_local(grad_placements=partial)
    local_bias = None if bias is None else _placed("bias", bias, mesh, heads).to_local(grad_placements=partial)
    local_hidden, local_targets = _local("hidden", hidden, mesh, rows), _local("targets", targets, mesh, rows)
    head = local_hidden, local_weight, local_targets
    out: Any
    if dimension is None:
        out = linear_logprob(*head, bias=local_bias, entropy=entropy, **options)
    else:
        out = vocab_parallel_linear_logprob(*head, bias_shard=local_bias, group=group, entropy=entropy, **options)
    values = [_distributed(x, targets, mesh, rows) for x in (out if entropy else (out,))]
    return tuple(values) if entropy else values[0]


def _policy_loss(s: Streams, options: LossOptions, check: bool, backend: str | None) -> PolicyLoss:
    """Tokens that one dimension of the mesh shards are a part of one packed stream, or columns of a batch."""
    from torch.distributed.tensor import DTensor, Replicate

    logprobs: Any = s.logprobs
    if backend not in (None, "torch"):
        raise ValueError(f"backend={backend!r}: expected None or 'torch', as logprobs is a DTensor")
    mesh = logprobs.device_mesh
    placements = [p if p.is_shard() else Replicate() for p in logprobs.placements]
    sharded = [i for i, placement in enumerate(placements) if placement.is_shard()]
    if len(sharded) > 1:
        raise ValueError(f"logprobs has placements {tuple(placements)}: expected a shard on one mesh dimension at most")
    s = s._replace(**{name: _whole(name, getattr(s, name), mesh) for name in ("cu_seqlens", "actor_ids")})
    options = options._replace(normalizer=_whole("normalizer", options.normalizer, mesh))
    rows = row_count(logprobs, s.cu_seqlens)
    whole = {"cu_seqlens", "actor_ids"}
    if tuple(s.advantages.shape) in ((rows,), (rows, 1)):
        s = s._replace(advantages=_whole("advantages", s.advantages, mesh).reshape(rows))
        whole.add("advantages")
    streams = {name: x for name, x in s._asdict().items() if x is not None and name not in whole}
    local = {name: _local(name, x, mesh, placements) for name, x in streams.items()}
    # Whole rows of a batch are a part of the stream of all rows.
    if logprobs.dim() == 2 and sharded and placements[sharded[0]].is_shard(0):
        s = s._replace(cu_seqlens=torch.arange(rows + 1, device=local["logprobs"].device) * logprobs.shape[1])
        local = {name: x.reshape(-1) for name, x in local.items()}
    s = s._replace(**local)
    if sharded:
        result = compute_sequence_parallel(s, options, mesh.get_group(sharded[0]))
    else:
        result = compute_policy_loss(s, options, check, backend)
    loss = DTensor.from_local(result.loss, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return result._replace(loss=loss)


ROUTES.update(logprob=_logprob, linear_logprob=_linear_logprob, policy_loss=_policy_loss)


# ---------------------------------------------------------------------------------------------------------------------
# Sharding strategies of the registered ops
# ---------------------------------------------------------------------------------------------------------------------
@functools.cache
def register_shardings() -> None:
    """Register how ``torch.ops.turnwise.logprob``, ``linear_logprob`` and their backwards shard over tokens."""
    if extension is None:  # then the ops don't exist
        return
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole = Replicate()

    def strategy(outputs: list[Any], arguments: tuple[Any, ...], shards: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        """A placement per argument: that of ``shards``, else a replicated tensor, or ``None`` for no tensor."""
        tensors = [hasattr(argument, "tensor_meta") for argument in arguments]
        return outputs, [shards.get(i, whole) if tensor else None for i, tensor in enumerate(tensors)]

    @register_sharding(torch.ops.turnwise.logprob.default)
    def _(*args: Any) -> list[Any]:
        entropy = args[5]
        out = [strategy([whole] * 3, args, {})]
        for dim in range(len(args[1].shape)):
            rows = Shard(dim)
            out.append(strategy([rows, rows, rows if entropy else whole], args, {0: rows, 1: rows}))
        return out

    @register_sharding(torch.ops.turnwise.logprob_backward.default)
    def _(*args: Any) -> list[Any]:
        dims = range(len(args[3].shape))
        shards = [dict.fromkeys(range(6), Shard(dim)) for dim in dims]
        return [strategy([whole], args, {}), *(strategy([s[0]], args, s) for s in shards)]

    @register_sharding(torch.ops.turnwise.linear_logprob.default)
    def _(*args: Any) -> list[Any]:
        rows, entropy, positions = Shard(0), args[8], args[4]
        out = [strategy([whole] * 4, args, {})]
        if positions is None and not args[10]:  # kept logits are those of some tokens
            out.append(strategy([rows, rows, rows if entropy else whole, whole], args, {0: rows, 2: rows}))
        return out

    @register_sharding(torch.ops.turnwise.linear_logprob_backward.default)
    def _(*args: Any) -> list[Any]:
        rows, positions, (need_hidden, need_weight, need_bias) = Shard(0), args[6], args[13:16]
        out = [strategy([whole] * 3, args, {})]
        if positions is None:
            sums = [Partial() if need else whole for need in (need_weight, need_bias)]
            shards = dict.fromkeys((0, 1, 2, 4, 7, 8), rows)
            out.append(strategy([rows if need_hidden else whole, *sums], args, shards))
        return out
