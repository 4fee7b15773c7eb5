"""Write the objects in States apart from their structure, and read them without running foreign code.

Most leaves are strings, floats, bytes and short tuples. Each of these types has a column of its own, which is written
and read at once. All other leaves are values of the codec::

    {"kinds": "sfsv", "s": ["\\0", 0], "f": 1, "v": [{"$set": [1, 2]}]}     0 and 1 are numbers of buffers
"""

from __future__ import annotations

import array
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from turnwise._C import CheckpointError
from turnwise.state.codec import FLAT, CodecError, Names, Reader, UntrustedNameError, Writer

_COLUMN_OF: dict[type, str] = {str: "s", float: "f", bytes: "b"}
_SEPARATORS = "\0\x1e\x1f"
_SHORT = 32
"""Most items of a tuple with tuples in it that is written by column, where tuples that it holds twice are too."""


# ---- columns --------------------------------------------------------------------------------------------------------
def _column_of(kind: type, leaf: Any) -> str:
    return "t" if kind is tuple and (_is_flat(leaf) or (len(leaf) <= _SHORT and _is_nested(leaf))) else "v"


def _is_flat(values: Iterable[Any]) -> bool:
    return FLAT.issuperset(map(type, values))


def _is_nested(values: tuple[Any, ...]) -> bool:
    return all(_is_flat(item) if type(item) is tuple else type(item) in FLAT for item in values)


def _write_texts(texts: Sequence[str], writer: Writer) -> Any:
    for separator in _SEPARATORS:
        joined = separator.join(texts)
        if joined.count(separator) == len(texts) - 1:
            return [separator, writer.write_data(joined.encode("utf-8", "surrogatepass"), frozen=True)]
    return texts


def _read_texts(parts: Any, reader: Reader) -> list[Any]:
    if len(parts) == 2 and type(parts[1]) is int:
        separator, data = parts
        return str(reader.read_data(data), "utf-8", "surrogatepass").split(separator)
    return _all_of(str, parts)


def _write_floats(floats: Sequence[float], writer: Writer) -> Any:
    return writer.write_data(_little_endian(array.array("d", floats)).tobytes(), frozen=True)


def _read_floats(parts: Any, reader: Reader) -> list[Any]:
    floats = array.array("d")
    floats.frombytes(reader.read_data(parts))
    return _little_endian(floats).tolist()


def _little_endian(floats: array.array[float]) -> array.array[float]:
    if sys.byteorder == "big":
        floats.byteswap()
    return floats


def _write_bytes(pieces: Sequence[bytes], writer: Writer) -> Any:
    return [list(map(len, pieces)), writer.write_data(b"".join(pieces), frozen=True)]


def _read_bytes(parts: Any, reader: Reader) -> list[Any]:
    lengths, data = parts
    data = reader.read_data(data)
    ends = list(itertools.accumulate(_all_of(int, lengths)))
    if min(lengths, default=0) < 0 or ends[-1:] != [memoryview(data).nbytes]:
        raise CodecError("the lengths of its bytes are wrong")
    return [bytes(data[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def _read_tuples(parts: Any, reader: Reader) -> list[Any]:
    if _is_flat(itertools.chain.from_iterable(_all_of(list, parts))):
        return list(map(tuple, parts))
    inner = [item for each in parts for item in each if type(item) not in FLAT]
    if not _is_flat(itertools.chain.from_iterable(_all_of(list, inner))):
        raise CodecError("a column of tuples holds other things")
    return [tuple([tuple(item) if type(item) is list else item for item in each]) for each in parts]


def _all_of(kind: type, parts: Any) -> Any:
    if type(parts) is not list or not {kind}.issuperset(map(type, parts)):
        raise CodecError(f"a column holds other things than {kind.__name__}")
    return parts


_COLUMNS: dict[str, tuple[Callable[[Any, Writer], Any], Callable[[Any, Reader], list[Any]]]] = {
    "s": (_write_texts, _read_texts),
    "f": (_write_floats, _read_floats),
    "b": (_write_bytes, _read_bytes),
    "t": (lambda tuples, writer: tuples, _read_tuples),
    "v": (lambda leaves, writer: writer.write_all(leaves), lambda parts, reader: reader.read_all(parts)),
}


# ---- leaves ---------------------------------------------------------------------------------------------------------
def dump_leaves(leaves: Sequence[Any]) -> tuple[bytes, list[memoryview]]:
    """Return the JSON of ``leaves``, and the memory of arrays, texts and bytes, which the JSON refers to by number."""
    try:
        return _dump(leaves, _column_of)
    except ValueError:  # JSON takes no ints of thousands of digits, which a tuple may hold
        return _dump(leaves, lambda kind, leaf: "v")


def _dump(leaves: Sequence[Any], column_of: Callable[[type, Any], str]) -> tuple[bytes, list[memoryview]]:
    kinds = [
        _COLUMN_OF.get(kind) or column_of(kind, leaf) for kind, leaf in zip(map(type, leaves), leaves, strict=True)
    ]
    buffers: list[memoryview] = []
    writer = Writer(buffers)
    plain: dict[str, Any] = {"kinds": "".join(kinds)}
    present = sorted(set(kinds))
    for each in present:
        column = (
            [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == each] if len(present) > 1 else leaves
        )
        plain[each] = _COLUMNS[each][0](column, writer)
    text = json.dumps(plain, ensure_ascii=False, check_circular=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass"), buffers


def first_unwritable(leaves: Iterable[Any]) -> tuple[Any, Exception] | None:
    """Return the first leaf that can't be written, with the error."""
    for leaf in leaves:
        try:
            dump_leaves([leaf])
        except Exception as error:
            return leaf, error
    return None


def load_leaves(
    text: bytes | memoryview, buffers: Iterable[memoryview], *, allow: Iterable[Any] = (), allow_pickle: bool = False
) -> list[Any]:
    """Load the output of :func:`dump_leaves`. Arrays are views of ``buffers``. ``allow`` lists the caller's classes."""
    reader = Reader(Names(allow, anything=allow_pickle), list(buffers))
    try:
        plain = json.loads(str(text, "utf-8", "surrogatepass"))
        return _join(plain, reader)
    except UntrustedNameError as error:
        raise CheckpointError(
            f"{error}: reading it can run any code, so it was not imported. If that class's code may run: "
            f"load(path, allow=[{error.name}]). If you trust the whole file: load(path, allow_pickle=True)"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # a wrong part can raise any exception
        shown = error if isinstance(error, CodecError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"its objects can't be read: {shown}") from error


def _join(plain: Any, reader: Reader) -> list[Any]:
    """Put the columns together again."""
    kinds = plain.pop("kinds")
    columns = {kind: _COLUMNS[kind][1](parts, reader) for kind, parts in plain.items()}
    if sum(map(kinds.count, columns)) != len(kinds) or any(len(columns[each]) != kinds.count(each) for each in columns):
        raise CodecError("its columns do not have the leaves that it lists")
    if len(columns) == 1:
        return next(iter(columns.values()))
    following: dict[str, Iterator[Any]] = {kind: iter(column) for kind, column in columns.items()}
    return [next(following[kind]) for kind in kinds]


def freeze_leaves(leaves: list[Any]) -> list[Any]:
    """Return the leaves with read-only copies in place of arrays in writable memory."""
    ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)
    return [freeze_array(leaf) if type(leaf) is ndarray and not _read_only(leaf) else leaf for leaf in leaves]


def _read_only(array: Any) -> bool:
    """Return True if the owner of the memory is read-only, such as bytes or memory that Ray shares."""
    if array.flags.writeable:
        return False
    owner = array
    while type(owner) is type(array):
        owner = owner.base
    if type(owner) is memoryview:
        owner = owner.obj
    return owner is not None and memoryview(owner).readonly


def freeze_array(array: Any) -> Any:
    """Return a read-only array with the same values: itself if its memory can't be written to, else a copy.

    A read-only flag is not enough: code that holds the base, or a view of it, could still change every version at once.
    So the copy is stored in a bytes object, which numpy never makes writable.
    """
    import numpy as np

    if array.dtype.hasobject:
        raise TypeError(
            f"an array of dtype {array.dtype}: the store can't look into the objects in it. Use a list, or "
            "Store(arrays='copy'), where each version copies the array and the objects"
        )
    base = array
    while type(base) is np.ndarray:
        base = base.base
    if type(base) is memoryview:  # memory of a file or a pickle
        base = base.obj
    if type(base) is bytes:
        return array
    # Keep the memory order: code that is fast on columns stays fast.
    turned = array.flags.f_contiguous and not array.flags.c_contiguous
    rows = array.T if turned else array
    frozen = np.ndarray(rows.shape, rows.dtype, rows.tobytes())
    return frozen.T if turned else frozen
