"""Kinds of numpy and torch: arrays, tensors, their types and random generators. Neither is imported before its use.

Wrong bytes could corrupt memory, so readers check them: objects in an array, a bool that is neither 0 nor 1, a
character that Unicode does not have, and a generator's place beyond its numbers. An array that holds itself would
overflow the stack in arithmetic, and a unit of time of 0 parts ends the process.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from typing import Any

from turnwise.state.codec.core import FINDERS, READERS, CodecError, Reader, Write, Writer, integer
from turnwise.state.codec.kinds import check_twister

_DTYPE = re.compile(
    r"\|b1|\|O|[<>|=][iufcSUV][0-9]{0,10}|[<>|=][mM]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_MAX_EMPTY = 1 << 20
"""Most rows of an array without items: ``tolist`` makes a list of each."""
_MAX = 2**31 - 1
_GENERATORS = frozenset({"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"})
_PLACES = {"pos": 624, "buffer_pos": 4}
"""Entries of the states of numpy's generators that are places in an array, and the largest."""
_POOL, _ENTROPY_BITS = 64, 1 << 16


# ---- types of arrays ------------------------------------------------------------------------------------------------
def _dtype_to_json(dtype: Any) -> Any:
    np = sys.modules["numpy"]
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _dtype_to_json(base), "shape": list(shape)}
    if dtype.names is None:
        if not _DTYPE.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype:
            raise TypeError(f"an array of dtype {dtype}, which has no plain form")
        return dtype.str
    if dtype.hasobject or _overlaps(dtype):
        raise TypeError(f"an array of dtype {dtype}, which has objects in its fields, or fields that overlap")
    parts = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_dtype_to_json(part[0]) for part in parts],
        "offsets": [part[1] for part in parts],
        "titles": [part[2] if len(part) > 2 else None for part in parts],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
        "record": dtype.type is np.record,
    }


def _overlaps(dtype: Any) -> bool:
    """True if fields share bytes: there could be many more of them than bytes."""
    places = sorted((part[1], part[0].itemsize) for part in (dtype.fields[name] for name in dtype.names))
    return any(offset + size > after for (offset, size), (after, _) in itertools.pairwise(places))


def _dtype_of(plain: Any) -> Any:
    import numpy as np

    if type(plain) is str:
        if not _DTYPE.fullmatch(plain):
            raise CodecError(f"{plain!r} is no dtype")
        return np.dtype(plain)
    if "base" in plain:
        dtype = np.dtype((_dtype_of(plain["base"]), shape_of(plain["shape"])))
    else:
        formats = [_dtype_of(each) for each in plain["formats"]]
        itemsize = integer(plain["itemsize"], 0, _MAX)
        for offset, each in zip(plain["offsets"], formats, strict=True):
            integer(offset, 0, itemsize - each.itemsize)
        names = ("names", "offsets", "titles", "itemsize")
        fields: Any = {"formats": formats, **{name: plain[name] for name in names}}
        if not any(plain["titles"]):
            del fields["titles"]
        dtype = np.dtype(fields, align=plain["aligned"] is True)
        if _overlaps(dtype):
            raise CodecError("the fields of a dtype overlap")
        if plain["record"] is True:
            dtype = np.dtype((np.record, dtype))
    if dtype.hasobject:
        raise CodecError("a dtype has objects in its fields")
    return dtype


def _check_items(array: Any) -> None:
    """Refuse bools that are neither 0 nor 1, as numpy counts them by their bytes, and characters beyond Unicode."""
    import numpy as np

    dtype = array.dtype
    if dtype.names is not None:
        for name in dtype.names:
            _check_items(array[name])
    elif dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise CodecError("a bool in an array is neither 0 nor 1")
    elif dtype.kind == "U" and array.nbytes:
        characters = np.ascontiguousarray(array).reshape(-1).view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if characters.max() > sys.maxunicode:
            raise CodecError("a text in an array has a character that does not exist")


def shape_of(plain: Any) -> tuple[int, ...]:
    """Return a shape as a file has it. Raises :class:`CodecError` for one that would fill the memory."""
    shape = tuple(integer(size, 0, sys.maxsize) for size in plain)
    if 0 in shape and math.prod(shape[: shape.index(0)]) > _MAX_EMPTY:
        raise CodecError(f"an array of shape {shape} has too many empty rows")
    return shape


# ---- arrays ---------------------------------------------------------------------------------------------------------
def _write_array(value: Any, writer: Writer) -> Any:
    dtype = value.dtype
    parts: dict[str, Any] = {"dtype": _dtype_to_json(dtype), "shape": list(value.shape)}
    frozen = not value.flags.writeable
    if frozen:
        parts["frozen"] = True
    writer.keep(value)
    if dtype.hasobject:
        return {"$array": parts | {"items": writer.write_all(value.reshape(-1).tolist())}}
    if value.flags.f_contiguous and not value.flags.c_contiguous:
        value, parts["order"] = value.T, "F"
    elif not value.flags.c_contiguous:
        value = value.copy(order="C")
    parts["data"] = writer.write_data(_memory(value), frozen=frozen)
    return {"$array": parts}


def _memory(array: Any) -> Any:
    return memoryview(array.reshape(-1).view("u1")) if array.nbytes else b""


def _read_array(parts: Any, reader: Reader) -> Any:
    import numpy as np

    dtype = _dtype_of(parts["dtype"])
    shape = shape_of(parts["shape"])
    frozen = parts.get("frozen") is True
    if dtype.hasobject:
        items = parts["items"]
        if type(items) is not list or len(items) != math.prod(shape):
            raise CodecError(f"an array of shape {shape} has another number of objects")
        array = reader.keep(np.empty(shape, dtype))
        flat = array.reshape(-1)
        reader.open_arrays.append(array)
        for place, item in enumerate(items):
            value = reader.read(item)
            if any(value is each for each in reader.open_arrays):
                raise CodecError("an array holds itself")
            flat[place] = value
        reader.open_arrays.pop()
        array.setflags(write=not frozen)
        return array
    array = _array_of(reader.read_data(parts["data"]), dtype, shape, "F" if parts.get("order") == "F" else "C")
    if not frozen:
        array = array.copy(order="A")
    return reader.keep(array)


def _array_of(data: bytes | memoryview, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    """Return a read-only view of ``data``. Raises :class:`CodecError` unless its size is exactly right."""
    import numpy as np

    size = memoryview(data).nbytes
    if size != math.prod(shape) * dtype.itemsize or (dtype.itemsize == 0 and math.prod(shape) > 1):
        raise CodecError(f"an array of shape {shape} and dtype {dtype} does not have {size} bytes")
    array = np.ndarray(shape, dtype, data, order=order) if size else np.empty(shape, dtype, order=order)
    array.setflags(write=False)
    _check_items(array)
    return array


def _write_scalar(value: Any, writer: Writer) -> Any:
    np = sys.modules["numpy"]
    array = np.asarray(value)
    if type(array[()]) is not type(value) or array.dtype.hasobject:
        raise TypeError(f"a {type(value).__name__} of dtype {array.dtype}, which has no plain form")
    data = writer.write_data(_memory(array)) if array.nbytes else ""
    return writer.finish(value, "$scalar", [_dtype_to_json(array.dtype), data])


def _read_scalar(parts: Any, reader: Reader) -> Any:
    dtype, data = parts
    array = _array_of(reader.read_data(data), _dtype_of(dtype), (), "C")
    if array.dtype.hasobject:
        raise CodecError("a scalar is an object")
    return reader.keep(array.copy()[()])


def _write_dtype(value: Any, writer: Writer) -> Any:
    return {"$dtype": _dtype_to_json(value)}


# ---- numpy's generators ---------------------------------------------------------------------------------------------
def _write_generator(value: Any, writer: Writer) -> Any:
    return writer.finish(value, "$generator", writer.write(value.bit_generator))


def _read_generator(parts: Any, reader: Reader) -> Any:
    return reader.keep(_numpy_random().Generator(reader.read(parts)))


def _write_random_state(value: Any, writer: Writer) -> Any:
    state = value.get_state(legacy=False)
    parts = [writer.write(value._bit_generator), state["has_gauss"], state["gauss"]]
    return writer.finish(value, "$random_state", parts)


def _read_random_state(parts: Any, reader: Reader) -> Any:
    bits, has_gauss, gauss = parts
    value = _numpy_random().RandomState(reader.read(bits))
    state = value.get_state(legacy=False) | {"has_gauss": integer(has_gauss, 0, 1), "gauss": float(gauss)}
    value.set_state(state)
    return reader.keep(value)


def _write_bits(value: Any, writer: Writer) -> Any:
    seed = getattr(value, "seed_seq", None)
    seed = seed if type(seed) is _numpy_random().SeedSequence else None
    parts = [type(value).__name__, writer.write(seed), writer.write(value.state)]
    return writer.finish(value, "$bits", parts)


def _read_bits(parts: Any, reader: Reader) -> Any:
    random = _numpy_random()
    name, seed, state = parts
    if name not in _GENERATORS:
        raise CodecError(f"{name!r} is no generator")
    seed, state = reader.read(seed), reader.read(state)
    if seed is not None and type(seed) is not random.SeedSequence:
        raise CodecError(f"{seed!r} is no seed")
    value = getattr(random, name)(0 if seed is None else seed)
    _check_state(value.state, state)
    if name == "MT19937":
        check_twister(state["state"]["key"].tolist())
    elif name.startswith("PCG64") and not state["state"]["inc"] & 1:
        raise CodecError("a generator's step is even: it could draw only zeros")
    value.state = state
    return reader.keep(value)


def _check_state(whole: Any, state: Any, name: str = "state") -> None:
    """Check that ``state`` is like ``whole``, and that its places are not beyond its numbers: numpy checks neither."""
    good = type(state) is type(whole)
    if good and type(whole) is dict:
        good = whole.keys() == state.keys()
        for key in whole if good else ():
            _check_state(whole[key], state[key], key)
    elif good and type(whole) is int:
        integer(state, 0, _PLACES.get(name, 2**128 - 1))
    elif good and type(whole) is str:
        good = state == whole
    elif good:
        good = state.dtype == whole.dtype and state.shape == whole.shape
    if not good:
        raise CodecError(f"a generator's {name!r} is wrong")


def _write_seed(value: Any, writer: Writer) -> Any:
    state = value.state
    key, entropy = state["spawn_key"], state["entropy"]
    entropy = entropy.tolist() if hasattr(entropy, "tolist") else entropy
    parts = [state["pool_size"], state["n_children_spawned"], writer.write(key), writer.write(entropy)]
    return writer.finish(value, "$seed", parts)


def _read_seed(parts: Any, reader: Reader) -> Any:
    pool, children, key, entropy = parts
    key, entropy = reader.read(key), reader.read(entropy)
    for part in (*key, *(entropy if isinstance(entropy, list | tuple) else (entropy,))):
        integer(part, 0, 1 << _ENTROPY_BITS)
    make = _numpy_random().SeedSequence
    pool, children = integer(pool, 4, _POOL), integer(children, 0, 2**32)
    return reader.keep(make(entropy, spawn_key=key, pool_size=pool, n_children_spawned=children))


def _numpy_random() -> Any:
    import numpy as np

    return np.random


# ---- which kind a class is of ---------------------------------------------------------------------------------------
def _find(kind: type) -> Write | None:
    """Return the writer of a type of numpy, which is imported if there is an object of such a type."""
    room = kind.__module__.partition(".")[0]
    found = sys.modules.get(room)
    if room == "numpy" and found is not None:
        if issubclass(kind, found.generic):
            return _write_scalar
        if issubclass(kind, found.dtype):
            return _write_dtype
        if kind.__module__.startswith("numpy.random"):
            if kind.__name__ in _GENERATORS:
                return _write_bits
            writers = {"Generator": _write_generator, "RandomState": _write_random_state, "SeedSequence": _write_seed}
            return writers.get(kind.__name__)
        return _write_array if kind is found.ndarray else None
    return None


FINDERS.insert(0, _find)
READERS |= {
    "$array": _read_array,
    "$scalar": _read_scalar,
    "$dtype": lambda parts, reader: _dtype_of(parts),
    "$generator": _read_generator,
    "$random_state": _read_random_state,
    "$bits": _read_bits,
    "$seed": _read_seed,
}
