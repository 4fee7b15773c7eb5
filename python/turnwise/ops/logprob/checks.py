"""Check the arguments of the log-probability ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.layout import FLOATS, is_number, is_transformed, whole_number
from turnwise.ops.logprob.tiles import Softmax


def as_autocast(tensor: Any, dtype: torch.dtype) -> Any:
    """Cast as autocast casts an argument of ``torch.nn.functional.linear``. float64 and non-floats stay unchanged."""
    casts = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if casts else tensor


def make_softmax(temperature: float, softcap: float | None, ignore_index: int | None) -> Softmax:
    """Check the options of the softmax."""
    if not (is_number(temperature) and 0 < temperature < float("inf")):
        raise ValueError(f"temperature={temperature!r}: expected a finite number > 0")
    if softcap is not None and not (is_number(softcap) and 0 < softcap < float("inf")):
        raise ValueError(f"softcap={softcap!r}: expected a finite number > 0, or None")
    index = None if ignore_index is None else whole_number(ignore_index)
    if ignore_index is not None and (index is None or not -(2**63) <= index < 2**63):
        raise ValueError(f"ignore_index={ignore_index!r}: expected a whole number of 64 bits, or None")
    return Softmax(float(temperature), None if softcap is None else float(softcap), index)


def check_max_memory(max_memory: object) -> None:
    if max_memory is not None and (not isinstance(max_memory, int) or max_memory < 1):
        raise ValueError(f"max_memory={max_memory!r}: expected a number of bytes, at least 1, or None")


def check_ids(name: str, ids: Tensor, device: torch.device) -> None:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} has dtype {ids.dtype}: expected int64 or int32")
    if ids.device != device:
        raise ValueError(f"{name} is on {ids.device}: expected {device}")


def check_id_values(name: str, ids: Tensor, count: int, ignore_index: int | None = None) -> None:
    """Check that ids are in ``[0, count)`` or ``ignore_index``. Reading them makes a GPU wait."""
    if is_transformed(ids):
        return
    outside = (ids < 0) | (ids >= count)
    wrong = (outside if ignore_index is None else outside & (ids != ignore_index)).nonzero()
    if wrong.numel():
        index = wrong[0].tolist()
        value = int(ids[tuple(index)])
        unnamed = name == "targets" and value < 0 and ignore_index is None
        hint = f". Pass ignore_index={value} to leave out the tokens with this target" * unnamed
        raise ValueError(f"{name}[{', '.join(map(str, index))}]={value}: expected an id in [0, {count}){hint}")


def check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    suffix: str = "",
) -> None:
    """Check shapes, dtypes and devices. Raises an error that names the argument, with ``suffix``."""
    w, b = f"weight{suffix}", f"bias{suffix}"
    for name, tensor in (("hidden", hidden), (w, weight)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected float32, bfloat16, float16 or float64")
        if tensor.dim() != 2:
            axes = "[N, H]" if name == "hidden" else "[V, H]"
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {axes}")
    # Weight against hidden, then bias against weight, then the ids against the rows that they belong to.
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"{w} has shape {tuple(weight.shape)}: expected [V, {hidden.shape[1]}], as hidden")
    if weight.dtype != hidden.dtype:
        raise TypeError(f"{w} has dtype {weight.dtype}: expected {hidden.dtype}, as hidden")
    if weight.device != hidden.device:
        raise ValueError(f"{w} is on {weight.device}: expected {hidden.device}, as hidden")
    if weight.shape[0] == 0:
        raise ValueError(f"{w} has shape {tuple(weight.shape)}: expected at least one row")
    if weight.shape[1] == 0:
        raise ValueError(f"{w} has shape {tuple(weight.shape)}: expected at least one column")
    if bias is not None:
        if not isinstance(bias, Tensor) or not bias.is_floating_point():
            raise TypeError(f"{b}: expected a tensor of floats, got {getattr(bias, 'dtype', type(bias).__name__)}")
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{b} has shape {tuple(bias.shape)}: expected ({weight.shape[0]},), as {w}")
        if bias.device != weight.device:
            raise ValueError(f"{b} is on {bias.device}: expected {weight.device}, as {w}")
    rows, source = hidden.shape[:1], "hidden"
    if positions is not None:
        check_ids("positions", positions, hidden.device)
        if positions.dim() != 1:
            raise ValueError(f"positions has shape {tuple(positions.shape)}: expected [M]")
        rows, source = positions.shape, "positions"
    check_ids("targets", targets, hidden.device)
    if targets.shape != rows:
        raise ValueError(f"targets has shape {tuple(targets.shape)}: expected {tuple(rows)}, as {source}")
