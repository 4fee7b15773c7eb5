"""Describe and check the token streams of a loss: padded ``[B, T]``, or packed ``[N]`` with ``cu_seqlens``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from turnwise.ops.common.dispatch import forced_backend, warn_caller

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)
MAX_ACTORS = 2**31 - 1


def is_number(value: object) -> bool:
    """True for a number of Python or NumPy, but not for a bool or a tensor."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def whole_number(value: Any) -> int | None:
    """A whole number (Python, NumPy or 0-dim tensor) as an int; ``None`` for anything else."""
    if isinstance(value, Tensor):
        return int(value) if value.dim() == 0 and not (value.is_floating_point() or value.is_complex()) else None
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None


# ---------------------------------------------------------------------------------------------------------------------
# Tensors that kernels can't read
# ---------------------------------------------------------------------------------------------------------------------
def is_transformed(*tensors: Any) -> bool:
    """True if a tensor belongs to a transform of ``torch.func`` (``grad``, ``vmap``, ``jvp``) or carries a tangent of
    forward-mode differentiation. The values of such a tensor can't be read, or are only part of what it holds."""
    dual = forward_ad._current_level >= 0
    if not (dual or torch._C._are_functorch_transforms_active()) or torch.compiler.is_compiling():
        return False
    return any(
        isinstance(tensor, Tensor)
        and (
            _functorch.is_functorch_wrapped_tensor(tensor)
            or (dual and forward_ad.unpack_dual(tensor).tangent is not None)
        )
        for tensor in tensors
    )


_TRANSFORMED = (
    "it is inside a transform of torch.func (grad, vmap, jvp) or under forward-mode differentiation, and the kernels "
    "only read and write memory; use backend='torch', or with ops.backend('torch'): around it"
)
_warned = False


def transform_reason(backend: str | None, *tensors: Any) -> str:
    """The reason why kernels can't serve a call inside ``torch.func``; empty if they can.

    Inside a transform, even the result of a plain tensor belongs to the transform. If the caller names no backend,
    ``torch`` serves and one warning says so.
    """
    global _warned
    if not (torch._C._are_functorch_transforms_active() or is_transformed(*tensors)):
        return ""
    silent = _warned or torch.compiler.is_compiling()
    if backend is None and forced_backend() is None and not silent:
        _warned = True
        warn_caller(f"turnwise.ops runs this call on plain PyTorch: {_TRANSFORMED}")
    return _TRANSFORMED


def check_memory(**tensors: Tensor | None) -> None:
    """Raise ``TypeError`` for a wrapper such as a DTensor, which names a device but has no memory there.

    The compiled module makes this check itself.
    """
    for name, tensor in tensors.items():
        if tensor is None or type(tensor) is Tensor:
            continue
        if tensor.numel() and not tensor.data_ptr():
            raise TypeError(
                f"{name}: expected a tensor with memory of its own, not a wrapper such as a DTensor: "
                "pass x.full_tensor()"
            )


class RowLayout:
    """Map each token to its row, for the plain PyTorch reference: sum over rows, and spread row values to tokens."""

    def __init__(self, tokens: Tensor, cu_seqlens: Tensor | None) -> None:
        self.shape = tokens.shape
        self.count = tokens.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.row: Tensor | None = None
        if cu_seqlens is not None:
            positions = torch.arange(tokens.shape[0], device=tokens.device)
            self.row = torch.searchsorted(cu_seqlens[1:].contiguous().long(), positions, right=True)

    def sum(self, values: Tensor) -> Tensor:
        """Sum per-token ``values`` over each row: ``[B]``."""
        if self.row is None:
            return values.sum(dim=1)
        return torch.zeros(self.count, dtype=values.dtype, device=values.device).index_add(0, self.row, values)

    def max(self, values: Tensor) -> Tensor:
        """The largest of per-token ``values >= 0`` in each row, 0 for an empty one: ``[B]``."""
        if self.row is None:
            return values.amax(dim=1) if values.shape[1] else values.new_zeros(self.count)
        return values.new_zeros(self.count).scatter_reduce(0, self.row, values, "amax")

    def spread(self, values: Tensor) -> Tensor:
        """Repeat row values ``[B]`` at every token of the row. Per-token values pass through."""
        if values.shape == self.shape and (self.row is None or values.shape[0] != self.count):
            return values
        values = values.reshape(self.count)
        return values[:, None].expand(self.shape) if self.row is None else values[self.row]

    def spread_advantages(self, advantages: Tensor) -> Tensor:
        """Repeat advantages of rows at every token; those of tokens pass through."""
        return self.spread(advantages)


class Streams(NamedTuple):
    """The tensors of a policy loss, in the order of the compiled module. ``None`` means not given.

    Token streams have the shape of ``logprobs``. The public functions collect their arguments in one, with the
    normaliser still among the options; :func:`prepare` moves it here.

    Example: ``Streams(logprobs, old_logprobs, advantages, mask)``
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    normalizer: Tensor | None = None  # 0-dim, or [num_actors]
    actor_ids: Tensor | None = None  # [B]
    entropy: Tensor | None = None
    selected: Tensor | None = None  # bool


def trained_tokens(mask: Tensor | None, like: Tensor) -> Tensor:
    """The tokens that train: bool in the shape of ``like``, all of them without a mask."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask != 0


def sees_values(tensor: Tensor) -> bool:
    """True if a check may read the values: on a CPU, and not while torch.compile traces the call."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


# ---------------------------------------------------------------------------------------------------------------------
# Checks of any tensor
# ---------------------------------------------------------------------------------------------------------------------
def check_optional(**tensors: Any) -> None:
    """Raise ``TypeError`` for an argument that is neither a tensor nor ``None``."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def check_floats(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise TypeError(f"{name}: expected a tensor of floats, got {got}")


def check_like(like: str, tensor: Tensor, **others: Tensor) -> None:
    """Check that ``others`` have the shape and the device of ``tensor``, whose name is ``like``."""
    for name, other in others.items():
        if other.shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(other.shape)}: expected {tuple(tensor.shape)}, as {like}")
        if other.device != tensor.device:
            raise ValueError(f"{name} is on {other.device}: expected {tensor.device}, as {like}")


def check_each(name: str, values: Tensor, wrong: Tensor, expected: str) -> None:
    """Raise ``ValueError`` for the first value that ``wrong`` marks. Makes a GPU wait."""
    where = wrong.nonzero()
    if where.numel():
        index = where[0].tolist()
        raise ValueError(f"{name}{index}={values[tuple(index)].item()!r}: expected {expected}")


# ---------------------------------------------------------------------------------------------------------------------
# Checks of streams
# ---------------------------------------------------------------------------------------------------------------------
def row_count(like: Tensor, cu_seqlens: Tensor | None) -> int:
    return like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def check_tensors(s: Streams) -> None:
    """Raise ``TypeError`` for a stream that is not a tensor, or that is ``None`` though required."""
    for stream in s:
        if not (stream is None or isinstance(stream, Tensor)):
            break
    else:
        if s.logprobs is not None and s.old_logprobs is not None and s.advantages is not None:
            return
    for name, stream in zip(Streams._fields, s, strict=True):
        if stream is None and name not in ("logprobs", "old_logprobs", "advantages"):
            continue
        if not isinstance(stream, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(stream).__name__}")


def check_layout(name: str, tokens: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check that the form is padded or packed, and that ``cu_seqlens`` fits it."""
    if cu_seqlens is None:
        if tokens.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(tokens.shape)}: expected [B, T], or [N] with cu_seqlens")
        return
    if tokens.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(tokens.shape)}: expected [N], as cu_seqlens is given")
    check_cu_seqlens(cu_seqlens)
    if cu_seqlens.device != tokens.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}: expected {tokens.device}, as {name}")


def check_cu_seqlens(cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}: expected int32 or int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}: expected [B + 1]")


def check_cu_seqlens_values(cu_seqlens: Tensor, tokens: int | None) -> None:
    """Check that the values start at 0, never decrease and end at ``tokens``. Reading them makes a GPU wait.

    Skips tensors inside a transform of ``torch.func``, which hide their values. So do the checks below.
    """
    if is_transformed(cu_seqlens):
        return
    if int(cu_seqlens[0]) != 0:
        raise ValueError(f"cu_seqlens[0]={int(cu_seqlens[0])}: expected 0")
    falling = (cu_seqlens[1:] < cu_seqlens[:-1]).nonzero()
    if falling.numel():
        row = int(falling[0]) + 1
        raise ValueError(f"cu_seqlens[{row}]={int(cu_seqlens[row])}: expected at least {int(cu_seqlens[row - 1])}")
    if tokens is not None and int(cu_seqlens[-1]) != tokens:
        raise ValueError(f"cu_seqlens[-1]={int(cu_seqlens[-1])}: expected {tokens}, the number of tokens")


def check_mask(mask: Tensor | None, tokens: Tensor, name: str) -> None:
    if mask is None:
        return
    if mask.shape != tokens.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: expected {tuple(tokens.shape)}, as {name}")
    check_mask_type(mask)


def check_mask_type(mask: Tensor) -> None:
    if mask.dtype not in MASKS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in MASKS)
        raise TypeError(f"mask has dtype {mask.dtype}: expected one of {names}. Pass mask != 0")


def count_actors(num_actors: Any) -> int:
    """Convert ``num_actors`` to an int. With ``actor_ids`` it must be a whole number >= 1 and below 2**31."""
    count = whole_number(num_actors)
    if count is None or not 1 <= count <= MAX_ACTORS:
        raise ValueError(f"num_actors={num_actors!r}: expected a count >= 1 and below 2**31, as actor_ids is given")
    return count


def check_mask_values(mask: Tensor) -> None:
    """Check that a mask of floats holds only 0 and 1. Reading it makes a GPU wait."""
    if mask.is_floating_point() and not is_transformed(mask):
        check_each("mask", mask, (mask != 0) & (mask != 1), "0 or 1")


def check_tokens(name: str, tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Check shapes, dtypes and devices of token streams. Raises an error that names the argument."""
    check_layout(name, tokens, cu_seqlens)
    check_mask(mask, tokens, name)
    if mask is not None and mask.device != tokens.device:
        raise ValueError(f"mask is on {mask.device}: expected {tokens.device}, as {name}")


def check_token_values(tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Check the values of ``mask`` and ``cu_seqlens``. Reading them makes a GPU wait."""
    if cu_seqlens is not None:
        check_cu_seqlens_values(cu_seqlens, tokens.shape[0])
    if mask is not None:
        check_mask_values(mask)


def check_advantages(advantages: Tensor, tokens: Tensor, rows: int) -> None:
    if advantages.shape not in ((rows,), (rows, 1), tokens.shape):
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}: expected ({rows},), one per sequence, "
            f"or {tuple(tokens.shape)}, one per token"
        )


def check_actors(actor_ids: Tensor, num_actors: int | None, rows: int) -> None:
    count_actors(num_actors)
    if actor_ids.shape != (rows,):
        raise ValueError(f"actor_ids has shape {tuple(actor_ids.shape)}: expected ({rows},), one per sequence")
    if actor_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"actor_ids has dtype {actor_ids.dtype}: expected int64 or int32")


def check_actor_values(actor_ids: Tensor, num_actors: int) -> None:
    """Check that the ids are in ``[0, num_actors)``. Reading them makes a GPU wait."""
    if not is_transformed(actor_ids):
        outside = (actor_ids < 0) | (actor_ids >= num_actors)
        check_each("actor_ids", actor_ids, outside, f"an id in [0, {num_actors})")


def bounded(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ids, those outside of ``[0, count)`` moved into it, and which those are. What they index gets NaN.

    A GPU's values are not looked at before, and there PyTorch's own index out of range ends all work of the process.
    """
    return ids.clamp(0, max(count - 1, 0)), (ids < 0) | (ids >= count)


def check_streams(s: Streams, num_actors: int | None) -> None:
    """Check shapes, dtypes and devices of every stream. Raises an error that names the stream."""
    lp = s.logprobs
    if lp.dtype not in FLOATS:
        raise TypeError(f"logprobs has dtype {lp.dtype}: expected float32, bfloat16, float16 or float64")
    check_layout("logprobs", lp, s.cu_seqlens)
    for name, stream in (
        ("old_logprobs", s.old_logprobs),
        ("ref_logprobs", s.ref_logprobs),
        ("rollout_logprobs", s.rollout_logprobs),
        ("entropy", s.entropy),
    ):
        if stream is not None and stream.shape != lp.shape:
            raise ValueError(f"{name} has shape {tuple(stream.shape)}: expected {tuple(lp.shape)}, as logprobs")
    rows = row_count(lp, s.cu_seqlens)
    check_advantages(s.advantages, lp, rows)
    check_mask(s.mask, lp, "logprobs")
    if s.actor_ids is not None:
        check_actors(s.actor_ids, num_actors, rows)
    # All streams share a device, and those that hold numbers are floats.
    for name, tensor in s._asdict().items():
        if tensor is None:
            continue
        if tensor.device != lp.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {lp.device}, as logprobs")
        if name not in ("mask", "cu_seqlens", "actor_ids", "selected") and tensor.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected float32, bfloat16, float16 or float64")


def check_stream_values(s: Streams, num_actors: int | None) -> None:
    """Check the values of ``cu_seqlens``, ``mask`` and ``actor_ids``. Reading them makes a GPU wait."""
    check_token_values(s.logprobs, s.mask, s.cu_seqlens)
    if s.actor_ids is not None:
        assert num_actors is not None
        check_actor_values(s.actor_ids, num_actors)
