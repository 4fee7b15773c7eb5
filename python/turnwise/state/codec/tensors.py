"""Kinds of torch: tensors, their types and devices, and random generators. It is not imported before its use.

Wrong bytes could corrupt memory, so readers check them: a bool that is neither 0 nor 1, and a generator's place beyond
its numbers.
"""

from __future__ import annotations

import math
import struct
import sys
from typing import Any

from turnwise.state.codec.arrays import shape_of
from turnwise.state.codec.core import FINDERS, READERS, CodecError, Reader, Write, Writer
from turnwise.state.codec.kinds import check_twister

_DTYPES = frozenset(
    {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"}
    | {"float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"}
    | {"float8_e5m2fnuz", "float8_e8m0fnu"}
)
_CPU_NUMBERS = struct.Struct("<624Q")
_CPU_STATE = struct.Struct("<QiiQ")  # seed, numbers left, whether it was seeded, place of the next number


def _write_tensor(value: Any, writer: Writer) -> Any:
    torch = sys.modules["torch"]
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or value.is_meta or value.is_nested or dtype not in _DTYPES:
        raise TypeError(f"a tensor that is not dense, or whose dtype {dtype} has no plain numbers")
    flat = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    parts: dict[str, Any] = {"dtype": dtype, "shape": list(value.shape)}
    if value.device.type != "cpu":
        parts["device"] = str(value.device)
    if value.requires_grad:
        parts["grad"] = True
    return writer.finish(value, "$tensor", parts | {"data": writer.write_data(data)})


def _read_tensor(parts: Any, reader: Reader) -> Any:
    import torch

    dtype = getattr(torch, parts["dtype"]) if parts["dtype"] in _DTYPES else None
    shape = shape_of(parts["shape"])
    data = bytearray(reader.read_data(parts["data"]))
    if dtype is None or len(data) != math.prod(shape) * dtype.itemsize:
        raise CodecError(f"a tensor of shape {shape} and dtype {parts['dtype']!r} does not have {len(data)} bytes")
    if dtype is torch.bool and data.translate(None, b"\0\1"):
        raise CodecError("a bool in a tensor is neither 0 nor 1")
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    device = torch.device(_text(parts.get("device", "cpu")))
    if device.type == "meta":
        raise CodecError("a tensor has no memory")
    value = flat.reshape(shape).to(device)
    return reader.keep(value.requires_grad_(parts.get("grad") is True))


def _write_generator(value: Any, writer: Writer) -> Any:
    data = writer.write_data(value.get_state().numpy())
    return writer.finish(value, "$torch_generator", [str(value.device), data])


def _read_generator(parts: Any, reader: Reader) -> Any:
    import torch

    device, data = parts
    value = torch.Generator(_text(device))
    state = bytearray(reader.read_data(data))
    if value.device.type == "cpu":
        # Torch checks neither that the numbers that are left are there.
        _, left, _, place = _CPU_STATE.unpack_from(state)
        if not 0 < left <= 624 or place + left - 1 > 624:
            raise CodecError("a generator's place lies beyond its numbers")
        check_twister([number & 0xFFFFFFFF for number in _CPU_NUMBERS.unpack_from(state, _CPU_STATE.size)])
    value.set_state(torch.frombuffer(state, dtype=torch.uint8))
    return reader.keep(value)


def _write_device(value: Any, writer: Writer) -> Any:
    return {"$device": str(value)}


def _read_device(parts: Any, reader: Reader) -> Any:
    import torch

    return torch.device(_text(parts))


def _text(plain: Any) -> str:
    if type(plain) is not str:
        raise CodecError(f"{plain!r} is no text")
    return plain


def _write_dtype(value: Any, writer: Writer) -> Any:
    return {"$name": str(value).replace(".", ":")}


def _find(kind: type) -> Write | None:
    """Return the writer of a type of torch, which is imported if there is an object of such a type."""
    torch = sys.modules.get("torch")
    if torch is None or kind.__module__.partition(".")[0] != "torch":
        return None
    kinds: dict[type, Write] = {
        torch.Tensor: _write_tensor,
        torch.Generator: _write_generator,
        torch.device: _write_device,
        torch.dtype: _write_dtype,
    }
    return kinds.get(kind)


FINDERS.insert(0, _find)
READERS |= {"$tensor": _read_tensor, "$torch_generator": _read_generator, "$device": _read_device}
